"""What every retry strategy does on every broker, asserted on real workers."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from harness import Site, wait_until
from ledger_app import flaky, retry_later, snoozing

from aztask.errors import TaskFailed
from aztask.queues.base import Peeked
from aztask.queues.delivery import Settled
from aztask.settlement import Complete
from aztask.stores.records.base import State

ALL = ("resubmit", "abandon", "lease-timeout", "hold", "defer")
UNTIMED = ("abandon", "lease-timeout")


def started(site: Site, key: str) -> list[float]:
    """When each run of `key` began."""
    return [line.at for line in site.lines("start", key)]


def gaps(site: Site, key: str) -> list[float]:
    """Seconds between the runs of `key`."""
    return [later - sooner for sooner, later in pairwise(started(site, key))]


def left(site: Site) -> int:
    """Messages that are anywhere but in the dead letters."""
    stats = site.app().broker.stats("default")
    if stats.total is not None:
        return stats.total
    return sum(each or 0 for each in (stats.active, stats.leased, stats.scheduled, stats.deferred))


def runs_again_and_ends(
    site: Site, strategies: Sequence[str], lease: float, *arguments: str
) -> None:
    """Two failures and a success, failures without end, snoozes, and a delay that is asked for.

    One worker for all. It allows two starts without an outcome: that is not what counts retries.
    """
    app = site.app()
    for each in strategies:
        app.send(f"{flaky.name}-{each}", [f"{each}-a", 2], task_id=f"{each}-a")
        app.send(f"{flaky.name}-{each}", [f"{each}-dead", 99], task_id=f"{each}-dead")
        app.send(f"{snoozing.name}-{each}", [f"{each}-s", 2, 0.4], task_id=f"{each}-s")
        app.send(f"{retry_later.name}-{each}", [f"{each}-later", 0.6], task_id=f"{each}-later")
    worker = site.worker(
        *arguments, LEDGER_STRATEGIES=",".join(strategies), LEDGER_MAX_DELIVERIES="2"
    )
    for each in strategies:
        assert app.result(f"{each}-a").get(timeout=30) == 2
        assert app.result(f"{each}-s").get(timeout=20) == 2
        assert app.result(f"{each}-later").get(timeout=20)
        with pytest.raises(TaskFailed, match=f"failure 3 of {each}-dead"):
            app.result(f"{each}-dead").get(timeout=30)
    wait_until(lambda: left(site) == 0, 10, "all is settled")
    assert_dead(site, len(strategies))
    runs = {"a": 3, "dead": 4, "s": 3, "later": 2}
    assert site.counts("start") == {
        f"{each}-{key}": times for each in strategies for key, times in runs.items()
    }
    for each in strategies:
        assert min(gaps(site, f"{each}-s")) >= 0.4, each
        assert min(gaps(site, f"{each}-later")) >= 0.6, each
        if each == "lease-timeout":
            # the first gap is shorter: the lease also covered the start of the pool
            assert min(gaps(site, f"{each}-dead")[1:]) >= lease * 0.9
    assert worker.stop() == 0, worker.log


def assert_dead(site: Site, count: int) -> None:
    """So many messages are dead, for the reason that their retries are used up."""
    dead = site.app().broker.peek("default", dead_letter=True)
    assert [each.dead_letter_reason for each in dead] == ["retries-exhausted"] * count
    for each in dead:
        assert "failed 4 of 4 runs" in (each.dead_letter_description or "")


def runs_again_without_a_result_store(
    site: Site, strategies: Sequence[str], *arguments: str, crash: bool = False
) -> None:
    """The failures are counted all the same. crash: the first worker dies in the first run."""
    app = site.app()
    for each in strategies:
        app.send(f"{flaky.name}-{each}", [each, 99], task_id=each)
    environment = {"LEDGER_STRATEGIES": ",".join(strategies), "LEDGER_RESULTS": ""}
    if crash:
        site.worker(*arguments, **environment, AZTASK_FAILPOINT="sent:KILL").wait()
    worker = site.worker(*arguments, **environment)

    def dead() -> int:
        return len(app.broker.peek("default", dead_letter=True))

    wait_until(lambda: dead() == len(strategies), 40, "all are dead")
    wait_until(lambda: left(site) == 0, 10, "all is settled")
    assert_dead(site, len(strategies))
    assert site.counts("start").keys() == set(strategies)
    for each, runs in site.counts("start").items():
        assert runs == 4 or (crash and runs == 5), f"{each}: {runs} (a crash is no failure)"
    assert worker.stop() == 0, worker.log


def the_brokers_own_dead_letter_is_noticed(site: Site, strategy: str, *arguments: str) -> None:
    """The queue's own limit is 2: the message fails twice and is dead before our limit is reached.

    One worker sees it fail, another one, started later, notices; its event stands alone.
    """
    app = site.app()
    app.send(flaky.name, ["dead", 99], task_id="dead")
    first = site.worker(*arguments, LEDGER_STRATEGY=strategy)
    wait_until(lambda: app.broker.peek("default", dead_letter=True), 30, "it is dead")
    assert app.result("dead").state == "retrying"
    assert first.stop() == 0, first.log
    workers = [site.worker(*arguments) for _ in range(2)]
    with pytest.raises(TaskFailed, match="MaxDeliveryCountExceeded"):
        app.result("dead").get(timeout=20)
    for worker in workers:
        assert worker.stop() == 0, worker.log
    events = "".join(path.read_text() for path in site.events.rglob("*.jsonl"))
    assert events.count('"event":"dead_lettered"') == 1
    assert site.counts("start") == {"dead": 2}


def killed_with_a_failure_recorded(site: Site, strategy: str, *arguments: str) -> None:
    """The failure counts once, shows meanwhile, and the message runs again with its lease's end."""
    app = site.app()
    app.send(flaky.name, ["a", 1], task_id="a")
    first = site.worker(*arguments, LEDGER_STRATEGY=strategy, AZTASK_FAILPOINT="recorded:KILL")
    assert first.wait() == -signal.SIGKILL, first.log
    (record,) = app.results.history("a")
    assert record.state == State.RETRYING
    assert record.outcome is not None
    assert record.outcome.error == "failure 0 of a"
    second = site.worker(*arguments, LEDGER_STRATEGY=strategy)
    assert app.result("a").get(timeout=20) == 1, "one failure was counted"
    wait_until(lambda: left(site) == 0, 10, "all is settled")
    assert site.counts("start")["a"] == 2
    assert second.stop() == 0, second.log


