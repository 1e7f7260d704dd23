"""Texts of the report: numbers as a person writes them, and names from events made readable."""

from __future__ import annotations

import math
import time
from typing import Final

from aztask.support.masking import printable

MAX_LENGTH: Final = 120


def clean(text: object) -> str:
    """Any text on one line, without control characters, cut after `MAX_LENGTH` characters.

    It is not escaped: the templates escape every text they show.
    """
    return printable(str(text), MAX_LENGTH)[1:-1] if str(text) else "(none)"


def seconds(value: float | None) -> str:
    """A duration in the unit that suits it."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    for limit, unit, name in (
        (1e-3, 1e-6, "µs"),
        (1.0, 1e-3, "ms"),
        (120.0, 1.0, "s"),
        (7200.0, 60.0, "min"),
        (172800.0, 3600.0, "h"),
    ):
        if size < limit:
            return f"{value / unit:.3g} {name}" if size else "0 s"
    return f"{value / 86400.0:.3g} d"


def count(value: float | None) -> str:
    """A whole number with thousands separators."""
    return "–" if value is None else f"{value:,.0f}"


def share(value: float | None) -> str:
    """A part of 1 in per cent; a very small one is not rounded to zero."""
    if value is None:
        return "–"
    percent = 100.0 * value
    if 0 < percent < 0.01:
        return "< 0.01 %"
    return f"{percent:.2f} %" if percent < 10 else f"{percent:.1f} %"


def per_second(value: float | None) -> str:
    """A rate per second, or per hour where it is low."""
    if value is None:
        return "–"
    return f"{value:.3g}/s" if value >= 0.1 else f"{value * 3600:.3g}/h"


def moment(ts: float | None, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Seconds since 1970 as a UTC time; as a number where the calendar has no such date."""
    if ts is None:
        return "–"
    try:
        return time.strftime(form, time.gmtime(ts))
    except (ValueError, OverflowError, OSError):
        return f"{ts:g}"


def coordinate(value: float) -> str:
    """A coordinate of SVG, to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
