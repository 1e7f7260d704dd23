"""Whether a value comes back as it was, before it is written; both formats ask here.

docs/reference/values.md has the table of what comes back as what. Only values that are no plain
data get here: numbers of 64 bits, text, bytes, lists and dicts cost nothing.

Rules
1. A value of a subclass is written as its base class holds it, whatever the subclass prints: its
   methods are not asked. It is refused unless the subclass itself says that the result is equal:
   a pandas ``Timestamp`` with nanoseconds is not, and ``NaT`` equals nothing.
2. Whatever the text form has no place for is refused: a zone that does not say its offset. ``fold``
   without a zone is dropped: values that differ in it alone are equal, and ``datetime.now()`` sets
   it for an hour in autumn, when sends must not start to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

_PLAIN: Final = frozenset({date, timedelta, UUID, Decimal, int})


def exact(value: Any) -> Any:
    """`value`, or what its base class holds of it. Raises ValueError if a part would be lost.

    Values of other types, which may have no encoding at all, come back as they are.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is datetime or kind is time:
        _check_clock(value)
        return value
    for base, make in _BASES:
        if isinstance(value, base):
            return exact(_as_base(value, base, make))
    return value


def _as_base(value: Any, base: type, make: Callable[[Any], Any]) -> Any:
    try:
        plain = make(value)
        same = bool(plain == value) or (base is Decimal and Decimal.is_nan(value))
    except Exception:  # noqa: BLE001  # the subclass may raise anything
        same = False
    if not same:
        name = type(value).__qualname__
        raise ValueError(
            f"a value of type {name} would lose a part of it, or has none (NaT); pass a plain"
            f" {base.__name__} that holds all of it, or None"
        )
    return plain


def _check_clock(value: datetime | time) -> None:
    """Refuse what ISO 8601 text does not hold."""
    if value.tzinfo is not None and value.utcoffset() is None:
        raise ValueError(
            f"a {type(value).__name__} whose zone does not say its offset would lose its zone;"
            " use a datetime, or a fixed offset"
        )


def _getter(base: type, *names: str) -> Callable[[Any], list[Any]]:
    """Reads fields as the base class stores them, past the properties of a subclass."""
    slots = [vars(base)[name] for name in names]
    return lambda value: [slot.__get__(value, base) for slot in slots]


_day = _getter(date, "year", "month", "day")
_clock = _getter(datetime, "hour", "minute", "second", "microsecond", "tzinfo", "fold")
_time = _getter(time, "hour", "minute", "second", "microsecond", "tzinfo", "fold")
_span = _getter(timedelta, "days", "seconds", "microseconds")
_number = _getter(UUID, "int")


def _datetime(value: Any) -> datetime:
    *parts, fold = [*_day(value), *_clock(value)]
    return datetime(*parts, fold=fold)


def _only_time(value: Any) -> time:
    *parts, fold = _time(value)
    return time(*parts, fold=fold)


# In this order: a datetime is also a date.
_BASES: Final[tuple[tuple[type, Callable[[Any], Any]], ...]] = (
    (datetime, _datetime),
    (date, lambda value: date(*_day(value))),
    (time, _only_time),
    (timedelta, lambda value: timedelta(*_span(value))),
    (UUID, lambda value: UUID(int=_number(value)[0])),
    (Decimal, Decimal),
    (int, int.__index__),
)
