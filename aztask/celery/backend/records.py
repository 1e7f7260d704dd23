"""The record of a run on an aztask worker as Celery's result of a task, and the reverse."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from celery import states

from aztask.message.codec import Codec
from aztask.message.headers import VERSION
from aztask.message.message import COUNTER_LIMIT
from aztask.settlement import Complete
from aztask.stores.records.base import Outcome, RunKey, RunRecord, State

_STATES: Final = {
    State.STARTED: states.STARTED,
    State.RETRYING: states.RETRY,
    State.SNOOZED: states.RETRY,
    State.SUCCEEDED: states.SUCCESS,
    State.FAILED: states.FAILURE,
    State.CANCELLED: states.REVOKED,
    State.EXPIRED: states.REVOKED,
}


_ENDS: Final = {
    states.SUCCESS: State.SUCCEEDED,
    states.FAILURE: State.FAILED,
    states.REVOKED: State.CANCELLED,
}


def record_of(
    request: Any, result: Any, state: str, traceback: str, encode: Callable[[Any], bytes]
) -> RunRecord | None:
    """The record of a task that a Celery worker ran; None if aztask did not send it.

    * `result`: the value, or for an error the map that Celery stores.
    """
    end = _ENDS.get(state)
    headers = getattr(request, "headers", None) or {}
    if end is None or VERSION not in headers:
        return None
    error = result if isinstance(result, dict) and end is not State.SUCCEEDED else {}
    message = error.get("exc_message", "")
    text = " ".join(map(str, message)) if isinstance(message, list | tuple) else str(message)
    outcome = Outcome(
        end,
        Complete(),
        encode(result) if end is State.SUCCEEDED else None,
        str(error.get("exc_type", "")),
        text,
        traceback,
        at=time.time(),
    )
    key = RunKey(str(request.id), *(_count(headers.get(name)) for name in _COUNTS))
    queue = (request.delivery_info or {}).get("routing_key") or ""
    return RunRecord(key, str(request.task), queue, end, str(request.hostname), outcome=outcome)


_COUNTS: Final = ("aztask-generation", "aztask-hop")


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value <= COUNTER_LIMIT else 0


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
