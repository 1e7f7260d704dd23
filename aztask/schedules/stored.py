"""A schedule and its occurrences as the result store keeps them, packed by msgpack.

Times are UTC epoch seconds. Unknown fields of a newer release are kept out, wrong ones raise
`Damaged`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

import msgpack

from aztask.stores.records.damage import Columns, Damaged
from aztask.stores.records.schedules import Occurrence

REMEMBERED: Final = 4
"""Earlier definitions whose end a head remembers, see `Schedule.left`."""

DUE: Final = "due"
WAITING: Final = "waiting"
SENT: Final = "sent"
SKIPPED: Final = "skipped"
REFUSED: Final = "refused"
_STATES: Final = (DUE, WAITING, SENT, SKIPPED, REFUSED)

PLANNED: Final = "schedule"
TRIGGERED: Final = "trigger"
BACKFILLED: Final = "backfill"
_KINDS: Final = (PLANNED, TRIGGERED, BACKFILLED)
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """The head of a schedule.

    * `template`: its message, signed, see `aztask.schedules.template`; `digest`: of its definition.
    * `release`, `deployed_at`: the higher pair decides which definition stays.
    * `made_at`: when it was made.
    * `watermark`: all occurrences up to this time are decided.
    * `by`: the worker that made the last occurrence.
    * `claimed_at`: None: it was made at run time, and needs no claim. Otherwise it is one of the
      code: 0.0, or when a worker of a release before 0.2 last claimed it, see `Claim`.
    * `paused_at`: since when it is paused, or None.
    * `last_id`, `last_at`: the task of the last occurrence that was sent, and when it was made.
    * `made`: how many occurrences there were.
    * `left`: by the digest of earlier definitions, up to which time each was decided. Releases
      before 0.2 drop it.
    """

    template: bytes
    digest: str
    release: int
    deployed_at: float
    made_at: float
    watermark: float
    by: str = ""
    claimed_at: float | None = None
    paused_at: float | None = None
    last_id: str = ""
    last_at: float = 0.0
    made: int = 0
    left: Mapping[str, float] = field(default_factory=dict)

    @property
    def of_code(self) -> bool:
        """Whether code declares it; otherwise it was made at run time."""
        return self.claimed_at is not None

    def pack(self) -> bytes:
        """The head as bytes; `read_schedule` reads them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        packed: bytes = msgpack.packb({"v": VERSION, **values})
        return packed


@dataclass(frozen=True, slots=True)
class Made:
    """One occurrence.

    * `at`: its time; `made_at`: when it was made, which is later.
    * `kind`: "schedule", "trigger" or "backfill".
    * `state`: "due" until its task is sent, "waiting" for the task before it, "sent", "skipped", or
      "refused" because it cannot be sent; `why` gives the reason.
    * `by`: the worker or the command that made it.
    """

    at: float
    task_id: str
    made_at: float
    kind: str = PLANNED
    state: str = DUE
    why: str = ""
    by: str = ""

    @property
    def key(self) -> str:
        """The key of its row: its time in milliseconds; triggered ones add the end of their id."""
        suffix = self.task_id[-9:] if self.kind == TRIGGERED else ""
        return f"{key_of(self.at)}{suffix}"

    @property
    def row(self) -> Occurrence:
        """The row that the store keeps."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return Occurrence(self.key, msgpack.packb(values), self.state in (DUE, WAITING))


def key_of(at: float) -> str:
    """The key of the occurrence at a time."""
    return f"{round(at * 1000):014d}"


def read_schedule(data: bytes) -> Schedule:
    """The head that `Schedule.pack` wrote. Raises Damaged."""
    found = Columns({"head": data}).unpacked("head")
    if not isinstance(found, dict) or found.get("v") != VERSION:
        raise Damaged("the head of a schedule is unknown or wrong; a newer aztask may know it")
    columns = Columns(found)
    return Schedule(
        columns.data("template") or b"",
        columns.text("digest"),
        columns.count("release"),
        columns.time("deployed_at"),
        columns.time("made_at"),
        columns.time("watermark"),
        columns.text("by"),
        columns.optional_time("claimed_at"),
        columns.optional_time("paused_at"),
        columns.text("last_id"),
        columns.time("last_at"),
        columns.count("made"),
        _read_left(found.get("left", {})),
    )


def _read_left(found: object) -> dict[str, float]:
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise Damaged("its left is no map")
    columns = Columns(found)
    return {key: columns.time(key) for key in list(found)[:REMEMBERED]}


def read_made(row: Occurrence) -> Made:
    """The occurrence in a row. Raises Damaged."""
    found: Any = Columns({"occurrence": row.data}).unpacked("occurrence")
    if not isinstance(found, dict):
        raise Damaged("an occurrence is no map")
    columns = Columns(found)
    made = Made(
        columns.time("at"),
        columns.text("task_id"),
        columns.time("made_at"),
        columns.text("kind"),
        columns.text("state"),
        columns.text("why"),
        columns.text("by"),
    )
    if made.kind not in _KINDS or made.state not in _STATES or made.key != row.key:
        raise Damaged("an occurrence is wrong; a newer aztask may know it")
    return made
