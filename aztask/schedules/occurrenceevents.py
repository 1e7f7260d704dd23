"""The events of occurrences: that one was sent, and that some were skipped, and why."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from aztask.message.message import TaskMessage
from aztask.schedules.stored import Made
from aztask.stores.events.event import Event
from aztask.support.display import plural


def sent_event(schedule: str, message: TaskMessage, made: Made, now: float) -> Event:
    """The task of an occurrence was sent, `now`."""
    late = max(0.0, now - made.at)
    reason = f"schedule {schedule}"
    return Event(
        "occurrence_sent",
        made.task_id,
        message.task,
        message.queue,
        wait_seconds=late,
        reason=reason,
    )


def skipped_event(schedule: str, message: TaskMessage | None, made: Made) -> Event:
    """An occurrence is not sent. message: None if it cannot be read."""
    task, queue = (message.task, message.queue) if message is not None else ("", "")
    reason = f"schedule {schedule}: {made.why}"
    return Event("occurrence_skipped", made.task_id, task, queue, reason=reason)


def missed_event(schedule: str, message: TaskMessage, missed: Sequence[float], rule: str) -> Event:
    """Occurrences were left out because they were late; rule: that of `missed=`."""
    first, last = (datetime.fromtimestamp(at, UTC) for at in (missed[0], missed[-1]))
    times = f"{first:%Y-%m-%dT%H:%M:%SZ}"
    if len(missed) > 1:
        times += f" to {last:%Y-%m-%dT%H:%M:%SZ}"
    reason = (
        f"schedule {schedule}: {plural(len(missed), 'occurrence')} missed, {times} "
        f"(missed={rule!r})"
    )
    return Event("occurrence_skipped", "", message.task, message.queue, reason=reason)
