"""Records of aztask as Celery's results."""

from __future__ import annotations

import pytest
from celery import Celery, states

from aztask.celery.backend import meta_of
from aztask.errors import KeyMissing
from aztask.message.codec import Codec
from aztask.message.encryption import Cipher
from aztask.settlement import Complete
from aztask.stores.records.base import Outcome, RunKey, RunRecord, State
from aztask.stores.records.rowsigning import LOCKED

CODEC = Codec()


def record(state: State, **outcome: object) -> RunRecord:
    """A run in this state, with an outcome if one is given."""
    ended = Outcome(state, Complete(), at=1_000.0, **outcome) if outcome else None
    return RunRecord(RunKey("t"), "task", "q", state, "worker", outcome=ended)


@pytest.mark.parametrize("state", State)
def test_every_state_is_one_of_celerys(state: State) -> None:
    meta = meta_of(record(state, error="why"), CODEC)
    assert meta["status"] in states.ALL_STATES and meta["task_id"] == "t"
    assert (meta["date_done"] is not None) == (meta["status"] in states.READY_STATES)


def test_a_value_is_decoded() -> None:
    meta = meta_of(record(State.SUCCEEDED, value=CODEC.encode_value([1, "a"])), CODEC)
    assert (meta["status"], meta["result"]) == ("SUCCESS", [1, "a"])


def test_an_encrypted_value_is_refused_in_one_line() -> None:
    value = Cipher([b"k" * 40], encrypt=True).encrypt(CODEC.encode_value("4111"), "outcome")
    with pytest.raises(KeyMissing, match="result of task t is encrypted, and Celery's ba") as told:
        meta_of(record(State.SUCCEEDED, value=value), CODEC)
    assert "\n" not in str(told.value)
    failed = meta_of(record(State.FAILED, value=value, error_type="CardError", error=LOCKED), CODEC)
    assert failed["result"]["exc_type"] == "CardError"


@pytest.mark.parametrize(("name", "kind"), [("ValueError", ValueError), ("OwnError", Exception)])
def test_an_error_becomes_an_exception_of_its_name(name: str, kind: type[Exception]) -> None:
    failed = record(State.FAILED, error_type=name, error="no", traceback="Trace")
    meta = meta_of(failed, CODEC)
    celery = Celery("x", backend="cache+memory://", set_as_current=False)
    error = celery.backend.exception_to_python(meta["result"])
    assert isinstance(error, kind) and type(error).__name__ == name and str(error) == "no"
    assert meta["traceback"] == "Trace"


def test_a_cancelled_task_is_revoked() -> None:
    meta = meta_of(record(State.CANCELLED, error=""), CODEC)
    assert meta["status"] == "REVOKED" and meta["result"]["exc_type"] == "TaskRevokedError"
