"""Bits, decisions and values as bytes.

Documents come from outside: whatever is wrong with one raises Damaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgpack

from aztask.stores.records.base import State
from aztask.stores.records.damage import Damaged
from aztask.workflows.bits import (
    FAILURES,
    Bit,
    Decision,
    Failure,
    FullRow,
    Join,
    MemberEnd,
    OfJoin,
    ParkedValue,
    Value,
)

TEXT: Final = 500
"""Characters of an error's text that are kept."""

_CODES: Final = {
    State.SUCCEEDED: 1,
    State.FAILED: 2,
    State.CANCELLED: 3,
    State.EXPIRED: 4,
}
_PLAIN: Final = _CODES[State.SUCCEEDED]
_STATES: Final = {code: state for state, code in _CODES.items()}


def pack_join(join: Join) -> bytes:
    """The document of a join as bytes; `read_join` reads them."""
    decision = None if join.decision is None else packed_decision(join.decision)
    rows = [
        None
        if row is None
        else [row.revision, row.failed, row.values, [_packed_failure(f) for f in row.failures]]
        for row in join.rows
    ]
    packed: bytes = msgpack.packb([rows, decision])
    return packed


def pack_values(values: Sequence[tuple[Value | None, Failure | None]]) -> bytes:
    """Values and failures of a row's members, in order, as one document."""
    packed: bytes = msgpack.packb([[_packed_value(v), _packed_failure(f)] for v, f in values])
    return packed


def read_values(data: bytes) -> list[tuple[Value | None, Failure | None]]:
    """What `pack_values` wrote. Raises Damaged."""
    return [(_value_of(value), _failure_of(failure)) for value, failure in _pairs(data)]


def _pairs(data: bytes) -> Iterator[tuple[Any, Any]]:
    for each in unpacked(data):
        if not isinstance(each, list) or len(each) != 2:
            raise Damaged("a document of values holds something else")
        yield each[0], each[1]


def read_join(data: bytes, rows: int) -> Join:
    """The document of a join with `rows` rows that `pack_join` wrote. Raises Damaged."""
    found, decision = _two(data)
    if len(found) != rows:
        raise Damaged(f"a join has {len(found)} rows, not {rows}")
    return Join([_full_row_of(row) for row in found], decision_of(decision))


def _two(data: bytes) -> tuple[list[Any], Any]:
    parts = unpacked(data)
    if len(parts) != 2 or not isinstance(parts[0], list):
        raise Damaged("a document of bits holds something else")
    return parts[0], parts[1]


def unpacked_all(data: bytes) -> list[Any]:
    """The list in a document, and the pieces that were appended to it. Raises Damaged."""
    found: list[list[Any]] = []
    while True:
        try:
            return [*found, unpacked(data)]
        except _More as more:
            found.append(_list(more.first))
            data = more.rest


class _More(Damaged):
    """There is more behind the list in a document."""

    def __init__(self, first: Any, rest: bytes) -> None:
        super().__init__("a document of a workflow has more behind its end")
        self.first = first
        self.rest = rest


def unpacked(data: bytes) -> list[Any]:
    """The list in a document. Raises Damaged."""
    try:
        found = msgpack.unpackb(data, unicode_errors="surrogatepass")
    except msgpack.ExtraData as more:
        raise _More(more.unpacked, more.extra) from None
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        raise Damaged(f"a document of a workflow cannot be decoded ({len(data)} bytes)") from None
    return _list(found)


def _list(found: Any) -> list[Any]:
    if not isinstance(found, list):
        raise Damaged("a document of a workflow is no list")
    return found


def packed_bit(bit: Bit | None) -> list[Any] | None:
    """A bit as plain data; `bit_of` reads it."""
    if bit is None:
        return None
    head = [_CODES[bit.state], bit.node, bit.generation, bit.revision, _packed_value(bit.value)]
    return [*head, [_packed_failure(each) for each in bit.failures]] if bit.failures else head


def is_plain(packed: Any) -> bool:
    """True for the usual bit: a member that has succeeded once, with a value in the row.

    Most bits are never decoded, which would take a third of the time of a member's end.
    """
    return (
        type(packed) is list
        and len(packed) == 5
        and packed[0] == _PLAIN
        and packed[3] == 0
        and type(packed[4]) is bytes
    )


