"""A schedule as it was read, and what follows from its claims."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack

from aztask.address.owner import NO_OWNER, Owner
from aztask.schedules.stored import WAITING, Made, Schedule, read_made, read_schedule
from aztask.stores.records.damage import Columns, Damaged
from aztask.stores.records.schedules import ClaimRow, KeptSchedule

logger = logging.getLogger(__name__)

# -- Claims ----------------------------------------------------------------------------------------
#
# Which definitions of a schedule running code has, and which of them counts. While old and new
# workers run together, the code of an app has several definitions of one schedule.
#
# Rules
# 1. A claim names the digest and the release of a definition. All processes whose code has it share
#    the claim: the first makes it, the others renew it when it is some minutes old.
# 2. A claim lives ten minutes after it was last renewed, by the store's clock. A definition without
#    a living claim yields to one that has a living claim.
# 3. Of the living claims, the higher release counts; of equal ones, that whose *first* process
#    started later. So an old worker that restarts changes nothing: its claim is as old as before.
# 4. A claim that has ended is made anew, with the start of the process that makes it: one that was
#    frozen for an hour is as old as before.
# 5. Releases before 0.2 make no claims; they write `Schedule.claimed_at` instead. That counts for
#    the definition in the head, but it yields to a claim of the same or a higher release.

LIVES_SECONDS: Final = 600.0
FORGOTTEN_SECONDS: Final = 3600.0
"""Claims that ended so long ago are deleted."""

_DIGITS: Final = 40


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim. Times are the store's.

    * `digest`: of the definition, see `Definition.digest`.
    * `first_at`: when the first process with this definition started.
    * `seen_at`: when it was last renewed.
    * `tag`: of its row, "" if there is none yet.
    """

    digest: str
    release: int
    first_at: float
    seen_at: float
    tag: str = ""

    @property
    def key(self) -> str:
        """The key of its row."""
        return f"{self.digest[:_DIGITS]}-{self.release}"

    @property
    def rank(self) -> tuple[int, float, str]:
        """The claim with the highest rank counts (rule 3); no two definitions have the same."""
        return self.release, self.first_at, self.digest

    def lives_at(self, now: float) -> bool:
        """Whether it was renewed in the last ten minutes (rule 2)."""
        return now - self.seen_at <= LIVES_SECONDS

    @property
    def row(self) -> ClaimRow:
        """The row that the store keeps, in place of the one with the claim's tag."""
        values = [self.digest, self.release, self.first_at, self.seen_at]
        return ClaimRow(self.key, msgpack.packb(values), self.tag)


def read_claim(row: ClaimRow) -> Claim | None:
    """The claim in a row; None if it is damaged: `ScheduleEngine.claim` replaces such a row."""
    try:
        found: Any = Columns({"claim": row.data}).unpacked("claim")
        if not isinstance(found, list):
            return None
        columns = Columns(dict(zip(("digest", "release", "first", "seen"), found, strict=False)))
        claim = Claim(
            columns.text("digest"),
            columns.count("release"),
            columns.time("first"),
            columns.time("seen"),
            row.tag,
        )
    except Damaged:
        return None
    return claim if claim.key == row.key else None


def best(claims: Iterable[Claim]) -> Claim | None:
    """The claim whose definition counts; None if there is none."""
    return max(claims, key=lambda claim: claim.rank, default=None)


# -- What was read ---------------------------------------------------------------------------------


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
