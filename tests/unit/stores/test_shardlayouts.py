"""Layouts of shards in the result store: who follows which one, when, and what is refused."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aztask.address.owner import Owner
from aztask.address.shards import ShardCount, ShardLayout, ShardRange
from aztask.errors import BrokerUnavailable, ConfigurationError, EncodeError
from aztask.message.rowsignatures import RowSignatures
from aztask.queues.engine import Database
from aztask.stores import shardlayouts
from aztask.stores.local.rows import SqliteStore
from aztask.stores.records.controls import ControlStore, EntryChange
from aztask.stores.shardlayouts import (
    FREE_SECONDS,
    REFRESH_SECONDS,
    LayoutRows,
    StoredLayouts,
    UnreadableLayout,
    entry_name,
    last_sends,
)
from aztask.support import clock

FOUR, SIXTEEN = ShardRange(0, 4), ShardRange(0, 16)
R = REFRESH_SECONDS


class Time:
    """A clock that goes on only when it is told to, also by who sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.clock = clock.Clock(
            monotonic=lambda: self.now,
            wall=lambda: 1_800_000_000.0 + self.now,
            sleep=self.pass_time,
        )

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


class World:
    """A store, and the programs that use it."""

    def __init__(self, time: Time, database: Database) -> None:
        self.time, self.database = time, database
        self.rows = LayoutRows(self.store())

    def store(self, owner: str = "file", **options: Any) -> ControlStore:
        rows = SqliteStore(self.database, self.time.clock)
        return ControlStore(rows, Owner(owner, "shop"), **options)

    def program(self, count: int = 4, read: int = 0, store: ControlStore | None = None) -> Any:
        """What one program knows. count: the number in its code."""
        shards = {"orders": ShardCount(count, max(count, read), declared=True)}
        made = StoredLayouts(shards)
        made.attach(store or self.store())
        return made

    def announce(self, count: int, *, ordered: bool = False) -> ShardLayout:
        found = self.rows.read("orders")
        assert found is not None
        return self.rows.announce(
            "orders", found.layout.moved(count, ordered=ordered), by="ann"
        ).layout


@pytest.fixture
def world() -> Iterator[World]:
    time, database = Time(), Database(":memory:")
    with clock.replaced(time.clock):
        yield World(time, database)
    database.close()


class Unreachable(LayoutRows):
    """Entries that cannot be read. `calls`: how often that was tried."""

    calls = 0

    def read(self, queue: str) -> Any:
        self.calls += 1
        raise BrokerUnavailable("the store is gone")


def break_store(program: Any) -> Unreachable:
    program._rows = broken = Unreachable(program._rows._store)
    return broken


# -- the first entry -------------------------------------------------------------------------


def test_the_first_program_notes_the_number_of_its_code(world: World) -> None:
    assert world.rows.read("orders") is None
    assert world.program(4).sending("orders", session=False) == FOUR
    found = world.rows.read("orders")
    assert found is not None
    assert (found.layout.sent, found.layout.former, found.layout.epoch) == (FOUR, None, 1)


