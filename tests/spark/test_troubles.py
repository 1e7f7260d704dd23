"""What went wrong in a log: error signatures with a sample, and the workers that stand out."""

import pytest
from events_site import write_log

from aztask.spark import read_events
from aztask.spark.report import troubles
from aztask.spark.report.troubles import MOST_SIGNATURES, signatures, workers
from aztask.stores.events.event import Event

BEGIN = 1_790_000_000.0


def failed(number, error, *, kind="failed", task="shop.resize", error_type="OSError", worker="w1"):
    return Event(
        kind,
        f"task-{number}",
        task,
        "default",
        error_type=error_type,
        error=error,
        duration_seconds=0.1,
        ts=BEGIN + number,
        worker=worker,
        id=f"f-{number}",
    )


def event(kind, number, worker, **more):
    return Event(
        kind, f"task-{number}", "shop.resize", "default",
        ts=BEGIN + number, worker=worker, id=f"{kind}-{number}-{worker}", **more,
    )  # fmt: skip


@pytest.fixture
def read(spark, tmp_path):
    """The frame of some events."""

    def of(events):
        write_log(tmp_path / "log", events, files=2)
        return read_events(spark, str(tmp_path / "log")).events

    return of


def test_errors_are_one_without_what_differs(read):
    events = [failed(n, f"file /data/{n}.png: {n * 7} bytes are missing") for n in range(30)]
    events += [failed(100 + n, "no room", kind="resubmitted") for n in range(10)]
    events += [failed(200, "no room", task="shop.mail"), failed(201, None, error_type="Boom")]
    events += [event("succeeded", 300, "w1")]
    rows = signatures(read(events))
    assert [(row["task"], row["runs"]) for row in rows] == [
        ("shop.resize", 30),
        ("shop.resize", 10),
        ("shop.mail", 1),
        ("shop.resize", 1),
    ]
    first = rows[0]
    assert first["signature"] == "OSError: file <path>: <n> bytes are missing"
    assert first["sample"] == "OSError: file /data/29.png: 203 bytes are missing"
    assert (first["first"], first["last"]) == (BEGIN, BEGIN + 29)
    assert first["task_id"] == "task-29"
    assert rows[3]["signature"] == "Boom"


def test_an_executor_keeps_so_many_signatures_and_loses_none(read, monkeypatch):
    events = [failed(n, "x" * (n % 3 + 1) + "y") for n in range(60)]
    monkeypatch.setattr(troubles, "KEPT_SIGNATURES", 1)
    batches = read(events).select("task", "error_type", "error", "ts", "task_id").toArrow()
    parts = list(troubles._signed(batches.to_batches()))
    assert len(parts) > 3
    runs = {}
    for part in parts:
        for row in part.to_pylist():
            runs[row["signature"]] = runs.get(row["signature"], 0) + row["runs"]
    assert runs == {f"OSError: {'x' * n}y": 20 for n in (1, 2, 3)}


def test_only_the_most_frequent_errors_come_to_the_driver(read):
    letters = "abcdefghij"
    names = [one + other for one in letters for other in letters][: MOST_SIGNATURES + 10]
    rows = signatures(read([failed(n, name) for n, name in enumerate(names)]))
    assert len(rows) == MOST_SIGNATURES


def test_a_frozen_and_a_killed_worker_stand_out(read):
    events = []
    for number in range(100):
        for worker in ("calm", "frozen", "killed"):
            if worker != "calm" and number >= 40:
                continue
            events.append(event("started", number, worker))
            events.append(event("succeeded", number, worker, duration_seconds=0.5))
    events += [event("started", 40, "frozen"), event("lease_lost", 130, "frozen")]
    events += [event("started", number, "killed") for number in (41, 42, 43)]
    events += [failed(500, "no", worker="calm"), failed(501, "no", kind="resubmitted", worker="")]
    rows = {row["worker"]: row for row in workers(read(events))}
    assert list(rows) == ["frozen", "killed", "calm"]
    assert (rows["frozen"]["lost"], rows["frozen"]["silence"]) == (1, 90.0)
    assert (rows["killed"]["untold"], rows["killed"]["lost"]) == (3, 0)
    assert rows["killed"]["silence"] is None
    calm = rows["calm"]
    assert (calm["runs"], calm["failed"], calm["retried"], calm["untold"]) == (101, 1, 0, 0)
    assert calm["run_p50"] == 0.5
    assert (calm["first"], calm["last"]) == (BEGIN, BEGIN + 500)
