"""The record of a run on an aztask worker, as Celery writes the result of a task."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from celery import states

from aztask.message.codec import Codec
from aztask.results.base import RunRecord, State

_STATES: Final = {
    State.STARTED: states.STARTED,
    State.RETRYING: states.RETRY,
    State.SNOOZED: states.RETRY,
    State.SUCCEEDED: states.SUCCESS,
    State.FAILED: states.FAILURE,
    State.CANCELLED: states.REVOKED,
    State.EXPIRED: states.REVOKED,
}


def meta_of(record: RunRecord, codec: Codec) -> dict[str, Any]:
    """What Celery stores for a task: status, result, traceback and the time of its end."""
    outcome = record.outcome
    state = _STATES.get(record.state, states.PENDING)
    result: Any = None
    if state == states.SUCCESS and outcome is not None and outcome.value is not None:
        result = codec.decode_value(outcome.value)
    elif state in states.EXCEPTION_STATES:
        name = outcome.error_type if outcome is not None else ""
        revoked = state == states.REVOKED
        result = {
            "exc_type": "TaskRevokedError" if revoked else name or "Exception",
            "exc_message": [outcome.error if outcome is not None else record.state.value],
            "exc_module": "celery.exceptions" if revoked else "builtins",
        }
    return {
        "task_id": record.key.task_id,
        "status": state,
        "result": result,
        "traceback": outcome.traceback if outcome is not None else None,
        "children": [],
        "date_done": (
            datetime.fromtimestamp(outcome.at, UTC).isoformat()
            if outcome is not None and state in states.READY_STATES
            else None
        ),
    }
