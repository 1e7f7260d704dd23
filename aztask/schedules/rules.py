"""What happens to occurrences that are late, or that come while the task of the last one runs.

The rules of a schedule, and what they make of a time (`decide`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final, Literal, TypeAlias, get_args

from aztask.errors import ConfigurationError
from aztask.schedules.stored import DUE, PLANNED, SKIPPED, WAITING, Made, Schedule
from aztask.schedules.triggers import Trigger, latest_times
from aztask.stores.records.damage import Columns, Damaged
from aztask.stores.records.schedules import COMMITTED
from aztask.support.durations import to_seconds
from aztask.taskoptions import choice

Missed: TypeAlias = Literal["latest", "skip", "all"]
Overlap: TypeAlias = Literal["allow", "skip", "queue"]
MISSED: Final[tuple[str, ...]] = get_args(Missed)
OVERLAPS: Final[tuple[str, ...]] = get_args(Overlap)
SKIP_GRACE_SECONDS: Final = 60.0
MOST_MISSED: Final = 1_000
MOST_WAITING: Final = 100
"""Occurrences that wait for others with overlap="queue"; further ones are skipped."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one schedule. Durations are seconds.

    * `missed`: which of several due occurrences are sent: the "latest" one, "all" of them, or with
      "skip" those that are at most `grace` late.
    * `max_missed`: the most occurrences that "all" and "skip" send at once, the latest ones.
    * `grace`: how late an occurrence is still sent; None: however late. With "skip", 60 s if None.
    * `overlap`: "allow"; "skip" an occurrence while the task of the last one has not ended; or
      "queue" it until then.
    * `overlap_limit`: after this time, a task that has not ended counts as lost.
    * `jitter`: each occurrence is sent up to this much later, always by the same time.
    """

    missed: str = MISSED[0]
    max_missed: int = 100
    grace: float | None = None
    overlap: str = OVERLAPS[0]
    overlap_limit: float = 86400.0
    jitter: float = 0.0

    @property
    def latest(self) -> int:
        """How many of the due occurrences may be sent at once."""
        return 1 if self.missed == "latest" else self.max_missed

    @property
    def late_seconds(self) -> float | None:
        """How late an occurrence is still sent; None: however late."""
        if self.grace is None and self.missed == "skip":
            return SKIP_GRACE_SECONDS
        return self.grace

    def packed(self) -> dict[str, Any]:
        """The rules as plain values; `read_rules` reads them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def checked_rules(where: str, options: Mapping[str, Any]) -> Rules:
    """The rules in the options of a schedule. Raises ConfigurationError.

    * `where`: the schedule, for the errors.
    """
    usual = Rules()
    most = options.get("max_missed", usual.max_missed)
    if type(most) is not int or not 1 <= most <= MOST_MISSED:
        raise ConfigurationError(
            f"{where}: max_missed takes a whole number from 1 to {MOST_MISSED}, not {most!r}"
        )
    grace = options.get("grace")
    limit = options.get("overlap_limit", usual.overlap_limit)
    return Rules(
        choice(options.get("missed", usual.missed), MISSED, f"{where}: missed"),
        most,
        None if grace is None else to_seconds(grace, f"{where}: grace"),
        choice(options.get("overlap", usual.overlap), OVERLAPS, f"{where}: overlap"),
        to_seconds(limit, f"{where}: overlap_limit", minimum=1.0),
        to_seconds(options.get("jitter", usual.jitter), f"{where}: jitter"),
    )


def read_rules(packed: object) -> Rules:
    """The rules that `Rules.packed` gave. Raises Damaged."""
    if not isinstance(packed, dict):
        raise Damaged("its rules are missing")
    columns = Columns(packed)
    rules = Rules(
        columns.text("missed"),
        columns.count("max_missed", most=MOST_MISSED),
        columns.optional_time("grace"),
        columns.text("overlap"),
        columns.time("overlap_limit"),
        columns.time("jitter"),
    )
    if rules.missed not in MISSED or rules.overlap not in OVERLAPS or not rules.max_missed:
        raise Damaged("its rules are unknown; a newer aztask may know them")
    return rules


# -- Which occurrences are made now ----------------------------------------------------------------
#
# And with which state: a function of the head and the time.


NOT_ENDED: Final = "the task of {} has not ended"


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
            why = NOT_ENDED.format(last.last_id or "the occurrence before it")
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