def bit_of(packed: Any) -> Bit | None:
    """The bit in plain data; None for None. Raises Damaged."""
    if packed is None:
        return None
    fields = _fields(packed, 5, 6)
    state = _state_of(fields[0])
    node, generation, revision = (number_of(each) for each in fields[1:4])
    failures = tuple(_failures(fields[5])) if len(fields) > 5 else ()
    return Bit(state, node, generation, revision, _value_of(fields[4]), failures)


def pack_late(index: int, end: MemberEnd) -> bytes:
    """A bit as a piece to append to a row; `Row` reads it. index: the member's, in the row."""
    kept = end.value if end.state is State.SUCCEEDED else None
    bit = Bit(end.state, end.node, end.generation, 0, kept, end.failures[:FAILURES])
    packed: bytes = msgpack.packb([index, packed_bit(bit)])
    return packed


def late_bits(pieces: Sequence[Any], size: int) -> list[tuple[int, Bit]]:
    """What `pack_late` wrote, in the order of versions. Raises Damaged.

    * `size`: the members of the row.
    """
    found: list[tuple[int, Bit]] = []
    for piece in pieces:
        index, packed = _fields(piece, 2, 2)
        bit = bit_of(packed)
        if bit is None or number_of(index) >= size:
            raise Damaged("an appended bit has the wrong form")
        found.append((index, bit))
    return sorted(found, key=lambda each: (each[0], each[1].node, each[1].generation))


def _packed_value(value: Value | None) -> Any:
    if isinstance(value, ParkedValue):
        return [value.document, value.index]
    return value.join if isinstance(value, OfJoin) else value


def _value_of(packed: Any) -> Value | None:
    if packed is None or isinstance(packed, bytes):
        return packed
    if isinstance(packed, list):
        document, index = _fields(packed, 2, 2)
        return ParkedValue(_text(document), number_of(index))
    return OfJoin(number_of(packed))


def _packed_failure(failure: Failure | None) -> list[Any] | None:
    if failure is None:
        return None
    return [failure.node, _CODES[failure.state], failure.error_type, failure.error[:TEXT]]


def _failure_of(packed: Any) -> Failure | None:
    if packed is None:
        return None
    node, state, error_type, error = _fields(packed, 4, 4)
    return Failure(number_of(node), _state_of(state), _text(error_type), _text(error))


def _full_row_of(packed: Any) -> FullRow | None:
    if packed is None:
        return None
    revision, failed, values, failures = _fields(packed, 4, 4)
    return FullRow(number_of(revision), number_of(failed), _text(values), _failures(failures))


def packed_decision(decision: Decision) -> list[Any]:
    """A decision as plain data; `decision_of` reads it."""
    return [
        _CODES[decision.state],
        decision.generation,
        decision.at,
        decision.failed,
        [_packed_failure(each) for each in decision.failures],
        decision.values,
        decision.by,
    ]


def decision_of(packed: Any) -> Decision | None:
    """The decision in plain data; None for None. Raises Damaged."""
    if packed is None:
        return None
    state, generation, at, failed, failures, values, by = _fields(packed, 7, 7)
    if not isinstance(at, float) or not isinstance(values, list):
        raise Damaged("the decision of a join is no decision")
    return Decision(
        _state_of(state),
        number_of(generation),
        at,
        number_of(failed),
        tuple(_failures(failures)),
        tuple(_text(each) for each in values),
        _text(by),
    )


def _failures(packed: Any) -> list[Failure]:
    if not isinstance(packed, list):
        raise Damaged("a list of failures is no list")
    return [failure for failure in map(_failure_of, packed) if failure is not None]


def _fields(packed: Any, least: int, most: int) -> list[Any]:
    if not isinstance(packed, list) or not least <= len(packed) <= most:
        raise Damaged("a part of a workflow's document has the wrong form")
    return packed


def _state_of(code: Any) -> State:
    state = _STATES.get(code) if type(code) is int else None
    if state is None:
        raise Damaged("a bit has an unknown state; a newer aztask may know it")
    return state


def number_of(value: Any) -> int:
    """A number of at least 0. Raises Damaged."""
    if type(value) is not int or value < 0:
        raise Damaged("a number in a workflow's document is none")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Damaged("a text in a workflow's document is none")
    return value
