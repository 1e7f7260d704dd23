"""What a worker counts, writes into the history, and merges once an hour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rowmodel import ModelStore
from runtimes import Noting, make_runtime
from still import Still

from aztask import App
from aztask.address.owner import NO_OWNER
from aztask.errors import BrokerUnavailable
from aztask.queues.base import QueueStats
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.stores.records.backlogs import Backlogs
from aztask.stores.records.base import State
from aztask.stores.records.history import GRACE, LATE_HOURS, TASKS, HistoryStore
from aztask.stores.records.tallies import (
    HOUR,
    LONGEST_NAME,
    MOST_SERIES,
    OTHERS,
    Author,
    Tally,
    total,
)
from aztask.stores.rows import Place, Values
from aztask.version import __version__
from aztask.worker.upkeep.heartbeat import Heartbeat
from aztask.worker.upkeep.housekeeping import Housekeeping
from aztask.worker.upkeep.recording import (
    LOCAL_SECONDS,
    LOOK_SECONDS,
    MOST_LOOK_SECONDS,
    SPREAD_SECONDS,
    BacklogLooks,
    HistoryWriter,
    Recorder,
    Recording,
)

NOW = 1_800_000_000.0 // HOUR * HOUR + 600.0


@dataclass
class Bench:
    """A recorder and a writer over rows in memory. away: the store does not answer."""

    away: bool = False

    def __post_init__(self) -> None:
        self.time = Still(NOW)
        self.store = ModelStore(self.time)  # type: ignore[arg-type]
        self.history = HistoryStore(self.store, NO_OWNER)
        self.put, self.history.rows.put = self.history.rows.put, self._put  # type: ignore[method-assign]
        self.recorder = Recorder(self.time)  # type: ignore[arg-type]
        self.writer = HistoryWriter(Author("w", 0, "1.0"), "w!1", self.time)  # type: ignore[arg-type]
        self.writes = 0

    def recording(self) -> Recording:
        """That of a worker of one queue."""
        looks = BacklogLooks(LocalBroker(Database(":memory:")), ["orders"], self.time)  # type: ignore[arg-type]
        author = Author("w", 0, "1.0")
        return Recording(self.recorder, author, "w!1", looks, self.time, 0.0)  # type: ignore[arg-type]

    def _put(self, place: Place, values: Values) -> None:
        if self.away:
            raise BrokerUnavailable("the store is away")
        self.writes += 1
        self.put(place, values)

    def write(self) -> None:
        self.writer.give(self.recorder.take())
        self.writer.write(self.history)

    def stored(self) -> dict[tuple[str, str], Tally]:
        found: dict[tuple[str, str], Tally] = {}
        for each in self.history.hours(0, 10**7 - 1):
            for name, tallies in each.hour.series.items():
                found.setdefault(name, Tally()).add(total(tallies.values()))
        return found


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_everything_is_counted_in_its_field(bench: Bench) -> None:
    states = [State.SUCCEEDED, State.SUCCEEDED, State.FAILED, State.RETRYING]
    for state in (*states, State.SNOOZED, State.CANCELLED, State.EXPIRED):
        bench.recorder.ended("orders", "pay", state, 0.5)
    bench.recorder.ended("orders", "pay", State.FAILED)  # it did not run
    bench.recorder.waited("orders", "pay", 0.001)
    bench.recorder.lost("orders", "pay")
    bench.write()
    assert bench.stored() == {("orders", "pay"): Tally(2, 2, 1, 3, 1, {1: 1}, {36: 7})}
    assert not bench.recorder


def test_a_slot_is_ten_seconds_and_a_row_an_hour(bench: Bench) -> None:
    for seconds in (0.0, 9.9, 10.0, HOUR - 600.0):
        bench.time.now = NOW + seconds
        bench.recorder.ended("orders", "pay", State.SUCCEEDED)
    bench.write()
    found = bench.history.hours(0, 10**7 - 1)
    slots = [
        {int(at - NOW): tally.succeeded for at, tally in each.hour.series["orders", "pay"].items()}
        for each in found
    ]
    assert slots == [{0: 2, 10: 1}, {HOUR - 600: 1}]
    assert bench.writes == 2


def test_a_row_has_what_was_counted_before(bench: Bench) -> None:
    for number in range(3):
        bench.recorder.ended("orders", "pay", State.SUCCEEDED)
        bench.write()
        assert bench.writes == number + 1
    assert bench.stored()["orders", "pay"].succeeded == 3
    bench.write()
    assert bench.writes == 3  # it did nothing since


def test_what_could_not_be_written_is_written_later(bench: Bench) -> None:
    bench.away = True
    for _ in range(2):
        bench.recorder.ended("orders", "pay", State.SUCCEEDED)
        with pytest.raises(BrokerUnavailable):
            bench.write()
    bench.time.now += 3 * HOUR
    bench.recorder.ended("orders", "pay", State.FAILED)
    with pytest.raises(BrokerUnavailable):
        bench.write()
    bench.away = False
    bench.write()
    assert bench.stored() == {("orders", "pay"): Tally(succeeded=2, failed=1)}


def test_what_is_half_a_day_late_is_dropped(bench: Bench) -> None:
    """The other rows of its hour may be deleted before it is merged again."""
    bench.recorder.ended("orders", "pay", State.SUCCEEDED)
    bench.time.now += LATE_HOURS * HOUR
    bench.recorder.ended("orders", "pay", State.FAILED)
    bench.write()
    assert bench.stored() == {("orders", "pay"): Tally(failed=1)}


def test_names_that_a_stranger_makes_up_do_not_fill_the_memory(bench: Bench) -> None:
    for number in range(3 * MOST_SERIES):
        bench.recorder.ended("orders", f"made-up-{number}" + "x" * 1000, State.FAILED)
    bench.write()
    (hour,) = bench.writer._hours.values()
    assert len(hour.series) == 2 * MOST_SERIES + 1
    assert max(len(name) for pair in hour.series for name in pair) == LONGEST_NAME
    stored = bench.stored()
    assert total(stored.values()).failed == 3 * MOST_SERIES
    assert stored["orders", OTHERS].failed == 2 * MOST_SERIES


class Nothing:
    """A pool in which nothing runs."""

    def running(self) -> Sequence[Any]:
        return ()


def test_housekeeping_writes_every_ten_seconds_and_merges_once_an_hour(tmp_path: Path) -> None:
    time = Still(NOW)
    place = f"local://{tmp_path}/q.db"
    app = App("shop", broker=place, results=place, version="shop-7")
    app.broker.declare("default")
    runtime = make_runtime(app, clock=time, queues=("default",), schedules=False)
    runtime.journal.recorder = recorder = Recorder(time)  # type: ignore[arg-type]
    heartbeat = Heartbeat(runtime, Nothing())  # type: ignore[arg-type]
    chores = Housekeeping(runtime, heartbeat, Noting())
    assert app.results is not None
    history = HistoryStore(app.results.rows, app.owner)  # type: ignore[attr-defined]

    def written() -> int:
        hours = history.hours(0, 10**7 - 1)
        return sum(sum(map(len, each.hour.series.values())) for each in hours)

    def turn(seconds: float) -> None:
        time.now += seconds
        recorder.ended("orders", "pay", State.SUCCEEDED)
        chores.tick(time.now)
        while chores.busy:
            runtime.mailbox.run()

    try:
        turn(0.0)
        assert written() == 1
        turn(LOCAL_SECONDS - 0.5)
        assert written() == 1
        turn(0.5)
        assert written() == 2
        turn(HOUR - 610.0 + GRACE - 1.0)  # the next hour has begun, and nothing is merged
        assert history.following() == 0
        turn(SPREAD_SECONDS + 2.0)
        assert history.following() == NOW // HOUR + 1
        (worker,) = app.results.workers()
        assert worker.release == f"{__version__} shop-7"
        authors = {each.hour.author for each in history.hours(0, 10**7 - 1)}
        assert {each.release for each in authors} == {worker.release}
        assert Backlogs(history).newest(time.now) == {"default": int(time.now)}
        (day,) = [day for _, day in history.days(TASKS, 0, 10**6 - 1)]
        assert total(day.hours.values()).succeeded == 3
        recorder.ended("orders", "pay", State.SUCCEEDED)
        chores.stop()  # what is left is written
        assert total(each for _, each in _tallies(history)).succeeded == 6
    finally:
        chores.stop()
        runtime.mailbox.close()
        app.close()


def _tallies(history: HistoryStore) -> list[tuple[int, Tally]]:
    hours = history.hours(0, 10**7 - 1)
    series = [tallies for each in hours for tallies in each.hour.series.values()]
    return [pair for tallies in series for pair in tallies.items()]


class Counter:
    """A broker of which the test says how much waits. None: it does not answer."""

    def __init__(self, **waiting: int | None) -> None:
        self.waiting = waiting
        self.asked: list[str] = []

    def stats(self, queue: str) -> QueueStats:
        self.asked.append(queue)
        count = self.waiting[queue]
        if count is None:
            raise BrokerUnavailable("no answer")
        return QueueStats(queue, count, 0, 0, 0, 0)


def test_one_worker_looks_once_a_minute_and_the_others_less_and_less_often() -> None:
    bench = Bench()
    broker: Any = Counter(orders=5, mail=2)
    first, second = (BacklogLooks(broker, ["orders", "mail"], bench.time) for _ in range(2))  # type: ignore[arg-type]
    pauses = []
    for minute in range(1, 5):
        first.look(bench.history)
        assert first.pause == LOOK_SECONDS
        assert broker.asked == minute * ["orders", "mail"]
        bench.time.now += 20.0
        second.look(bench.history)
        pauses.append(second.pause)
        bench.time.now += LOOK_SECONDS - 20.0
    assert pauses == [120.0, 240.0, MOST_LOOK_SECONDS, MOST_LOOK_SECONDS]
    assert broker.asked == 4 * ["orders", "mail"]
    bench.time.now += LOOK_SECONDS  # the first one has died
    second.look(bench.history)
    assert second.pause == LOOK_SECONDS
    found = {day.queue: day for _, day in Backlogs(bench.history).days(0, 2**32, brief=False)}
    assert {queue: [*day.minutes.values()] for queue, day in found.items()} == {
        "orders": [5] * 5, "mail": [2] * 5
    }  # fmt: skip


def test_a_queue_that_does_not_tell_is_a_gap_and_harms_no_other() -> None:
    bench = Bench()
    broker: Any = Counter(orders=None, mail=2)
    looks = BacklogLooks(broker, ["orders", "mail"], bench.time)  # type: ignore[arg-type]
    looks.look(bench.history)
    assert [*Backlogs(bench.history).newest(NOW)] == ["mail"]
    broker.waiting["orders"] = 7
    bench.time.now += LOOK_SECONDS
    looks.look(bench.history)
    assert sorted(Backlogs(bench.history).newest(NOW)) == ["mail", "orders"]


class AwayStore:
    """A result store whose rows cannot be opened while it is away."""

    remote = False
    owner = NO_OWNER

    def __init__(self, store: ModelStore) -> None:
        self.away = True
        self._store = store

    @property
    def rows(self) -> AwayStore:
        return self

    def of(self, kind: Any) -> Any:
        if self.away:
            raise BrokerUnavailable("the store is away")
        return self._store.of(kind)


def test_the_loop_opens_no_store_and_nothing_is_lost_until_it_is_open() -> None:
    bench = Bench()
    results: Any = AwayStore(bench.store)
    recording = bench.recording()
    for number in range(2):
        bench.recorder.ended("default", "step", State.SUCCEEDED, 0.5)
        write = recording.write_due(results, number * LOCAL_SECONDS)
        assert write is not None
        with pytest.raises(BrokerUnavailable):
            write()
    merge = recording.merge_due(results, 0.0)
    assert merge is not None
    with pytest.raises(BrokerUnavailable):
        merge()
    results.away = False
    write()
    assert bench.stored()["default", "step"].succeeded == 2


def test_what_a_store_that_is_away_for_long_leaves_in_memory_has_a_bound() -> None:
    bench = Bench()
    results: Any = AwayStore(bench.store)
    recording = bench.recording()
    for number in range(3 * LATE_HOURS):
        for _ in range(3):
            bench.recorder.ended("default", "step", State.SUCCEEDED, 0.5)
            bench.time.now += HOUR / 3
            write = recording.write_due(results, number * HOUR)
            if write is not None:
                with pytest.raises(BrokerUnavailable):
                    write()
    assert not recording._writer._given
    assert len(recording._writer._hours) <= LATE_HOURS + 1
    results.away = False
    write = recording.write_due(results, 4 * LATE_HOURS * HOUR)
    assert write is not None
    write()
    assert 3 * (LATE_HOURS - 1) <= bench.stored()["default", "step"].succeeded <= 3 * LATE_HOURS
