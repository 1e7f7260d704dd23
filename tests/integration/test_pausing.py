"""Pauses of queues and tasks, obeyed by real workers, old and new."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Site, site_in, wait_until
from ledger_app import snoozing, work
from limits_app import serve
from session_app import step

from aztask.errors import ResultTimeout
from aztask.limits.control import Controls, Scope
from aztask.stores.events import Event
from aztask.stores.events.event import from_line
from aztask.stores.records.base import State
from aztask.stores.records.controls import EntryChange, controls_of

OBEYED = 5.0
SOON = {"LEDGER_PAUSE": "0.3"}


def controls(site: Site) -> Controls:
    store = controls_of(site.app().results)
    assert store is not None
    return Controls(store)


def events(site: Site, kind: str) -> list[Event]:
    found = [from_line(line) for line in lines(site)]
    return [event for event in found if event is not None and event.event == kind]


def lines(site: Site) -> list[bytes]:
    """The lines of all event files, open ones too."""
    files = [path for path in site.events.rglob("*") if path.is_file()]
    return [line for path in files for line in path.read_bytes().splitlines()]


@pytest.fixture
def soon(tmp_path: Path) -> Iterator[Site]:
    """A site whose workers put off for a moment only."""
    with site_in(tmp_path / "site", extra=SOON) as made:
        yield made


def test_a_paused_task_waits_over_kills_and_restarts_and_nothing_is_counted(soon: Site) -> None:
    app, paused = soon.app(), controls(soon)
    paused.pause(Scope.TASK, [snoozing.name], time.time())
    waiting = app.send(snoozing.name, ["a", 5], task_id="a")
    first = soon.worker("-c", "1")
    assert app.send(work.name, ["b"]).get(timeout=20) == "b", "others run"
    wait_until(lambda: events(soon, "put_off"), 10, "it is put off")
    first.kill()
    first.wait()
    second = soon.worker("-c", "1")
    assert app.send(work.name, ["c"]).get(timeout=20) == "c"
    time.sleep(1.0)
    assert not soon.lines("start", "a"), "a new worker obeys, too"
    paused.resume_all()
    assert waiting.get(timeout=20) == 5, "all five snoozes are left: put-offs do not count"
    assert soon.counts("start")["a"] == 6
    assert second.stop() == 0, second.log
    assert "put off" in second.log, "the summary counts them"
    reasons = {event.reason for event in events(soon, "put_off")}
    assert reasons == {f"task {snoozing.name} is paused"}
    states = [run.state for run in app.results.history("a")]
    assert states == [State.SNOOZED] * 5 + [State.SUCCEEDED]


def test_a_paused_queue_is_left_alone_by_all_workers_within_five_seconds(site: Site) -> None:
    app = site.app()
    workers = [site.worker("-Q", "default,bulk", "-c", "1", "--prefetch", "4") for _ in range(2)]
    first = [app.send(work.name, [f"a{n}"], queue="bulk") for n in range(4)]
    assert [each.get(timeout=20) for each in first] == ["a0", "a1", "a2", "a3"]
    controls(site).pause(Scope.QUEUE, ["bulk"], time.time())
    time.sleep(OBEYED)
    late = [app.send(work.name, [f"b{n}"], queue="bulk") for n in range(4)]
    assert app.send(work.name, ["c"]).get(timeout=20) == "c", "the other queue goes on"
    with pytest.raises(ResultTimeout):
        late[0].get(timeout=0.5)
    stats = app.broker.stats("bulk")
    assert (stats.active, stats.leased) == (4, 0)
    controls(site).resume(Scope.QUEUE, ["bulk"])
    assert [each.get(timeout=20) for each in late] == ["b0", "b1", "b2", "b3"]

    def changes(what: str) -> int:
        found = [event.reason or "" for event in events(site, "control_changed")]
        return sum(f"queue bulk is {what}" in each for each in found)

    wait_until(lambda: changes("resumed") == 2, 15, "both have noticed the end of the pause")
    assert [worker.stop() for worker in workers] == [0, 0]
    assert changes("paused") == 2


def test_what_was_prefetched_is_given_back_once_and_counts_no_start(soon: Site) -> None:
    app, site = soon.app(), soon
    worker = site.worker("-c", "1", "--prefetch", "8")
    running = app.send(work.name, ["long", 3.0])
    wait_until(lambda: site.lines("start"), 15, "the pool is up")
    waiting = [app.send(work.name, [f"w{n}"]) for n in range(5)]
    wait_until(lambda: app.broker.stats("default").leased == 6, 15, "all are held")
    controls(site).pause(Scope.QUEUE, ["default"], time.time())
    wait_until(lambda: app.broker.stats("default").leased == 1, OBEYED, "they are given back")
    assert running.get(timeout=20) == "long", "what runs goes on"
    assert not [line for line in site.lines("start") if line.key.startswith("w")]
    controls(site).resume_all()
    assert [each.get(timeout=20) for each in waiting] == [f"w{n}" for n in range(5)]
    for each in waiting:
        (run,) = app.results.history(each.id)
        assert run.starts == 1
    assert worker.stop() == 0, worker.log


def test_a_paused_task_of_a_session_keeps_its_place(tmp_path: Path) -> None:
    with site_in(tmp_path / "site", module="session_app", extra=SOON) as site:
        app, paused = site.app(), controls(site)
        app.queue("orders", sessions=True, lease=2.0)
        paused.pause(Scope.TASK, [step.name], time.time())
        worker = site.worker("-Q", "orders", "-c", "2")
        sent = [
            app.send(step.name, [number], queue="orders", session=session)
            for number in range(3)
            for session in ("a", "b")
        ]
        time.sleep(2.5)  # longer than the lease: it is renewed
        assert not site.lines("start")
        paused.resume_all()
        assert [each.get(timeout=20) for each in sent] == [0, 0, 1, 1, 2, 2]
        for session in ("a", "b"):
            keys = [line.key for line in site.lines("start") if line.key.startswith(session)]
            assert keys == [f"{session}/{number}" for number in range(3)]
        assert worker.stop() == 0, worker.log


def test_a_worker_that_cannot_read_what_is_paused_receives_nothing_until_it_can(
    soon: Site,
) -> None:
    app, site = soon.app(), soon
    store = controls_of(app.results)
    assert store is not None
    store.write([EntryChange("control", b"damaged")])
    sent = app.send(work.name, ["a"])
    worker = site.worker("-c", "1")
    wait_until(lambda: "cannot read what is paused" in worker.log, 15, "it says so")
    time.sleep(1.0)
    assert not site.lines("start")
    controls(site).resume_all()
    assert sent.get(timeout=20) == "a"
    assert store.read(["control"]) == [None], "nothing is paused"
    store.write([EntryChange("control", b"damaged again")])
    time.sleep(1.5)
    assert app.send(work.name, ["b"]).get(timeout=20) == "b", "the last known state stands"
    assert worker.stop() == 0, worker.log


def test_a_paused_tenant_waits_over_kills_and_others_run(tmp_path: Path) -> None:
    with site_in(tmp_path / "site", module="limits_app", extra=SOON) as site:
        app, paused = site.app(), controls(site)
        first = site.worker("-c", "2", "--pool", "threads")
        assert app.send(serve.name, ["acme", "before"]).get(timeout=20) == "before"
        paused.pause(Scope.TENANT, ["customer=acme"], time.time())
        time.sleep(1.0)
        waiting = [app.send(serve.name, ["acme", f"a{n}"]) for n in range(3)]
        others = [app.send(serve.name, ["bolt", f"b{n}"]) for n in range(3)]
        assert [each.get(timeout=20) for each in others] == ["b0", "b1", "b2"]
        wait_until(lambda: len(events(site, "put_off")) >= 3, 10, "they are put off")
        first.kill()
        first.wait()
        second = site.worker("-c", "2", "--pool", "threads")
        assert app.send(serve.name, ["dune", "c"]).get(timeout=20) == "c"
        assert not [line for line in site.lines("start") if line.key.startswith("a")]
        paused.resume(Scope.TENANT, ["customer=acme"])
        assert [each.get(timeout=20) for each in waiting] == ["a0", "a1", "a2"]
        assert second.stop() == 0, second.log
        assert set(site.counts("start").values()) == {1}
        reasons = {event.reason for event in events(site, "put_off")}
        assert reasons == {"tenant customer=acme is paused"}
        for each in waiting:
            (run,) = app.results.history(each.id)
            assert (run.state, run.starts, run.key.hop) == (State.SUCCEEDED, 1, 0)
