"""`aztask move`: what is counted and refused before, the journal, and what a moved message is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from aztask import App, RetryPolicy
from aztask.address.shards import ShardLayout
from aztask.errors import ConfigurationError, LeaseLost
from aztask.message.envelope import DEAD_DESCRIPTION, DEAD_REASON, Envelope
from aztask.operate.action import audit
from aztask.operate.jobs import Job, packed_job
from aztask.operate.ledger import JOBS, Ledger, ledger_of, newest_first
from aztask.operate.move import journal as journals
from aztask.operate.move.journal import MoveJournal, MoveTaken
from aztask.operate.move.messages import QueueMove, Ready
from aztask.operate.move.move import move, plan
from aztask.operate.resharding import layouts, reshard
from aztask.settlement import DeadLetter, moved_dead_letter
from aztask.steps.waits import ParkedRun, waits_of
from aztask.stores.records.base import Start, WorkerRecord
from aztask.stores.rows import Change

KEY = "k" * 32


def app_in(folder: Path, name: str = "old", **options: object) -> App:
    address = f"local://{folder}/{name}.db"
    app = App("shop", broker=address, results=f"local://{folder}/results.db", **options)  # type: ignore[arg-type]
    app.task(name="shop.add", retry=RetryPolicy(max_retries=0))(lambda value: value)
    return app


@pytest.fixture
def old(tmp_path: Path) -> Iterator[App]:
    app = app_in(tmp_path)
    yield app
    app.close()


@pytest.fixture
def new(old: App, tmp_path: Path) -> Iterator[App]:
    app = old.at(f"local://{tmp_path}/new.db")
    yield app
    app.close()


def ledger(app: App) -> Ledger:
    found = ledger_of(app.results)
    assert found is not None
    return found


# -- what is refused -------------------------------------------------------------------------


def test_nothing_moves_while_a_worker_of_the_old_address_is_alive(old: App, new: App) -> None:
    assert old.results is not None
    now = time.time()
    old.results.heartbeat(WorkerRecord("w", now, now, ("default",), 0, 0))
    assert plan(old, new).problems == ["workers of the old address are alive (1): stop them first"]
    with pytest.raises(ConfigurationError, match="nothing was moved"):
        move(old, new)
    old.results.heartbeat(WorkerRecord("w", now, now, ("default",), 0, 0, stopped=True))
    assert plan(old, new).problems == []


def test_nothing_moves_while_a_job_is_open(old: App, new: App) -> None:
    now = ledger(old).now()
    job = Job("replay", {}, "ann", "here", "replay 2 dead letters", 2, now, now)
    ledger(old).write(JOBS, newest_first(now), packed_job(job), None)
    assert "a job is open" in plan(old, new).problems[0]


def test_nothing_moves_while_a_program_has_set_a_message_aside(old: App, new: App) -> None:
    old.broker.send("inbox", [Envelope(b"x", message_id="x")])
    with old.receive("inbox", wait=1.0) as lease:
        position = lease.defer()
    (problem,) = plan(old, new).problems
    assert "queue inbox has 1 deferred message that no task waits for" in problem
    with old.receive("inbox", deferred=position) as lease:
        lease.complete()
    assert plan(old, new).problems == []


def test_all_shards_of_a_queue_are_moved(tmp_path: Path) -> None:
    """Also those beyond the number in the code, and also after the note was read again."""
    old = app_in(tmp_path)
    old.queue("parts", shards=2)
    new = old.at(f"local://{tmp_path}/new.db")
    broker: Any = old.broker
    broker.declare("parts")
    reshard(old, "parts", 6).act()
    assert "queue parts is being moved to other shards" in plan(old, new).problems[0]
    broker.layouts.rows.finish("parts", 2, 0)
    broker.layouts._queues["parts"].known = None
    for number in range(60):
        old.send("shop.add", [number], queue="parts")
    assert all(each.living for each in broker.shard_stats("parts"))
    old.close()
    moving = move(old, new)
    moving.act()
    assert old.broker.stats("parts").living == 0
    assert new.broker.stats("parts").living == 60
    found = layouts(old)["parts"]
    assert isinstance(found, ShardLayout)
    assert found.sent.count == 6
    old.close()
    new.close()


def test_one_address_is_not_moved_to_itself(old: App, tmp_path: Path) -> None:
    same = old.at(f"local://{tmp_path}/old.db")
    with pytest.raises(ConfigurationError, match="the same broker"):
        plan(old, same)
    same.close()


def test_signed_messages_are_not_moved_without_keys(tmp_path: Path) -> None:
    signed = app_in(tmp_path, signing_keys=[KEY])
    signed.send("shop.add", [1])
    signed.close()
    app = app_in(tmp_path)
    there = app.at(f"local://{tmp_path}/new.db")
    with pytest.raises(ConfigurationError, match="no signing key"):
        move(app, there)
    assert app.broker.stats("default").active == 1
    there.close()
    app.close()


# -- what is counted -------------------------------------------------------------------------


def test_the_plan_counts_and_changes_nothing(old: App, new: App) -> None:
    for number in range(3):
        old.send("shop.add", [number])
    old.send("shop.add", [1], delay=60.0, task_id="later")
    found = plan(old, new)
    counts = {each.what: each.count for each in (*found.messages, *found.rows)}
    assert counts["waiting messages"] == 3
    assert counts["scheduled messages"] == 1
    assert counts["runs and results"] == 1
    assert found.count == 4
    assert old.broker.stats("default").living == 4
    action = move(old, new)
    moved = action.act(by="ann")
    assert (moved.left, action.done) == ({}, 4)
    stats = new.broker.stats("default")
    assert (stats.active, stats.scheduled) == (3, 1)
    (entry,) = audit(new).entries
    assert (entry.action, entry.by, entry.done) == ("move", "ann", 4)


# -- messages --------------------------------------------------------------------------------


def test_a_signed_message_is_signed_anew_and_keeps_its_session_and_expiry(tmp_path: Path) -> None:
    app = app_in(tmp_path, signing_keys=[KEY], environment="prod")
    app.queue("orders", sessions=True)
    expires = time.time() + 600
    app.send("shop.add", [1], queue="orders", session="s", task_id="a", expires=600.0)
    there = app.at(f"local://{tmp_path}/new.db")
    assert move(app, there).act().left == {}
    (peeked,) = there.broker.peek("orders")
    message = app.message_in(peeked.envelope, "orders", peeked.position)
    assert (message.id, message.session, message.generation) == ("a", "s", 0)
    assert message.expires == pytest.approx(expires, abs=5.0)
    there.close()
    app.close()


def test_a_scheduled_message_that_becomes_due_before_it_is_cancelled_is_one_run(
    old: App, new: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    old.send("shop.add", [1], task_id="a", delay=1.5)
    send = QueueMove._send

    def slowly(self: QueueMove, ready: Sequence[Ready]) -> None:
        send(self, ready)
        time.sleep(2.0)

    monkeypatch.setattr(QueueMove, "_send", slowly)
    assert move(old, new).act().left == {}
    first, second = new.broker.peek("default")
    assert first.envelope.message_id == second.envelope.message_id
    keys = [old.message_in(each.envelope, "default", 1).key for each in (first, second)]
    assert keys == [("a", 0, 0)] * 2


def test_what_was_a_dead_letter_says_so() -> None:
    assert moved_dead_letter(Envelope(b"")) is None
    marked = Envelope(b"", {DEAD_REASON: "broken", DEAD_DESCRIPTION: "in two"})
    assert moved_dead_letter(marked) == DeadLetter("broken", "in two")
    assert moved_dead_letter(replace(marked, headers={DEAD_REASON: 7})) == DeadLetter("7")


def test_a_held_lease_does_not_hand_out_a_moved_dead_letter(old: App) -> None:
    marked = Envelope(b"x", {DEAD_REASON: "broken"}, message_id="x")
    old.broker.send("inbox", [marked, Envelope(b"y", message_id="y")])
    with old.receive("inbox", wait=2.0) as lease:
        assert lease.body == b"y"
        lease.complete()
    (dead,) = old.broker.peek("inbox", dead_letter=True)
    assert (dead.envelope.body, dead.dead_letter_reason) == (b"x", "broken")


# -- rows ------------------------------------------------------------------------------------


def test_a_timer_is_not_cancelled_by_the_number_that_it_had_elsewhere(old: App, new: App) -> None:
    """At the new broker that number may be another message's."""
    there, here = waits_of(new.results, new.codec), waits_of(old.results, old.codec)
    assert here is not None
    assert there is not None
    run = ParkedRun("a", "shop.add", "default", 0, 1, 1.0, 2.0, (), b"payload", timer=77)
    assert here.park(run, 2.0)
    before = here.parked("a")
    assert before is not None
    assert before.timer == 77
    move(old, new).act()
    found = there.parked("a")
    assert found is not None
    assert (found.timer, found.payload, found.due) == (0, b"payload", 2.0)


