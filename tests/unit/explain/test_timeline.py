"""A task's history: rows and events in one order, and every gap is named."""

import json

import pytest

from aztask.operate.eventlog import GAP, EventLog, events_of
from aztask.operate.explain import history_of
from aztask.settlement import Complete, DeadLetter, Resubmit
from aztask.stores.events.event import Event, quote, to_line
from aztask.stores.records.base import (
    GIVEN_BACK,
    EarlierStart,
    EarlierStarts,
    Outcome,
    RunKey,
    RunRecord,
    State,
)


def event(kind, ts, delivery=1, worker="w1", **fields):
    return Event(
        kind, "a", "shop.add", "default", delivery, ts=ts, worker=worker, id=f"{ts}{kind}", **fields
    )


def a_run(state, at, hop=0, worker="w1", started_at=10.0, settlement=None, **fields):
    outcome = None
    if at is not None:
        error = fields.pop("error", "")
        kind = "OSError" if error else ""
        outcome = Outcome(state, settlement or Complete(), None, kind, error, "", at, 2.0)
    key = RunKey("a", 0, hop)
    return RunRecord(key, "shop.add", "default", state, worker, 1, started_at, outcome, **fields)


def texts(history):
    return [f"{'GAP ' if each.kind == GAP else ''}{each.text}" for each in history.entries]


def history(runs=(), events=None, state=State.SUCCEEDED):
    log = None if events is None else EventLog(list(events), files=1)
    return history_of("a", list(runs), log, state=state)


SENT = event("enqueued", 9.0, 0, "sender-1")
SENT_TEXT = "sent to queue default"


def test_rows_and_events_of_one_start_and_one_outcome_are_one_entry():
    events = [
        SENT,
        event("received", 10.0),
        event("started", 10.1, wait_seconds=1.0, lease_seconds=30.0),
        event("renewed", 31.0, lease_seconds=30.0, margin_seconds=9.0),
        event("succeeded", 40.0, duration_seconds=29.9, margin_seconds=21.0, renewals=1),
    ]
    found = history([a_run(State.SUCCEEDED, 40.0, started_at=10.05)], events)
    assert texts(found) == [
        SENT_TEXT,
        "delivery 1 received from queue default: start 1 of hop 0",
        "the task starts 1 s after due, lease of 30 s",
        "lease renewed for 30 s, 9 s were left",
        "succeeded after a run of 29.9 s, 21 s of the lease left; settlement: complete",
    ]
    assert [each.source for each in found.entries] == ["event", "both", "event", "event", "both"]
    assert (found.task, found.queue, found.gaps) == ("shop.add", "default", 0)


def test_a_retry_is_another_hop_and_says_when_it_is_due():
    first = a_run(State.RETRYING, 12.0, error="disk", settlement=Resubmit(5.0))
    second = a_run(State.SUCCEEDED, 20.0, hop=1, started_at=17.0)
    found = history([first, second])
    assert texts(found) == [
        "GAP no event directory is configured here (events=, AZTASK_EVENTS or --events): "
        "deliveries, renewals and lost leases are not known",
        "start 1 of hop 0",
        "retrying after a run of 2 s: OSError: disk; settlement: resubmit, due in 5 s",
        "start 1 of hop 1",
        "succeeded after a run of 2 s; settlement: complete",
    ]


def test_a_worker_that_died_leaves_a_gap():
    events = [
        SENT,
        event("received", 10.0),
        event("started", 10.1),
        event("received", 42.0, 2, "w2"),
        event("succeeded", 44.0, 2, "w2", renewals=0),
    ]
    earlier = EarlierStarts((EarlierStart(10.0, "w1"),))
    run = a_run(State.SUCCEEDED, 44.0, worker="w2", started_at=42.0, earlier=earlier)
    found = history([run], events)
    assert texts(found) == [
        SENT_TEXT,
        "delivery 1 received from queue default: start 1 of hop 0, whose end was never recorded",
        "the task starts",
        "GAP no event says how delivery 1 on w1 ended: the worker died, was frozen, or gave it "
        "back",
        "delivery 2 received from queue default: start 2 of hop 0",
        "succeeded; settlement: complete",
    ]


