"""The slots that a put-off message carries, as the signed header ``aztask-slots``.

Its text is ``ENTRY@EPOCH@TIME``, for several limits separated by ``;``. A slot of another weight
than 1 has ``@WEIGHT`` behind it. A text that is damaged counts as none, as one with a weight does
for a release that knows none: the delivery claims new slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

MOST_SLOTS: Final = 16


@dataclass(frozen=True, slots=True)
class Slot:
    """A claimed slot.

    `entry`: its limit's entry. `at`: in the store's UTC epoch seconds. `weight`: how much of the
    rate it takes.
    """

    entry: str
    epoch: int
    at: float
    weight: int = 1

    def __str__(self) -> str:
        text = f"{self.entry}@{self.epoch}@{self.at:.6f}"
        return text if self.weight == 1 else f"{text}@{self.weight}"


def slots_text(slots: Iterable[Slot]) -> str:
    """Write slots as the text of the header."""
    return ";".join(map(str, slots))


def slots_of(text: str | None) -> dict[str, Slot]:
    """The slots in a header, by entry."""
    found = {}
    for part in (text or "").split(";")[:MOST_SLOTS]:
        entry, _, rest = part.partition("@")
        epoch, _, rest = rest.partition("@")
        at, _, weight = rest.partition("@")
        try:
            slot = Slot(entry, int(epoch), float(at), int(weight or 1))
        except ValueError:
            continue
        if math.isfinite(slot.at) and slot.weight > 0:
            found[entry] = slot
    return found