@pytest.mark.parametrize("data", [b"", b"\xc1", msgpack.packb([0, "a"]), msgpack.packb("a")])
def test_a_damaged_row_of_a_parked_run_moves_as_it_is(old: App, new: App, data: bytes) -> None:
    here, there = waits_of(old.results, old.codec), waits_of(new.results, new.codec)
    assert here is not None
    assert there is not None
    here.park(ParkedRun("a", "shop.add", "default", 0, 1, 1.0, 2.0, (), b"payload"), 2.0)
    (row,) = here._rows.get([here._place("a", "p")])
    assert row is not None
    here._rows.write(Change(row.place, {**row.values, "data": data}, row))
    move(old, new).act()
    (moved,) = there._rows.get([there._place("a", "p")])
    assert moved is not None
    assert moved.values["data"] == data


# -- the journal -----------------------------------------------------------------------------


def test_one_process_at_a_time_works_on_a_move(
    old: App, new: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "LEASE_SECONDS", 0.2)
    first = MoveJournal(ledger(new), old.owner)
    second = MoveJournal(ledger(new), old.owner)
    first.begin()
    with pytest.raises(MoveTaken, match="is moving this already"):
        second.begin()
    first.plan([("a", 0, 1)])
    time.sleep(0.3)
    second.begin()
    assert (second.token, second.planned) == (first.token, {("a", 0, 1)})
    with pytest.raises(MoveTaken, match="another process works"):
        first.plan([])


