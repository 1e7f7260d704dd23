"""Rates that hold for all workers together, on real workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness import Site, site_in, wait_until
from limits_app import app as limits_app
from limits_app import fifty, five, five_until, free, once, spend, spend_and_hold, ten, tenant

from aztask.limits.control import Controls, Scope
from aztask.limits.declaration import change_of
from aztask.limits.rates import RateState
from aztask.stores.records.base import State
from aztask.stores.records.controls import controls_of


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with site_in(tmp_path / "site", module="limits_app") as made:
        yield made


def most_in(times: list[float], period: float) -> int:
    """The most starts in any half-open period."""
    times = sorted(times)
    return max(sum(at <= each < at + period for each in times[n:]) for n, at in enumerate(times))


def most_at_once(site: Site, ended: dict[int, float] | None = None) -> int:
    """The most tasks that ran at the same time.

    ended: when a pool process was certainly gone, by its number, if it did not end its task itself.
    """
    ends = {(line.pid, line.key): line.at for line in site.lines("end")}
    changes = []
    for line in site.lines("start"):
        end = ends.get((line.pid, line.key), (ended or {}).get(line.pid))
        assert end is not None, f"{line} has no end"
        changes += [(line.at, 1), (end, -1)]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


def free_in(site: Site, cost: int) -> float:
    """Seconds until a start of this cost may happen; of the limit "tokens"."""
    limit, store = limits_app.limits["tokens"], controls_of(site.app().results)
    assert limit.rate is not None
    assert store is not None
    store = store.of(replace(store.owner, app=limits_app.name))
    (found,) = store.read([limit.entry("")])
    assert found is not None
    now = store.time().at
    return RateState.from_data(found.data).opens(limit.rate, cost, now) - now


def test_two_workers_never_run_more_than_five_and_nothing_is_counted(site: Site) -> None:
    app = site.app()
    sent = [app.send(five.name, [f"{number}", 0.1], task_id=f"{number}") for number in range(40)]
    workers = [site.worker("-c", "4") for _ in range(2)]
    assert [each.get(timeout=60) for each in sent] == [f"{number}" for number in range(40)]
    assert most_at_once(site) <= 5
    for number in range(40):
        (run,) = app.results.history(f"{number}")
        assert (run.state, run.key.hop, run.starts) == (State.SUCCEEDED, 0, 1)
    assert [worker.stop() for worker in workers] == [0, 0], workers[0].log


def test_two_workers_keep_the_rate_in_order_and_nothing_is_counted(site: Site) -> None:
    app = site.app()
    # five seconds of work: the last ones are put off even where the workers start slowly
    keys = [f"{number:03}" for number in range(250)]
    sent = [app.send(fifty.name, [key], task_id=key) for key in keys]
    workers = [site.worker("-c", "2") for _ in range(2)]
    assert [each.get(timeout=60) for each in sent] == keys
    starts = site.lines("start")
    assert len(starts) == 250
    assert most_in([line.at for line in starts], 1.0) <= 50
    for key in keys:
        (run,) = app.results.history(key)
        assert (run.state, run.key.hop, run.starts) == (State.SUCCEEDED, 0, 1)
    assert [worker.stop() for worker in workers] == [0, 0], workers[0].log
    assert any("put off" in worker.log for worker in workers)


def test_a_changed_limit_holds_for_workers_that_run_and_for_new_ones_until_its_reset(
    site: Site,
) -> None:
    app, limit = site.app(), limits_app.limits["five"]
    store = controls_of(app.results)
    assert store is not None
    controls = Controls(store)
    workers = [site.worker("-c", "8")]
    app.send(five.name, ["first", 0.01]).get(timeout=60)
    controls.change_limit(change_of(limits_app.name, limit, store.time().at, concurrency=1))
    wait_until(lambda: "limit five has concurrency 1" in workers[0].log, 30, "it obeys")
    workers.append(site.worker("-c", "8"))
    sent = [app.send(five.name, [f"one{number}", 0.2]) for number in range(6)]
    for each in sent:
        each.get(timeout=60)
    assert most_at_once(site) == 1
    wait_until(lambda: "limit five has concurrency 1" in workers[1].log, 30, "the other, too")
    controls.change_limit(change_of(limits_app.name, limit, store.time().at))
    for worker in workers:
        wait_until(lambda: "the numbers of its declaration again" in worker.log, 30, "reset")  # noqa: B023
    sent = [app.send(five.name, [f"many{number}", 0.5]) for number in range(20)]
    for each in sent:
        each.get(timeout=60)
    assert 1 < most_at_once(site) <= 5


def test_a_tenant_with_many_tasks_does_not_delay_another(site: Site) -> None:
    app = site.app()
    for number in range(200):
        app.send(tenant.name, ["noisy", f"noisy-{number}"])
    worker = site.worker("-c", "2")
    free_one = app.send(free.name, ["free"])
    quiet = app.send(tenant.name, ["quiet", "quiet"])
    assert free_one.get(timeout=30) == "free"
    assert quiet.get(timeout=30) == "quiet"
    noisy = [line for line in site.lines("start") if line.key.startswith("noisy")]
    assert len(noisy) < 30
    worker.kill()


def test_an_at_most_once_task_keeps_its_limit_and_is_not_lost(site: Site) -> None:
    app = site.app()
    sent = [app.send(once.name, [f"{number}"]) for number in range(70)]
    worker = site.worker("-c", "4")
    assert [each.get(timeout=30) for each in sent] == [f"{number}" for number in range(70)]
    assert most_in([line.at for line in site.lines("start")], 1.0) <= 50
    assert worker.stop() == 0, worker.log


def test_a_stopping_worker_gives_back_what_waits_and_counts_no_start(site: Site) -> None:
    app = site.app()
    sent = [app.send(ten.name, [f"{number:02}"]) for number in range(30)]
    sent += [app.send(five.name, [f"held-{number}", 1.5]) for number in range(10)]
    worker = site.worker("-c", "8")
    wait_until(lambda: site.lines("end"), 30, "it is busy")
    assert worker.stop() == 0, worker.log
    stats = app.broker.stats("default")
    assert stats.leased == 0
    ended = len(site.lines("start"))
    assert stats.living == len(sent) - ended
    for each in sent:
        for run in app.results.history(each.id):
            assert (run.state is State.SUCCEEDED, run.starts) in ((True, 1), (False, 0))


def test_a_pause_also_holds_for_those_that_wait_for_a_permit(site: Site, tmp_path: Path) -> None:
    app, over = site.app(), tmp_path / "over"
    for number in range(8):
        app.send(five_until.name, [f"{number}", str(over)])
    worker = site.worker("-c", "8")
    wait_until(lambda: len(site.lines("start")) == 5, 30, "five run, three wait in hand")
    store = controls_of(app.results)
    assert store is not None
    Controls(store).pause(Scope.TASK, [five_until.name], time.time())
    wait_until(lambda: " is paused" in worker.log, 30, "it obeys")
    over.touch()
    wait_until(lambda: len(site.lines("end")) == 5, 30, "the five have ended")
    time.sleep(1.5)
    assert len(site.lines("start")) == 5
    worker.kill()


def test_what_was_estimated_too_high_is_used_by_the_next_ones(site: Site) -> None:
    """Eight tasks are estimated at 2,400 of 1,200 a minute, and use 240."""
    app = site.app()
    keys = [f"{number}" for number in range(8)]
    sent = [app.send(spend.name, [key, 300, 30, 0.2], task_id=key) for key in keys]
    workers = [site.worker("-c", "2") for _ in range(2)]
    began = time.monotonic()
    assert sorted(each.get(timeout=90) for each in sent) == keys
    assert time.monotonic() - began < 60.0, "their estimates need 90 seconds"
    assert [worker.stop() for worker in workers] == [0, 0], workers[0].log


def test_a_limit_with_a_cost_and_one_of_permits_are_taken_together(site: Site) -> None:
    app = site.app()
    sent = [app.send(spend_and_hold.name, [f"{n}", 40, 0.3]) for n in range(12)]
    workers = [site.worker("-c", "6") for _ in range(2)]
    assert [each.get(timeout=90) for each in sent] == [f"{n}" for n in range(12)]
    assert most_at_once(site) <= 5
    assert [worker.stop() for worker in workers] == [0, 0], workers[0].log
