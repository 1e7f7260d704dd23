"""Rows of runs in a table: written, read back, and distrusted."""

import pytest
from azure.data.tables import TableEntity

from aztask.settlement import Abandon, Complete
from aztask.stores.records.base import Outcome, RunKey, Start, State, WorkerRecord
from aztask.stores.records.damage import Damaged
from aztask.stores.records.rowsigning import pack_body
from aztask.stores.records.tables.rows import (
    DAMAGE,
    RunRow,
    entity_of,
    new_run,
    plain,
    run_of,
    unpack,
    worker_entity,
    worker_of,
)

START = Start(RunKey("a", 1, 2), "shop.add", "default", 7, "owner", "w", 1.0)


def read_back(run: RunRow, **changes: object) -> RunRow:
    """The run after a way through the table; `changes` damage its row."""
    entity = TableEntity({**entity_of(run), **changes})
    entity._metadata = {"etag": "tag-1"}
    return run_of(entity, entity["PartitionKey"], entity["RowKey"])


def test_a_started_and_a_finished_run_are_read_back():
    started = read_back(new_run(START))
    assert (started.key, started.owner, started.position) == (START.key, "owner", 7)
    assert (started.state, started.starts, started.tag) == (State.STARTED, 1, "tag-1")
    assert not started.ended
    outcome = Outcome(State.SUCCEEDED, Complete(), b"value", at=2.0, duration=1.0)
    finished = read_back(started.finished(outcome, pack_body(outcome), ""))
    assert finished.ended
    assert finished.outcome(finished.body) == outcome
    assert finished.record(finished.body).outcome == outcome


def test_an_outcome_after_which_the_message_comes_again_is_counted():
    again = Outcome(State.RETRYING, Abandon(), at=2.0)
    run = new_run(START).finished(again, None, "")
    assert (again.again, run.failures, run.starts, run.ended) == (True, 1, 0, False)
    restarted = run.started(START)
    assert (restarted.state, restarted.outcome(None)) == (State.STARTED, None)


@pytest.mark.parametrize(
    "change",
    [
        {"state": "odd"},
        {"starts": "many"},
        {"started_at": "now"},
        {"task": 7},
        {"body_blob": "another"},
        {DAMAGE: "it was damaged"},
    ],
)
def test_a_damaged_row_has_only_its_key_and_a_reason(change):
    run = read_back(new_run(START), **change)
    assert (run.state, run.key, run.tag) == (State.UNREADABLE, START.key, "tag-1")
    assert run.damage
    assert run.in_quarantine is (DAMAGE in change)


def test_only_long_parts_of_an_outcome_are_packed():
    assert pack_body(Outcome(State.SUCCEEDED, Complete())) is None
    failed = Outcome(State.FAILED, Complete(), None, "KeyError", "'\udc80'", "Traceback")
    assert unpack(pack_body(failed)) == (None, "KeyError", "'\udc80'", "Traceback")
    for body in (b"\xc1", b"\x90", b"\x94\x01\xa0\xa0\xa0"):
        with pytest.raises(Damaged):
            unpack(body)


def test_a_heartbeat_is_read_back():
    worker = WorkerRecord("w", 1.0, 2.0, ("a",), 3, 4)
    entity = worker_entity(worker)
    assert worker_of(entity) == worker
    assert worker_of({**entity, "running": "x"}).damage


def test_text_fits_a_property():
    plain("\udc80").encode()
    assert len(plain("x" * 10_000)) <= 4096