def test_later_the_number_of_the_code_is_a_wish(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    world.program(4).layout("orders")
    later = world.program(16)
    assert later.sending("orders", session=True) == FOUR
    assert later.layout("orders").reading(later.wish("orders")) == tuple(range(16))
    assert (
        "queue orders has 4 shards, and the code says 16: run aztask queues reshard" in caplog.text
    )


def test_former_shards_of_the_code_are_read_on(world: World) -> None:
    program = world.program(2, read=6)
    layout = program.layout("orders")
    assert (layout.sent, layout.former) == (ShardRange(0, 2), ShardRange(0, 6))
    assert program.sending("orders", session=True) == ShardRange(0, 2)
    program.finish("orders", 1, 0)
    assert program.layout("orders").reading(program.wish("orders")) == tuple(range(6))


def test_a_program_that_may_not_write_goes_by_its_code(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = world.program(4)

    def refused(self: Any, queue: str, layout: ShardLayout) -> None:
        raise ConfigurationError("not allowed to write")

    monkeypatch.setattr(LayoutRows, "make", refused)
    assert program.sending("orders", session=True) == FOUR
    assert world.rows.read("orders") is None


def test_without_entries_the_code_counts(world: World) -> None:
    program = StoredLayouts({"orders": ShardCount(3, 5)})
    program.attach(None)
    assert program.sending("orders", session=True) == ShardRange(0, 3)
    assert program.layout("orders").former == ShardRange(0, 5)
    assert program.unfinished("orders") is None
    program.finish("orders", 1, 0)
    assert not program.has("plain")
    assert program.sending("plain", session=True) == ShardRange(0, 1)


def test_each_broker_has_its_own_layouts(world: World) -> None:
    world.program(4).layout("orders")
    other = world.program(7, store=world.store("other file"))
    assert other.sending("orders", session=True) == ShardRange(0, 7)
    assert world.rows.read("orders").layout.sent == FOUR  # type: ignore[union-attr]


# -- a move ----------------------------------------------------------------------------------


def test_all_senders_change_at_the_same_time(world: World) -> None:
    early, late = world.program(), world.program()
    for each in (early, late):
        each.sending("orders", session=True)
    move = world.announce(16)
    start = move.starts_at - 1_800_000_000.0
    assert start == world.time.now + 2 * R
    while world.time.now < start - 0.1:
        for each in (early, late):
            assert each.sending("orders", session=True) == FOUR
        world.time.pass_time(0.49)
    world.time.now = start + 0.1
    for each in (early, late, world.program()):
        assert each.sending("orders", session=True) == SIXTEEN


def test_a_send_with_a_session_waits_while_the_clock_cannot_tell(world: World) -> None:
    program = world.program()
    program.sending("orders", session=True)
    start = world.announce(16).starts_at - 1_800_000_000.0
    world.time.now = start - 10.0
    assert program.sending("orders", session=True) == FOUR
    world.time.now = start
    assert program.sending("orders", session=True) == SIXTEEN
    assert world.time.now == pytest.approx(start + shardlayouts.MARGIN_SECONDS)
    world.time.now = start
    assert program.sending("orders", session=False) == SIXTEEN
    assert world.time.now == start


def test_a_program_that_has_not_sent_for_long_looks_first(world: World) -> None:
    program = world.program()
    program.sending("orders", session=True)
    world.announce(16)
    world.time.pass_time(3600.0)
    assert program.sending("orders", session=False) == SIXTEEN


def test_a_layout_costs_a_read_for_each_half_of_the_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, reads = world.program(), [0]
    program.layout("orders")
    read = ControlStore.read

    def counting(self: Any, names: Any) -> Any:
        reads[0] += 1
        return read(self, names)

    monkeypatch.setattr(ControlStore, "read", counting)
    for _ in range(600):
        program.sending("orders", session=True)
        program.layout("orders")
        program.unfinished("orders")
        world.time.pass_time(0.1)
    assert reads[0] <= 60.0 / (R / 2)


def test_workers_read_both_until_the_move_ends(world: World) -> None:
    program = world.program()
    program.layout("orders")
    world.announce(2)
    world.time.pass_time(R)
    wish = ShardCount(1, 1)
    assert program.layout("orders").reading(wish) == (0, 1, 2, 3)
    assert program.layout("orders").leaving() == (2, 3)
    assert program.unfinished("orders") is None
    world.time.pass_time(2 * R + FREE_SECONDS)
    program.layout("orders")
    assert program.unfinished("orders") is None, "the last sends of old layouts may come"
    world.time.pass_time(R + 0.1)
    assert program.unfinished("orders") is not None
    assert program.unfinished("orders") is None, "not again at once"
    program.finish("orders", 2, 3)
    other = world.program().layout("orders")
    assert other == program.layout("orders")
    assert (other.reading(wish), other.top) == ((0, 1), 3)


def test_more_shards_leave_none(world: World) -> None:
    world.program().layout("orders")
    move = world.announce(16)
    assert move.leaving() == ()
    assert last_sends(move) == 2 * R
    assert last_sends(replace(move, sent=ShardRange(0, 2))) == 2 * R + FREE_SECONDS


def test_of_a_queue_with_sessions_the_former_shards_come_first(world: World) -> None:
    world.program().layout("orders")
    move = world.announce(16, ordered=True)
    assert (move.sent, move.reading(ShardCount(4, 4))) == (ShardRange(4, 16), (0, 1, 2, 3))
    world.rows.finish("orders", move.epoch, 0)
    ended = world.rows.read("orders").layout  # type: ignore[union-attr]
    assert ended.reading(ShardCount(4, 4)) == tuple(range(4, 20))
    assert ended.past == (FOUR,)
    back = world.announce(2, ordered=True)
    assert back.sent == ShardRange(0, 2)
    assert back.past == (ShardRange(4, 16), FOUR)
    world.rows.finish("orders", back.epoch, 0)
    assert world.announce(5, ordered=True).sent == ShardRange(2, 5)


def test_without_room_for_other_shards_sessions_stay(world: World) -> None:
    layout = ShardLayout(ShardRange(0, 40))
    with pytest.raises(ConfigurationError, match=r"no room for 30 shards .* at most 24"):
        layout.moved(30, ordered=True)
    assert layout.moved(24, ordered=True).sent == ShardRange(40, 24)
    assert layout.moved(64, ordered=False).sent == ShardRange(0, 64)


# -- two operators, and announcements that come too late -------------------------------------


def test_of_two_operators_one_comes_first(world: World) -> None:
    world.program().layout("orders")
    layout = world.rows.read("orders").layout  # type: ignore[union-attr]
    first = world.rows.announce("orders", layout.moved(16, ordered=False), by="ann")
    same = LayoutRows(world.store()).announce("orders", layout.moved(16, ordered=False), by="bob")
    assert same == first
    with pytest.raises(ConfigurationError, match="have been moved in between"):
        world.rows.announce("orders", layout.moved(8, ordered=False), by="bob")


def test_an_announcement_that_comes_too_late_does_not_count(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's program stands still between its look at the clock and its write."""
    program = world.program()
    program.sending("orders", session=True)
    layout = world.rows.read("orders").layout  # type: ignore[union-attr]
    write, stands = ControlStore.write, [1.5 * R]

    def standing(self: Any, changes: Any) -> Any:
        world.time.pass_time(stands.pop() if stands else 0.0)
        made = write(self, changes)
        if not stands:
            stands.append(0.0)
            seen.append(fresh.sending("orders", session=True))
            seen.append(fresh.layout("orders").reading(ShardCount(4, 4)))
        return made

    fresh, seen = world.program(), []  # type: ignore[var-annotated]
    monkeypatch.setattr(ControlStore, "write", standing)
    made = world.rows.announce("orders", layout.moved(16, ordered=True), by="ann")
    assert seen[:2] == [FOUR, (0, 1, 2, 3)]
    assert made.counts
    assert made.layout.starts_at - 1_800_000_000.0 == pytest.approx(world.time.now + 2 * R)


def test_a_store_that_stays_too_slow_is_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.program().layout("orders")
    layout = world.rows.read("orders").layout  # type: ignore[union-attr]
    write = ControlStore.write

    def slow(self: Any, changes: Any) -> Any:
        world.time.pass_time(1.2 * R)
        return write(self, changes)

    monkeypatch.setattr(ControlStore, "write", slow)
    with pytest.raises(BrokerUnavailable, match="takes too long"):
        world.rows.announce("orders", layout.moved(16, ordered=False), by="ann")
    program = world.program()
    assert program.sending("orders", session=True) == FOUR
    world.time.pass_time(3 * R)
    assert program.sending("orders", session=True) == FOUR, "no program ever follows it"
    assert program.unfinished("orders") is None


def test_a_move_ends_once(world: World) -> None:
    world.program().layout("orders")
    move = world.announce(2)
    world.rows.finish("orders", move.epoch, 4)
    after = world.rows.read("orders")
    world.rows.finish("orders", move.epoch, 0)
    world.rows.finish("orders", 17, 0)
    assert world.rows.read("orders") == after


# -- a store that cannot be read -------------------------------------------------------------


def test_sends_with_sessions_fail_when_the_layout_is_too_old(world: World) -> None:
    program = world.program()
    program.sending("orders", session=True)
    broken = break_store(program)
    world.time.pass_time(R - 0.1)
    assert program.sending("orders", session=True) == FOUR
    world.time.pass_time(0.2)
    with pytest.raises(BrokerUnavailable, match=r"which shards queue 'orders' has.*store is gone"):
        program.sending("orders", session=True)
    with pytest.raises(BrokerUnavailable):
        program.layout("orders", session=True)
    assert program.layout("orders").sent == FOUR
    assert broken.calls == 1, "it is not asked again for each send"


def test_other_sends_go_on_for_a_while(world: World) -> None:
    program = world.program()
    program.sending("orders", session=False)
    broken = break_store(program)
    world.time.pass_time(FREE_SECONDS - 0.1)
    assert program.sending("orders", session=False) == FOUR
    world.time.pass_time(0.2)
    with pytest.raises(BrokerUnavailable, match="Try again when it answers"):
        program.sending("orders", session=False)
    program._rows = LayoutRows(broken._store)
    world.time.pass_time(R)
    assert program.sending("orders", session=True) == FOUR


def test_a_program_that_knows_no_layout_does_not_guess(world: World) -> None:
    program = world.program()
    break_store(program)
    for _ in range(2):
        with pytest.raises(BrokerUnavailable, match="nothing was sent or received"):
            program.sending("orders", session=False)


@pytest.mark.parametrize(
    "change",
    [
        {"v": 3},
        {"queue": "others"},
        {"sent": [0, 65]},
        {"sent": [0, 0]},
        {"sent": [60, 5]},
        {"sent": [0]},
        {"sent": [0, 2, [0, 0]]},
        {"sent": [0, 2, [0, 64]]},
        {"v": 2, "homes": 5},
        {"former": [True, 2]},
        {"epoch": -1},
        {"epoch": "1"},
        {"starts_at": math.nan},
        {"starts_at": "soon"},
        {"past": 5},
        {"kept": 65},
    ],
)
def test_a_damaged_entry_is_not_followed(world: World, change: dict[str, Any]) -> None:
    world.program().layout("orders")
    name = entry_name("orders")
    (entry,) = world.store().read([name])
    assert entry is not None
    record = {**json.loads(entry.data), **change}
    world.store().write([EntryChange(name, json.dumps(record).encode(), entry.tag)])
    with pytest.raises(UnreadableLayout, match="orders"):
        world.rows.read("orders")
    with pytest.raises(BrokerUnavailable, match="orders"):
        world.program().sending("orders", session=False)
    assert world.rows.repair("orders", ShardLayout(FOUR, epoch=1))
    assert not world.rows.repair("orders", ShardLayout(SIXTEEN, epoch=1))
    assert world.program().sending("orders", session=True) == FOUR


def test_an_entry_that_is_not_signed_is_not_followed(world: World) -> None:
    keys = RowSignatures([b"a signing key with enough characters"], old=False)
    signed = world.program(store=world.store(signatures=keys))
    assert signed.sending("orders", session=True) == FOUR
    forged = LayoutRows(world.store())
    found = forged.read("orders")
    assert found is not None
    forged.announce("orders", found.layout.moved(2, ordered=False), by="mallory")
    world.time.pass_time(R / 2 + 1)
    assert signed.sending("orders", session=True) == FOUR
    world.time.pass_time(R)
    with pytest.raises(BrokerUnavailable, match="another program wrote it"):
        signed.sending("orders", session=True)


def test_an_error_of_another_kind_is_not_hidden(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Any, queue: str) -> Any:
        raise EncodeError("wrong")

    monkeypatch.setattr(LayoutRows, "read", failing)
    with pytest.raises(BrokerUnavailable, match="wrong"):
        world.program().sending("orders", session=False)


def test_threads_that_read_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """One holds the file's lock in a transaction, another one is about to read the entry."""
    database = Database(str(tmp_path / "q.db"))
    store = ControlStore(SqliteStore(database, clock.SYSTEM_CLOCK), Owner("file", "shop"))
    program = StoredLayouts({"orders": ShardCount(4, 4, declared=True)})
    program.attach(store)
    reading = threading.Event()

    class Waiting(LayoutRows):
        def read(self, queue: str) -> Any:
            reading.set()
            return super().read(queue)

    program._rows = Waiting(store)
    with database.transaction():
        other = threading.Thread(target=program.layout, args=("orders",), daemon=True)
        other.start()
        assert reading.wait(20)
        assert program.sending("orders", session=True) == FOUR
    other.join(20)
    assert not other.is_alive()
    database.close()
