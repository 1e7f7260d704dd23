"""One lifecycle event of a task: a value, and the line of JSON that it is written as.

Rules
1. A line is ASCII, ends at its only line break, and is valid JSON whatever text it contains: lone
   surrogates are written as the text of their escape, control characters as JSON escapes.
2. Unknown values are omitted, not written as null; so are numbers that are not finite.
3. Error text is cut, and secrets in it and in names of errors and workers are masked: events travel
   further than logs.
4. Reading trusts nothing: a line that is not an event of this version gives None.

Field order: a worker writes three events for each task, so a line is assembled by hand around the C
encoder for strings, which is faster than ``json.dumps`` of a dict (``benchmarks/events.py``).
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from aztask.support.display import mask

EventKind: TypeAlias = Literal[
    "enqueued",
    "send_unconfirmed",
    "received",
    "started",
    "renewed",
    "lease_lost",
    "succeeded",
    "failed",
    "resubmitted",
    "snoozed",
    "waiting",
    "dead_lettered",
    "settle_failed",
    "cancelled",
    "expired",
    "lease_changed",
    "put_off",
    "control_changed",
    "occurrence_sent",
    "occurrence_skipped",
    "operator_acted",
]
EVENT_KINDS: Final[frozenset[str]] = frozenset(get_args(EventKind))

VERSION: Final = 1
ERROR_LIMIT: Final = 2000
"""Characters of an error's text that are kept; the rest is cut."""
TEXT_LIMIT: Final = 500
"""Characters of any other text that are kept: ids and names may come from other programs."""


class Event(NamedTuple):
    """An event of one task, the argument of ``app.on_event`` listeners.

    A tuple, because so many are made. Durations are in seconds; a field that does not apply is None
    or "".

    * `ts`: UTC epoch seconds; `worker`: who wrote it; `id`: unique. The sink fills these three in.
    * `duration_seconds`: how long the run took.
    * `wait_seconds`: from the time it was due until it started.
    * `lease_seconds`: the lease in force; `margin_seconds`: how much of it remained.
    * `error_type`, `error`: of the failure.
    * `held_seconds`: from receiving the delivery to its end; `renewals`: of its lease in that time.
    * `former_lease_seconds`, `reason`: for a change of a queue's lease; task_id and task are ""
      then. `reason` also says why a run was put off, and names the schedule of an occurrence.
    * `workflow_id`: of the workflow that the task belongs to.
    * `parent_id`: of the task or group before it in the workflow; otherwise of the task that sent
      it.
    * `by`, `action`, `selected`, `done`: who did what on how many, and how many were done; only in
      ``operator_acted``. `reason` says it in words, `error` why it stopped.
    """

    event: EventKind
    task_id: str
    task: str
    queue: str
    delivery_count: int = 0
    resubmit_count: int = 0
    duration_seconds: float | None = None
    wait_seconds: float | None = None
    lease_seconds: float | None = None
    margin_seconds: float | None = None
    error_type: str | None = None
    error: str | None = None
    ts: float = 0.0
    worker: str = ""
    id: str = ""
    held_seconds: float | None = None
    renewals: int | None = None
    former_lease_seconds: float | None = None
    reason: str | None = None
    workflow_id: str | None = None
    parent_id: str | None = None
    by: str | None = None
    action: str | None = None
    selected: int | None = None
    done: int | None = None


