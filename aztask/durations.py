"""Durations: seconds inside, ``timedelta`` or a short text at the edges. Never milliseconds."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Final

from aztask.errors import ConfigurationError
from aztask.masking import printable

_UNITS: Final = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_NUMBER = r"([0-9]{1,12}(?:\.[0-9]{1,9})?)"
_PLAIN = re.compile(_NUMBER)
_PART = re.compile(_NUMBER + r"(ms|d|h|m|s)")


def parse_duration(text: str) -> float:
    """Seconds in ``30s``, ``5m``, ``1h30m``, ``250ms``, ``1.5h``, ``2d`` or plain seconds.

    Units come largest first, each once. Raises ConfigurationError on anything else, negative
    durations, ``nan`` and ``inf`` included.
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


def seconds(value: object, name: str) -> float:
    """`value` (a number of seconds or a timedelta) as a float that is finite and not negative.

    Raises ConfigurationError that names the setting.
    """
    if isinstance(value, timedelta):
        return seconds(value.total_seconds(), name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(
            f"{name} is a number of seconds or a timedelta, not {printable(repr(value), 60)[1:-1]}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0:
        raise ConfigurationError(
            f"{name} is {number:g}; give a finite number of seconds, 0 or more"
        )
    return number
