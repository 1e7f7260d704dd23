"""Errors of steps as values: what is recorded of an exception, and the exception made from that.

Rules
1. A class is only looked up in modules that are imported already. Nothing is imported, and no
   ``__init__`` is called, because a record says so.
2. What cannot be encoded of an exception is dropped: first its attributes, then its arguments.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from aztask.errors import EncodeError, StepFailed, TaskCancelled, TaskExpired, TaskFailed
from aztask.steps.history import WaitEnd
from aztask.steps.keepers import StepKeeper
from aztask.steps.records import DONE, FAILED
from aztask.stores.records.base import RunRecord, State
from aztask.support.display import mask, safe_str, storable

TEXT_CHARACTERS: Final = 4_000


def encoded_error(keeper: StepKeeper, error: Exception) -> bytes:
    """The error as bytes, as much of it as can be encoded."""
    kind = type(error)
    plain = {
        "module": storable(kind.__module__),
        "class": storable(kind.__qualname__),
        "text": storable(mask(safe_str(error, 2 * TEXT_CHARACTERS)), TEXT_CHARACTERS),
    }
    attributes = {name: value for name, value in vars(error).items() if not name.startswith("__")}
    for more in ({"args": list(error.args), "state": attributes}, {"args": list(error.args)}):
        try:
            return keeper.encode({**plain, **more})
        except EncodeError:
            continue
    return keeper.encode({**plain, "args": [plain["text"]]})


def error_from(value: Any) -> Exception:
    """The error that was recorded; `StepFailed` if its class is not there any longer."""
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    module, name = str(fields.get("module")), str(fields.get("class"))
    args, state = fields.get("args"), fields.get("state")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            error: Exception = found.__new__(found)
            error.args = tuple(args) if isinstance(args, list) else ()
            vars(error).update(state if isinstance(state, dict) else {})
        except Exception:  # noqa: BLE001  # a class of the user's, which may refuse
            return StepFailed(name, str(fields.get("text", "")))
        return error
    return StepFailed(name, str(fields.get("text", "")))


class ChildEnd:
    """The end of a child as that of the wait for it: its value, or the error of its `get`."""

    def end_of(self, keeper: StepKeeper, record: RunRecord) -> WaitEnd:
        """A failure is recorded as an error, which every later run raises."""
        outcome, child = record.outcome, record.key.task_id
        if record.state is State.SUCCEEDED and not record.damage:
            value = keeper.decode(outcome.value) if outcome and outcome.value else None
            return WaitEnd(DONE, keeper.encode(value), child)
        error: Exception
        if record.state is State.CANCELLED:
            error = TaskCancelled(f"task {child} was cancelled before it ran")
        elif record.state is State.EXPIRED:
            error = TaskExpired(f"task {child} was not run: it had expired")
        elif outcome is None or record.damage:
            error = TaskFailed("Unknown", record.damage or "the result store holds no outcome")
        else:
            error = TaskFailed(outcome.error_type, outcome.error, outcome.traceback)
        return WaitEnd(FAILED, encoded_error(keeper, error), child)
