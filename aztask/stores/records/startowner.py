"""The owner of a start row names its delivery, so that an older delivery takes no row from a newer.

Rules
1. The delivery count is part of the owner's text. The broker raises it with each delivery of one
   message and lowers it only when a delivery is released, which then no longer acts. So of two
   deliveries that may still act, the newer has the higher count, on every broker.
2. Counts are compared for one message (position) only. A row of an earlier release has no count,
   and is taken over as before.
"""

from __future__ import annotations

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
