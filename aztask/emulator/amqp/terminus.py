"""Sources and targets: where a link begins and ends (specification part 3.5).

Rule: a terminus is echoed byte for byte, except for the fields that the broker sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aztask.emulator.amqp import encode
from aztask.emulator.amqp.decode import decode, skip
from aztask.emulator.amqp.errors import INVALID_FIELD, AmqpError
from aztask.emulator.amqp.types import Described, Symbol, undescribed

SOURCE = 0x28
TARGET = 0x29
COORDINATOR = 0x30
FILTER_FIELD = 7

_DESCRIPTORS: dict[Any, int] = {
    SOURCE: SOURCE,
    TARGET: TARGET,
    COORDINATOR: COORDINATOR,
    "amqp:source:list": SOURCE,
    "amqp:target:list": TARGET,
    "amqp:coordinator:list": COORDINATOR,
}


@dataclass(frozen=True, slots=True)
class Terminus:
    """One end of a link.

    kind: SOURCE, TARGET or COORDINATOR. filters: of a source, by name, without descriptors.
    raw: the bytes that the peer sent.
    """

    kind: int
    address: str
    dynamic: bool
    filters: dict[str, Any]
    raw: bytes


def parse_terminus(value: Described | None, raw: bytes) -> Terminus | None:
    """Return the terminus of an attach's field, or None for null.

    Raises AmqpError for any other value.
    """
    if value is None:
        return None
    kind = _DESCRIPTORS.get(value.descriptor) if _hashable(value.descriptor) else None
    fields = value.value
    if kind is None or not isinstance(fields, list):
        raise AmqpError(INVALID_FIELD, "a source or target is neither")
    address = fields[0] if fields and kind != COORDINATOR else None
    filters = fields[FILTER_FIELD] if kind == SOURCE and len(fields) > FILTER_FIELD else None
    return Terminus(
        kind=kind,
        address=_address(address),
        dynamic=kind != COORDINATOR and len(fields) > 4 and fields[4] is True,
        filters={
            str(name): undescribed(value)
            for name, value in (filters if isinstance(filters, dict) else {}).items()
        },
        raw=raw,
    )


def _hashable(descriptor: Any) -> bool:
    return type(descriptor) in (int, str, Symbol)


def _address(value: Any) -> str:
    """Return an address as text: SDKs send strings, symbols and binaries [seen]."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else ""


def raw_fields(described_list: bytes) -> list[bytes]:
    """Return the encoded items of an encoded described list.

    The list must have been decoded before: nothing is checked here.
    """
    position = skip(described_list, 1)
    code = described_list[position]
    if code == encode.EMPTY_LIST[0]:
        return []
    width = 1 if code >> 4 == 0xC else 4
    count = int.from_bytes(described_list[position + 1 + width : position + 1 + 2 * width])
    position += 1 + 2 * width
    items = []
    for _ in range(count):
        end = skip(described_list, position)
        items.append(described_list[position:end])
        position = end
    return items


def with_filter(source: Terminus, name: str, value: bytes) -> bytes:
    """Return the peer's source with the filter `name` set to an encoded value.

    The value gets the descriptor of the peer's filter, if that had one.
    """
    items = raw_fields(source.raw)
    filters, _ = decode(items[FILTER_FIELD])
    pairs = [(encode.symbol(name), _described_like(filters.get(name), name, value))]
    items[FILTER_FIELD] = encode.map_of(pairs)
    return encode.described(SOURCE, encode.list_of(items))


def _described_like(original: Any, name: str, value: bytes) -> bytes:
    if not isinstance(original, Described):
        return value
    if isinstance(original.descriptor, int):
        return b"\x00" + encode.ulong(original.descriptor) + value
    return b"\x00" + encode.symbol(name) + value
