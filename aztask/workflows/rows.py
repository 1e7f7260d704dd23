"""One row of a join's bits. Only the bits that are looked at are decoded.

A row is read and written whenever one of its members ends, but nearly always only a few of its
bits are of interest.
"""

from __future__ import annotations

from typing import Any

import msgpack

from aztask.stores.records.base import State
from aztask.stores.records.damage import Damaged
from aztask.workflows.bits import FAILURES, Bit, Decision, Failure, FullRow, MemberEnd, Value
from aztask.workflows.packing import (
    bit_of,
    decision_of,
    is_plain,
    late_bits,
    number_of,
    packed_bit,
    packed_decision,
    unpacked_all,
)


class JoinRow:
    """One row. `decision`: that of the join, if this is its only row.

    `outdated`: bits were set since that decision.

    Methods raise Damaged for a bit that cannot be read.
    """

    __slots__ = ("_inline", "_packed", "decision", "outdated")

    def __init__(
        self, packed: list[Any], decision: Decision | None = None, inline_bytes: int = 0
    ) -> None:
        """packed: each member's bit as it is stored, None for members that have not ended."""
        self._packed = packed
        self._inline = inline_bytes
        self.decision = decision
        self.outdated = False

    @property
    def full(self) -> bool:
        """True if every member of the row has ended."""
        return None not in self._packed

    @property
    def ended(self) -> int:
        """How many members of the row have ended."""
        return len(self._packed) - self._packed.count(None)

    @property
    def left(self) -> int:
        """How many members of the row have not ended."""
        return self._packed.count(None)

    @property
    def inline_bytes(self) -> int:
        """How many bytes of values the row holds itself."""
        return self._inline

    @property
    def bits(self) -> list[Bit | None]:
        """The bits of all members, decoded."""
        return [bit_of(packed) for packed in self._packed]

    def bit(self, index: int) -> Bit | None:
        """The bit at that index; None if the member has not ended."""
        return bit_of(self._packed[index])

    def set(self, index: int, end: MemberEnd, value: Value) -> bool:
        """Set a member's bit; False if that changes nothing (rule 2 of `aztask.workflows.bits`).

        * `value`: the end's value, or where it is parked.
        """
        kept = value if end.state is State.SUCCEEDED else None
        bit = Bit(end.state, end.node, end.generation, 0, kept, end.failures[:FAILURES])
        if not self.put(index, bit):
            return False
        self.decision = None
        return True

    def put(self, index: int, bit: Bit) -> bool:
        """Set a member's bit, and keep the decision, which is outdated then.

        False if that changes nothing.
        """
        if self.decision is not None and self.decision.state is State.SUCCEEDED:
            return False
        old = self.bit(index)
        if old is not None:
            if (old.node, old.generation) >= (bit.node, bit.generation):
                return False
            bit.revision = old.revision + 1
            self._inline -= _length(old.value)
        self._packed[index] = packed_bit(bit)
        self._inline += _length(bit.value)
        self.outdated = True
        return True

    def as_full(self, values: str) -> FullRow:
        """What the join's document says about this full row. values: the document with them."""
        revision = failed = 0
        failures: list[Failure] = []
        for packed in self._packed:
            if packed is None or is_plain(packed):
                continue
            bit = bit_of(packed)
            if bit is not None:
                revision += bit.revision
                failed += bit.state is not State.SUCCEEDED
                failures += bit.failures
        return FullRow(revision, failed, values, failures[:FAILURES])

    def plain_values(self) -> bytes | None:
        """The values as `pack_values` writes them, if no member has failed and none is parked."""
        if not all(is_plain(packed) for packed in self._packed):
            return None
        plain: bytes = msgpack.packb([[packed[4], None] for packed in self._packed])
        return plain

    def pack(self) -> bytes:
        """The row as bytes; `read_row` reads them."""
        decision = None if self.decision is None else packed_decision(self.decision)
        packed: bytes = msgpack.packb([self._packed, decision, self._inline])
        return packed


def empty_row(size: int) -> JoinRow:
    """A row of `size` members of which none has ended."""
    return JoinRow([None] * size)


def read_row(data: bytes, size: int) -> JoinRow:
    """The row of `size` members that `JoinRow.pack` wrote, with the bits that were appended since.

    Raises Damaged.
    """
    parts, *pieces = unpacked_all(data)
    if len(parts) != 3 or not isinstance(parts[0], list):
        raise Damaged("a row of bits holds something else")
    if len(parts[0]) != size:
        raise Damaged(f"a row of bits has {len(parts[0])} members, not {size}")
    row = JoinRow(parts[0], decision_of(parts[1]), number_of(parts[2]))
    for index, bit in late_bits(pieces, size) if pieces else ():
        row.put(index, bit)
    return row


def _length(value: Value | None) -> int:
    return len(value) if isinstance(value, bytes) else 0