def to_line(event: Event, event_id: str, ts: float, worker_json: str) -> str:
    """The event's line, with its line break. `worker_json` is the worker's name, already quoted."""
    (kind, task_id, task, queue, deliveries, resubmits, duration, wait, lease, margin) = event[:10]
    line = (
        f'{{"id":"{event_id}","v":1,"event":"{kind}","ts":{ts:.6f},"task_id":{quote(task_id)},'
        f'"task":{_name(task)},"queue":{_name(queue)},"worker":{worker_json},'
        f'"delivery_count":{deliveries},"resubmit_count":{resubmits}'
    )
    if event.workflow_id is not None:
        line += f',"workflow_id":{quote(event.workflow_id)}'
    if event.parent_id is not None:
        line += f',"parent_id":{quote(event.parent_id)}'
    if duration is not None:
        line += _number('"duration_seconds":', duration)
    if wait is not None:
        line += _number('"wait_seconds":', wait)
    if lease is not None:
        line += _number('"lease_seconds":', lease)
    if margin is not None:
        line += _number('"margin_seconds":', margin)
    if event.held_seconds is not None:
        line += _number('"held_seconds":', event.held_seconds)
    if event.renewals is not None:
        line += f',"renewals":{event.renewals}'
    if event.former_lease_seconds is not None:
        line += _number('"former_lease_seconds":', event.former_lease_seconds)
    if event.reason is not None:
        line += f',"reason":{quote(mask(event.reason), ERROR_LIMIT)}' + _of_operator(event)
    if event.error_type is not None:
        line += f',"error_type":{quote(mask(event.error_type[: 2 * TEXT_LIMIT]))}'
    if event.error is not None:
        line += f',"error":{quote(mask(event.error[: 2 * ERROR_LIMIT]), ERROR_LIMIT)}'
    return line + "}\n"


def _of_operator(event: Event) -> str:
    if event.action is None:
        return ""
    line = f',"action":{quote(event.action)},"by":{quote(mask(event.by or ""))}'
    line += f',"selected":{event.selected}' if event.selected is not None else ""
    return line + (f',"done":{event.done}' if event.done is not None else "")


def quote(text: str, limit: int = TEXT_LIMIT) -> str:
    """`text` as a JSON string of ASCII characters, cut to `limit` characters."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    quoted = encode_basestring_ascii(text)
    if "\\ud" in quoted:
        # The text has a half of a surrogate pair, or a character outside the first 65,536, which is
        # a complete pair. Strict readers refuse the escape of a half: write its text instead.
        quoted = encode_basestring_ascii(text.encode("utf-8", "backslashreplace").decode())
    return quoted


_name = lru_cache(maxsize=256)(quote)
"""For names of tasks and queues, of which there are few."""


def _number(name: str, value: float) -> str:
    return f",{name}{value:.6f}" if -1e15 < value < 1e15 else ""  # false for nan too


def from_line(line: bytes) -> Event | None:
    """The event in a line, or None if it contains none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("v") != VERSION:
        return None
    if not isinstance(kind := record.get("event"), str) or kind not in EVENT_KINDS:
        return None
    fields: dict[str, Any] = {name: record[name] for name in Event._fields if name in record}
    if not fields.keys() >= _REQUIRED or not all(map(_has_type, fields, fields.values())):
        return None
    return Event(**fields)


def is_newer(line: bytes) -> bool:
    """Whether a line that `from_line` refuses is an event of a newer release.

    Its version is higher, or its kind is unknown and the rest of it is an event of this version.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        return False
    version = record.get("v")
    if isinstance(version, bool) or not isinstance(version, int):
        return False
    if version != VERSION:
        return version > VERSION
    known = {**record, "event": "started"}
    return record["event"] not in EVENT_KINDS and from_line(json.dumps(known).encode()) is not None


_REQUIRED: Final = frozenset({"id", "event", "ts", "task_id", "task", "queue", "worker"})
_COUNTS: Final = frozenset({"delivery_count", "resubmit_count", "renewals", "selected", "done"})
_NUMBERS: Final = frozenset(
    {
        "ts",
        "duration_seconds",
        "wait_seconds",
        "lease_seconds",
        "former_lease_seconds",
        "margin_seconds",
        "held_seconds",
    }
)


def _has_type(name: str, value: object) -> bool:
    if name in _COUNTS:
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    if name not in _NUMBERS:
        return isinstance(value, str)
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -1e15 < value < 1e15
        and math.isfinite(value)
    )
