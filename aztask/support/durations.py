"""Durations and times. Never milliseconds.

Inside aztask a duration is seconds, and a time is UTC epoch seconds. At the edges a duration is a
``timedelta``, seconds or a short text, and a time is a ``datetime`` with a time zone.

Rules: a value is checked once, here, when it enters, and is a float from then on. NaN, infinities,
booleans and numbers out of range raise a ConfigurationError that names the setting.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from typing import Final

from aztask.errors import ConfigurationError
from aztask.support.display import printable

LONGEST_SECONDS: Final = 10 * 366 * 86400.0
"""Ten years: a longer delay is a mistake in the unit, and later dates overflow some services."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS: Final = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_NUMBER = r"([0-9]{1,12}(?:\.[0-9]{1,9})?)"
_PLAIN = re.compile(_NUMBER)
_PART = re.compile(_NUMBER + r"(ms|d|h|m|s)")


def parse_duration(text: str) -> float:
    """Seconds from ``30s``, ``5m``, ``1h30m``, ``250ms``, ``1.5h``, ``2d`` or plain seconds.

    Units come largest first, each at most once. Raises ConfigurationError for anything else,
    including negative durations, ``nan`` and ``inf``.
    """
    given = text.strip()
    if _PLAIN.fullmatch(given):
        return float(given)
    position, total, largest = 0, 0.0, math.inf
    while match := _PART.match(given, position):
        unit = _UNITS[match[2]]
        if unit >= largest:
            break
        total, largest, position = total + float(match[1]) * unit, unit, match.end()
    if position == 0 or position < len(given):
        raise ConfigurationError(
            f"{printable(text, 40)} is not a duration; write 30s, 5m, 1h30m, 250ms or plain seconds"
        )
    return total


def span(seconds: float) -> str:
    """A duration in one unit: ``5m``; a negative one is ``0s``."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "m")):
        if seconds >= 2 * size:
            return f"{int(seconds / size)}{unit}"
    return f"{int(max(0.0, seconds))}s"


def fine_span(seconds: float) -> str:
    """As `span`, for what a task takes: ``0ms``, ``340ms``, ``1.6s``, ``12s``, ``5m``."""
    if seconds < 0.9995:
        return f"{max(0.0, seconds) * 1000:.0f}ms"
    return f"{seconds:.1f}s" if seconds < 9.95 else span(round(seconds))


def to_seconds(
    value: object, name: str, *, minimum: float = 0.0, maximum: float = LONGEST_SECONDS
) -> float:
    """`value` (timedelta, int or float) in seconds, from `minimum` to `maximum` inclusive.

    * `name`: the setting's name, for the error.

    Raises ConfigurationError.
    """
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = _as_float(value)
    else:
        kind = type(value).__name__
        raise ConfigurationError(
            f"{name} must be seconds or a timedelta, not {kind}; for example {name}=1.5"
        )
    if math.isnan(seconds) or not minimum <= seconds <= maximum:
        raise ConfigurationError(
            f"{name} must be between {minimum:g} and {maximum:g} seconds, not {seconds:g}"
        )
    return seconds


def to_epoch_seconds(value: object, name: str) -> float:
    """`value`, a ``datetime`` with a time zone, as UTC epoch seconds.

    * `name`: the setting's name, for the error.

    Raises ConfigurationError for another type, and for a ``datetime`` without a time zone: the
    computers that read it may be in another one.
    """
    if not isinstance(value, datetime):
        raise ConfigurationError(
            f"{name} takes a datetime with a time zone, such as datetime.now(UTC), not "
            f"{type(value).__name__}"
        )
    if value.utcoffset() is None:
        raise ConfigurationError(
            f"{name} is {value.isoformat()}, which has no time zone; write datetime.now(UTC) or "
            "datetime(..., tzinfo=UTC), or .astimezone() if it is this computer's local time"
        )
    return (value - _EPOCH) / timedelta(seconds=1)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond 1.8e308
        return math.inf if value > 0 else -math.inf
