"""A schedule as it was read, and what follows from its claims."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from aztask.address.owner import NO_OWNER, Owner
from aztask.schedules.claims import LIVES_SECONDS, Claim, read_claim
from aztask.schedules.stored import WAITING, Made, Schedule, read_made, read_schedule
from aztask.stores.records.damage import Damaged
from aztask.stores.records.schedules import KeptSchedule

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class View:
    """A schedule as it was read: its head, its tag, and its open occurrences.

    * `owner`, `mark`: see `KeptSchedule`.
    * `claims`: those that can be read.
    """

    name: str
    schedule: Schedule
    tag: str
    open: tuple[Made, ...] = ()
    owner: Owner = NO_OWNER
    mark: str = ""
    claims: tuple[Claim, ...] = ()

    @property
    def waiting(self) -> int:
        """How many occurrences wait for the task before them."""
        return sum(each.state == WAITING for each in self.open)

    @property
    def claimed_at(self) -> float:
        """When running code last claimed the definition in the head; 0.0 if it never did."""
        digest = self.schedule.digest
        seen = [each.seen_at for each in self.claims if each.digest == digest]
        return max([self.schedule.claimed_at or 0.0, *seen])

    def living(self, now: float) -> list[Claim]:
        """The living claims of all definitions."""
        return [each for each in self.claims if each.lives_at(now)]

    def state_at(self, now: float) -> str:
        """``active``, ``paused``, or ``unclaimed``: no running code has its definition."""
        if self.schedule.paused_at is not None:
            return "paused"
        if self.schedule.of_code and now - self.claimed_at > LIVES_SECONDS:
            return "unclaimed"
        return "active"


@dataclass(frozen=True, slots=True)
class Code:
    """What the code of an app has, to tell whose a schedule without an owner is.

    * `app`: the app's name.
    * `declared`, `tasks`: its schedules and its tasks by their full names.
    """

    app: str = ""
    declared: Mapping[str, object] = field(default_factory=dict)
    tasks: Mapping[str, object] = field(default_factory=dict)

    def has(self, schedule: str, task: str) -> bool:
        """Whether the schedule is this app's: if its task is, or if the app declares it.

        Two apps may declare one name with a dot: then it belongs to the app that has its task.

        * `task`: "" if its definition cannot be read.
        """
        if task in self.tasks:
            return True
        return schedule in self.declared and (not task or schedule.startswith(f"{self.app}."))

    def adopts(self, schedule: str, task: str, *, of_code: bool) -> bool:
        """Whether the app's workers adopt it: one of the code only if they declare it."""
        return self.has(schedule, task) and (schedule in self.declared or not of_code)


NO_CODE: Final = Code()


def read_view(kept: KeptSchedule) -> View | Damaged:
    """The schedule, or what is wrong with its head. Damaged occurrences are logged, and stay."""
    name = kept.head.schedule
    try:
        schedule = read_schedule(kept.head.data)
    except Damaged as damage:
        return damage
    found = []
    for row in kept.open:
        try:
            found.append(read_made(row))
        except Damaged as damage:
            logger.error("schedule %s: occurrence %s: %s", name, row.key, damage.reason)
    claims = tuple(claim for row in kept.claims if (claim := read_claim(row)) is not None)
    return View(name, schedule, kept.head.tag, tuple(found), kept.owner, kept.mark, claims)