def test_deliveries_without_events_are_a_gap():
    events = [SENT, event("received", 10.0, 3), event("succeeded", 11.0, 3)]
    found = history([a_run(State.SUCCEEDED, 11.0)], events)
    assert "GAP deliveries 1 to 2 have no event" in texts(found)
    events = [SENT, event("received", 10.0), event("lease_lost", 10.5, error="frozen")]
    events += [event("received", 11.0, 3), event("succeeded", 12.0, 3)]
    assert "GAP delivery 2 has no event" in texts(history((), events))
    events = [SENT, event("received", 10.0), event("resubmitted", 10.5)]
    events += [event("received", 11.0, 1), event("succeeded", 12.0, 1)]
    assert history((), events).gaps == 0, "a clone's deliveries are counted anew"


def test_renewals_without_events_are_a_gap():
    events = [SENT, event("received", 10.0), event("renewed", 20.0)]
    events += [event("succeeded", 50.0, renewals=3)]
    assert "GAP 2 of 3 renewals have no event" in texts(history((), events))


def test_starts_that_the_row_no_longer_keeps_are_a_gap():
    kept = EarlierStarts((EarlierStart(9.0, "w0", GIVEN_BACK),), dropped=5)
    run = a_run(State.FAILED, 12.0, earlier=kept, settlement=DeadLetter("Max", "10 times"))
    found = history([run], state=State.FAILED)
    assert texts(found)[1:] == [
        "GAP the row of hop 0 keeps its last 20 starts; 5 are dropped",
        "start 6 of hop 0, given back before the task ran",
        "start 7 of hop 0",
        "failed after a run of 2 s; settlement: dead-letter, Max (10 times)",
    ]


def test_a_hop_without_a_row_and_a_damaged_row_are_gaps():
    damaged = RunRecord(RunKey("a", 0, 3), "", "", State.UNREADABLE, damage="its state is int")
    found = history([a_run(State.RETRYING, 12.0, hop=1), damaged])
    assert texts(found)[1] == ("GAP hop 0 has no row in the result store: purged, or never started")
    assert texts(found)[-2:] == [
        "GAP hop 2 has no row in the result store: purged, or never started",
        "GAP the row of hop 3 cannot be read: its state is int",
    ]


def test_a_task_that_waits_or_runs():
    waiting = a_run(State.PENDING, None, started_at=None)
    assert texts(history([waiting], [SENT], State.PENDING))[-1] == (
        "GAP hop 0 was sent, and no worker has started it"
    )
    running = a_run(State.STARTED, None)
    found = history([running], [SENT, event("received", 10.0)], State.STARTED)
    assert texts(found)[-1] == "GAP w1 holds the task now, or has died"


def test_workers_without_events_are_a_gap():
    found = history([a_run(State.SUCCEEDED, 12.0)], [SENT])
    assert texts(found)[0] == (
        "GAP no event of its deliveries: the workers wrote none, or elsewhere"
    )


def test_nothing_is_known():
    assert history(state=None) is None


def write(folder, *events, name="w1-1.jsonl", hidden=False):
    lines = "".join(to_line(each, each.id, each.ts, quote(each.worker)) for each in events)
    path = folder / "date=2026-07-19" / "hour=10" / name
    if hidden:
        path = folder / f".2026-07-19T10.{name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lines)
    return path


def test_events_of_one_task_among_many_files(tmp_path):
    other = SENT._replace(task_id="ab", id="other")
    write(tmp_path, event("received", 10.0), other)
    write(tmp_path, event("succeeded", 12.0), hidden=True, name="w2-1.jsonl")
    path = write(tmp_path, SENT, name="w3-1.jsonl")
    spaced = {"v": 1, "event": "started", "ts": 11.0, "task": "t", "queue": "q", "worker": "w"}
    with path.open("a") as stream:
        stream.write(json.dumps({"task_id": "a", **spaced, "id": "json"}) + "\n")
        stream.write('{"task_id":"a", torn')
    (path.parent / "c.parquet").write_bytes(b"")
    log = events_of(tmp_path, "a")
    assert [each.event for each in log.events] == ["enqueued", "received", "started", "succeeded"]
    assert (log.files, log.compacted, log.unreadable) == (3, 1, 0)
    gaps = texts(history_of("a", [], log, state=None))
    assert "GAP 1 compacted event files were not searched: read them with Spark" in gaps


@pytest.mark.parametrize("task_id", ['ü"\\', "x" * 600, "a\nb"])
def test_ids_of_any_kind_are_found(tmp_path, task_id):
    write(tmp_path, SENT._replace(task_id=task_id))
    assert len(events_of(tmp_path, task_id).events) == 1
