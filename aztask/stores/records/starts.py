"""The earlier starts of a run, which its row keeps for `aztask explain`.

Rules
1. A run's first start writes nothing here: most runs start once. Each later start notes the one
   before it, in the same write.
2. A row keeps `KEPT_STARTS` of them and counts the others, so that it does not grow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import msgpack

# -- startowner ------------------------------------------------------------------------------
#
# The owner of a start row names its delivery, so that an older delivery takes no row from a newer.
#
# Rules
# 1. The delivery count is part of the owner's text. The broker raises it with each delivery of one
#    message and lowers it only when a delivery is released, which then no longer acts. So of two
#    deliveries that may still act, the newer has the higher count, on every broker.
# 2. Counts are compared for one message (position) only. A row of an earlier release has no count,
#    and is taken over as before.


_MARK = "#"


def owner_of(name: str, delivery_count: int) -> str:
    """The owner's text for a delivery. name: unique to the delivery's lease."""
    return f"{name}{_MARK}{delivery_count}"


def is_newer(owner: str | None, than: str) -> bool:
    """True if `owner` is of a newer delivery than the owner `than` of the same message."""
    if not owner:
        return False
    count, other = _count(owner), _count(than)
    return count is not None and other is not None and count > other


def _count(owner: str) -> int | None:
    digits = owner.rpartition(_MARK)[2] if _MARK in owner else ""
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 19 else None


# -- starts ----------------------------------------------------------------------------------


KEPT_STARTS: Final = 19
"""With the last start, which has columns of its own, a row knows 20."""
ERROR_CHARACTERS: Final = 100
GIVEN_BACK: Final = "given back"
"""The end of a start that did not happen: its delivery was released before the task ran."""


@dataclass(frozen=True, slots=True)
class EarlierStart:
    """A start of a run before the last one.

    * `at`: UTC epoch seconds.
    * `end`: the state that it ended with, `GIVEN_BACK`, or "" if no end was recorded: the worker
      died, or lost its lease.
    * `error`: of that end, cut.
    """

    at: float
    worker: str
    end: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class EarlierStarts:
    """The starts of a run before the last one, the oldest first.

    `dropped`: how many starts before `kept` are no longer in the row.
    """

    kept: tuple[EarlierStart, ...] = ()
    dropped: int = 0

    def plus(self, start: EarlierStart) -> EarlierStarts:
        """These starts and one more; the oldest of many is dropped."""
        kept = (*self.kept, replace(start, error=start.error[:ERROR_CHARACTERS]))
        return EarlierStarts(kept[-KEPT_STARTS:], self.dropped + max(0, len(kept) - KEPT_STARTS))

    def pack(self) -> bytes | None:
        """The starts as bytes, None if there are none; `Columns.starts` reads them."""
        if not self.kept:
            return None
        rows = [(each.at, each.worker, each.end, each.error) for each in self.kept]
        packed: bytes = msgpack.packb((self.dropped, rows), unicode_errors="surrogatepass")
        return packed


NO_STARTS: Final = EarlierStarts()
