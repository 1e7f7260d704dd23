"""Which occurrences are made now, and with which state: a function of the head and the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final

from aztask.schedules.rules import MOST_WAITING, Rules
from aztask.schedules.stored import DUE, PLANNED, SKIPPED, WAITING, Made, Schedule
from aztask.schedules.triggers import Trigger, latest_times
from aztask.stores.records.schedules import COMMITTED

OVERLAPS: Final = "the task of {} has not ended"


def task_id_of(schedule: str, at: float, mark: str = "") -> str:
    """The id of the task of an occurrence, such as ``shop.nightly@2026-11-01T01:30:00Z``.

    * `mark`: that of the owner if another owner was the first to use the schedule's name. So two
      apps with schedules of one name never send one id, and the first keeps the ids that it has.
    """
    text = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    name = f"{schedule}~{mark}" if mark else schedule
    return f"{name}@{text.replace('.000+', '+').replace('+00:00', 'Z')}"


def jitter_of(task_id: str, jitter: float) -> float:
    """How much later the task is sent: seconds up to `jitter`, always the same for one id."""
    if not jitter:
        return 0.0
    return int.from_bytes(sha256(task_id.encode()).digest()[:6]) / 2**48 * jitter


def due_times(schedule: Schedule, trigger: Trigger, rules: Rules, now: float) -> list[float]:
    """The times after the watermark whose occurrences are sent now, in order; see `Rules`."""
    oldest = schedule.watermark
    if rules.late_seconds is not None:
        # Every time is in a whole millisecond, and one that is exactly so late is sent.
        oldest = max(oldest, now - rules.late_seconds - 0.0005)
    return latest_times(trigger, oldest, now, rules.latest)


def decide(
    name: str,
    schedule: Schedule,
    times: Sequence[float],
    rules: Rules,
    now: float,
    *,
    waiting: int,
    runs: Callable[[str, bool], bool],
    by: str,
    kind: str = PLANNED,
    mark: str = "",
) -> tuple[Schedule, list[Made]]:
    """The new head, and the occurrences for `times`, at most as many as one transaction takes.

    * `waiting`: how many occurrences wait already.
    * `runs`: whether the task with an id has not ended; asked at most once. True as its second
      argument: the task is so old that it counts as lost, unless it waits inside its code.
    * `mark`: see `task_id_of`.
    """
    last = schedule
    busy = False
    if rules.overlap != "allow" and times:
        busy = waiting > 0 or is_busy(last, rules, now, runs)
    made: list[Made] = []
    for at in times[:COMMITTED]:
        one = Made(at, task_id_of(name, at, mark), now, kind, DUE, "", by)
        if busy:
            queue = rules.overlap == "queue" and waiting < MOST_WAITING
            waiting += queue
            why = OVERLAPS.format(last.last_id or "the occurrence before it")
            one = replace(one, state=WAITING if queue else SKIPPED, why=why)
        else:
            last = replace(last, last_id=one.task_id, last_at=now)
            busy = rules.overlap != "allow"
        made.append(one)
    watermark = times[COMMITTED - 1] if len(times) > COMMITTED else now
    if kind == PLANNED:
        last = replace(last, watermark=max(watermark, schedule.watermark))
    return replace(last, by=by, made=schedule.made + len(made)), made


def is_busy(
    schedule: Schedule, rules: Rules, now: float, runs: Callable[[str, bool], bool]
) -> bool:
    """True if the last task has not ended, and is not so old that it counts as lost."""
    if not schedule.last_id:
        return False
    return runs(schedule.last_id, now - schedule.last_at > rules.overlap_limit)
