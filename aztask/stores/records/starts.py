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