def killed_with_a_deferred_message(site: Site, step: str, *arguments: str) -> None:
    """Whatever is left of the message and its pointer: it runs twice in all, and nothing stays."""
    app = site.app()
    app.send(flaky.name, ["a", 1], task_id="a")
    first = site.worker(*arguments, LEDGER_STRATEGY="defer", AZTASK_FAILPOINT=f"{step}:KILL")
    assert first.wait() == -signal.SIGKILL, first.log
    second = site.worker(*arguments, LEDGER_STRATEGY="defer")
    assert app.result("a").get(timeout=20) == 1
    wait_until(lambda: left(site) == 0, 20, "message and pointer are settled")
    assert site.counts("start")["a"] == 2
    assert site.counts("end")["a"] == 1
    assert [record.state for record in app.results.history("a")] == [State.SUCCEEDED]
    assert not app.broker.peek("default", dead_letter=True)
    assert second.stop() == 0, second.log


def the_pointer(site: Site) -> Peeked:
    """The pointer that waits in the queue."""
    app = site.app()
    wait_until(lambda: app.result("a").state == State.RETRYING, 20, "it has failed")
    wait_until(lambda: pointers(site), 10, "its pointer is sent")
    return pointers(site)[0]


def pointers(site: Site) -> list[Peeked]:
    """What waits in the queue and is a pointer."""
    page = site.app().broker.peek("default")
    return [each for each in page if "aztask-pointer" in each.envelope.headers]


def two_pointers_run_it_once(site: Site, *arguments: str) -> None:
    """The message's lease decides; the pointer that comes too late ends."""
    app = site.app()
    app.send(retry_later.name, ["a", 2.5], task_id="a")
    worker = site.worker(*arguments, LEDGER_STRATEGY="defer")
    pointer = the_pointer(site)
    again = replace(pointer.envelope, message_id="the pointer again", delay=0.0)
    app.broker.send("default", [again])
    assert app.result("a").get(timeout=20)
    assert max(gaps(site, "a")) < 2.5, "the second pointer was not delayed"
    wait_until(lambda: left(site) == 0, 15, "both pointers have ended")
    assert site.counts("start")["a"] == 2
    assert not app.broker.peek("default", dead_letter=True)
    assert worker.stop() == 0, worker.log


def deferred_is_gone(site: Site, lease: float, *arguments: str) -> None:
    """Somebody else settled the deferred message: its pointer ends, without a run."""
    app = site.app()
    app.send(retry_later.name, ["a", 2.0], task_id="a")
    worker = site.worker(*arguments, LEDGER_STRATEGY="defer")
    position = the_pointer(site).envelope.headers["aztask-pointer"]
    receiver = app.broker.receiver("default", lease=lease)
    found = []
    wait_until(lambda: found or found.extend(receiver.receive_deferred([position])), 5, "deferred")
    assert receiver.settle([(found[0], Complete())]) == [Settled()]
    receiver.close()
    wait_until(lambda: left(site) == 0, 15, "the pointer has ended")
    assert site.counts("start")["a"] == 1
    assert not app.broker.peek("default", dead_letter=True)
    assert worker.stop() == 0, worker.log
