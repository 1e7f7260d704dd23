"""What happens to occurrences that are late, or that come while the task of the last one runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeAlias, get_args

from aztask.errors import ConfigurationError
from aztask.stores.records.damage import Columns, Damaged
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
