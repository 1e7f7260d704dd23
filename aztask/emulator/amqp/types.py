"""The Python values that AMQP types decode to, where Python has no type of its own for them.

All integers decode to int, floats to float, binary to bytes, uuid to `uuid.UUID`, char and string
to str, lists and arrays to list, maps to dict. Decimals stay undecoded bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Symbol(str):
    """An ASCII word of the protocol; equal to the str of the same characters."""

    __slots__ = ()


class Timestamp(int):
    """Milliseconds since 1970-01-01T00:00Z."""

    __slots__ = ()


class Described(NamedTuple):
    """A value with its descriptor (an int code or a symbol)."""

    descriptor: Any
    value: Any


def undescribed(value: Any) -> Any:
    """The value without its descriptors: filters arrive with and without one."""
    while isinstance(value, Described):
        value = value.value
    return value
