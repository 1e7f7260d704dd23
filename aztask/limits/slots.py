"""The slots that a put-off message carries, as the signed header ``aztask-slots``.

Its text is ``ENTRY@EPOCH@TIME``, for several limits separated by ``;``. A text that is damaged
counts as none: the delivery claims new slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

MOST_SLOTS: Final = 16


@dataclass(frozen=True, slots=True)
class Slot:
    """A claimed slot. `entry`: its limit's entry. `at`: in the store's UTC epoch seconds."""

    entry: str
    epoch: int
    at: float


def slots_text(slots: Iterable[Slot]) -> str:
    """Write slots as the text of the header."""
    return ";".join(f"{slot.entry}@{slot.epoch}@{slot.at:.6f}" for slot in slots)


def slots_of(text: str | None) -> dict[str, Slot]:
    """The slots in a header, by entry."""
    found = {}
    for part in (text or "").split(";")[:MOST_SLOTS]:
        entry, _, rest = part.partition("@")
        epoch, _, at = rest.partition("@")
        try:
            slot = Slot(entry, int(epoch), float(at))
        except ValueError:
            continue
        if math.isfinite(slot.at):
            found[entry] = slot
    return found
