"""Python types for the AMQP types that have no equivalent in Python.

The others decode as follows: integers to int, floats to float, binary to bytes, uuid to
`uuid.UUID`, char and string to str, lists and arrays to list, maps to dict. Decimals stay bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Symbol(str):
    """An AMQP symbol (ASCII); equal to the str of the same characters."""

    __slots__ = ()


class Timestamp(int):
    """An AMQP timestamp: milliseconds since 1970-01-01T00:00Z."""

    __slots__ = ()


class Described(NamedTuple):
    """A value with its descriptor, which is an int or a `Symbol`."""

    descriptor: Any
    value: Any


def undescribed(value: Any) -> Any:
    """Return the value without its descriptors: clients send filters with and without one."""
    while isinstance(value, Described):
        value = value.value
    return value
