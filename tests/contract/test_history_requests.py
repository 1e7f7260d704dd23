"""What a page about the history costs on Azure Tables with 500 workers: at most 20 requests."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from services import FINE, Blobs, Outcome, Request, Tables, tables_results
from simulated import line

from aztask import App
from aztask.operate.history import history, marks
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.stores.records.base import WorkerRecord
from aztask.stores.records.history import HOURS, TASKS, WORKERS, HistoryHead, digest, history_of
from aztask.stores.records.tables.store import TABLE
from aztask.stores.records.tallies import (
    DAY_SLOT,
    HOUR,
    MOST_BYTES,
    Author,
    Day,
    Hour,
    Tally,
    pack_day,
    pack_hour,
)
from aztask.stores.rows import Place
from aztask.support.clock import SYSTEM_CLOCK

WORKERS_ALL = 500
MOST_REQUESTS = 20
PAGE_BYTES = 4 << 20
"""Tables sends at most so much in one answer, and at most 1,000 rows; the model knows the rows."""
NOW = 1_800_000_000 // (24 * HOUR) * 24 * HOUR + 12.1 * HOUR
BEGINS = int(NOW // HOUR) * HOUR


class Counting:
    """A fate that counts the requests."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def of(self, request: Request) -> Outcome:
        self.seen[request.operation] += 1
        return FINE


def an_hour(begins: int) -> Hour:
    """What is in it does not change the requests: their bytes are taken as the most that may be."""
    return Hour(Author("w", begins, "1.0"), {("orders", "task1"): {begins: Tally(succeeded=9)}})


@pytest.fixture(scope="module")
def fleet() -> tuple[App, Counting, dict[str, int]]:
    """500 workers in the two hours that are not merged, and 30 days of 100 tasks."""
    service, fate = Tables(SYSTEM_CLOCK), Counting()
    service.create(TABLE)
    results = tables_results(service, Blobs(SYSTEM_CLOCK), line(fate=fate))
    app = App("shop", broker=LocalBroker(Database(":memory:")), results=results)
    kept = history_of(app.results)
    assert kept is not None
    bytes_of: Counter[str] = Counter()

    def put(part: str, key: str, packed: object) -> None:
        values = packed._asdict()  # type: ignore[attr-defined]
        kept.rows.put(Place(kept.owner, part, key), values)
        bytes_of[part] += MOST_BYTES if part == HOURS else len(values["data"])

    for begins in (BEGINS - HOUR, BEGINS):
        packed = pack_hour(an_hour(begins), begins)
        for worker in range(WORKERS_ALL):
            put(HOURS, f"{begins // HOUR:07d}.{digest(str(worker))}", packed)
    today = int(NOW // (24 * HOUR))
    tally = Tally(9, 1, 2, 0, 0, dict.fromkeys(range(20), 3), dict.fromkeys(range(20), 4))
    for number in range(100):
        day = Day(("orders", f"task{number}"))
        for hour in range(24):
            day.replace(hour, {hour * HOUR + each: tally for each in range(0, HOUR, DAY_SLOT)})
        packed_day = pack_day(day)
        for back in range(31):
            put(TASKS, f"{today - back:06d}.{digest(*day.name)}", packed_day)
        for back in range(2):
            for worker in range(5 * number, 5 * number + 5):
                put(WORKERS, f"{today - back:06d}.{digest(str(worker))}", packed_day)
    for worker in range(WORKERS_ALL):
        results.heartbeat(WorkerRecord(f"w{worker}", NOW - 900, NOW, ("q",), 0, 5))
    head = HistoryHead(BEGINS // HOUR - 1).values()
    kept.rows.put(Place(kept.owner, HOURS, "head"), head)
    return app, fate, bytes_of


@pytest.mark.parametrize(
    ("window", "by"),
    [
        *(("hour", "task"), ("hour", "worker"), ("day", "queue"), ("day", "worker")),
        *(("week", "task"), ("30d", "task")),
    ],
)
def test_a_page_about_the_history_costs_at_most_20_requests(
    fleet: tuple[App, Counting, dict[str, int]], window: str, by: str
) -> None:
    app, fate, stored = fleet
    fate.seen.clear()
    view = history(app, window, by, now=NOW)
    marks(app, view)
    assert view.figure.ended > 0
    read = stored[HOURS] if window in ("hour", "day") else 0
    read += stored[TASKS] * 2 // 31 if window == "day" and by != "worker" else 0
    read += stored[WORKERS] if window == "day" and by == "worker" else 0
    requests = fate.seen.total() + math.ceil(read / PAGE_BYTES)
    assert requests <= MOST_REQUESTS


@pytest.mark.parametrize("only", [{}, {"queue": "orders"}])
@pytest.mark.parametrize(("now", "hours"), [(NOW, 2), (BEGINS + HOUR - 1, 1)])
def test_no_hour_is_asked_for_that_the_window_does_not_have(
    fleet: tuple[App, Counting, dict[str, int]], only: dict[str, str], now: float, hours: int
) -> None:
    """Hours that answer with their short rows are one question, the others are one, and so is what
    waited."""
    app, fate, _ = fleet
    fate.seen.clear()
    assert history(app, "hour", "task", only, now=now).figure.ended > 0
    pages = 2 + (hours == 2 and not only)
    assert fate.seen.total() == pages, fate.seen
