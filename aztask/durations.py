"""Durations as users write them: a `timedelta`, or seconds as a number. Never milliseconds.

Rules: what enters is checked once, here, and is a float of seconds afterwards; NaN, infinities,
booleans and numbers out of range are a ConfigurationError that names the setting.
"""

from __future__ import annotations

import math
from datetime import timedelta

from aztask.errors import ConfigurationError

LONGEST_SECONDS = 10 * 366 * 86400.0
"""Ten years: longer delays are a mistake in the unit, and later dates overflow some services."""


def to_seconds(
    value: object, name: str, *, minimum: float = 0.0, maximum: float = LONGEST_SECONDS
) -> float:
    """`value` (timedelta, int or float) in seconds, between `minimum` and `maximum` inclusive.

    name: how the error calls the setting. Raises ConfigurationError.
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


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond 1.8e308
        return math.inf if value > 0 else -math.inf