def test_a_move_after_one_that_ended_has_ids_of_its_own(old: App, new: App) -> None:
    journal = MoveJournal(ledger(new), old.owner)
    journal.begin()
    token = journal.token
    journal.end(done=False)
    journal.begin()
    assert journal.token == token
    journal.end(done=True)
    journal.begin()
    assert journal.token != token


def test_a_damaged_journal_is_replaced(old: App, new: App) -> None:
    ledger(new).put(journals.MOVES, f"from-{old.owner.of_broker.mark}", b'{"v": 1, "token": 3}')
    journal = MoveJournal(ledger(new), old.owner)
    journal.begin()
    assert journal.token


def test_a_run_whose_message_may_not_have_left_is_never_given_back_again(
    old: App, new: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy at the new address may run, so its row is that worker's."""
    given: list[list[str]] = []
    assert new.results is not None
    start = new.results.start

    def noted(starts: Sequence[Start]) -> object:
        given.append([each.key.task_id for each in starts])
        return start(starts)

    monkeypatch.setattr(new.results, "start", noted)
    for name in "ab":
        old.send("shop.add", [1], task_id=name)
    journal = MoveJournal(ledger(new), old.owner)
    journal.begin()
    receiver = old.broker.receiver("default", lease=60.0)
    first, second = receiver.receive(2, 2.0)
    settle = receiver.settle

    def lost(settlements: Sequence[Any]) -> list[Any]:
        if settlements[0][0].position == first.position:
            return [LeaseLost("it was away")]
        return list(settle(settlements))

    monkeypatch.setattr(receiver, "settle", lost)

    def deliver(of: MoveJournal, found: Any) -> QueueMove:
        mover = QueueMove(old, new, "default", of, sessions=False)
        ready = mover._ready(found, receiver)
        assert ready is not None
        mover._deliver([replace(ready, started=True)])
        return mover

    new.broker.declare("default")
    assert deliver(journal, first).moved.unsure == 1
    assert deliver(journal, second).moved.unsure == 0
    deliver(journal, first)
    journal.end(done=False)
    for _ in range(2):  # two processes that go on
        later = MoveJournal(ledger(new), old.owner)
        later.begin()
        later.plan([("c", 0, 0)])
        deliver(later, first)
        later.end(done=False)
    assert given == [["a"], ["b"]]
    receiver.close()
