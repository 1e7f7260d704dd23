"""Claims: which definitions of a schedule running code has, and which of them counts.

While old and new workers run together, the code of an app has several definitions of one schedule.

Rules
1. A claim names the digest and the release of a definition. All processes whose code has it share
   the claim: the first makes it, the others renew it when it is some minutes old.
2. A claim lives ten minutes after it was last renewed, by the store's clock. A definition without a
   living claim yields to one that has a living claim.
3. Of the living claims, the higher release counts; of equal ones, that whose *first* process
   started later. So an old worker that restarts changes nothing: its claim is as old as before.
4. A claim that has ended is made anew, with the start of the process that makes it: one that was
   frozen for an hour is as old as before.
5. Releases before 0.2 make no claims; they write `Schedule.claimed_at` instead. That counts for the
   definition in the head, but it yields to a claim of the same or a higher release.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from aztask.stores.records.damage import Columns, Damaged
from aztask.stores.records.schedules import ClaimRow

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
