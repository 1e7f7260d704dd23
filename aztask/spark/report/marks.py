"""What a chart consists of: marks with coordinates, which ``templates/chart.svg`` draws.

A mark's `kind` selects its macro there. `style` is a CSS class of ``templates/style.css``; `tip` is
the text that a pointer brings up. Lengths are units of the chart's own width and height.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from aztask.support.masking import printable


@dataclass(frozen=True, slots=True)
class Rect:
    """A box. radius: of its corners. opacity: 0 to 1; None: as the style sheet says."""

    x: float
    y: float
    width: float
    height: float
    style: str
    tip: str = ""
    radius: int = 0
    opacity: float | None = None
    kind: str = "rect"


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line from (x1, y1) to (x2, y2)."""

    x1: float
    x2: float
    y1: float
    y2: float
    style: str
    kind: str = "line"


@dataclass(frozen=True, slots=True)
class Circle:
    """A dot around (x, y)."""

    x: float
    y: float
    radius: int
    style: str
    tip: str = ""
    kind: str = "circle"


@dataclass(frozen=True, slots=True)
class Path:
    """A line through several points."""

    points: Sequence[tuple[float, float]]
    style: str
    kind: str = "path"


@dataclass(frozen=True, slots=True)
class Label:
    """A text whose baseline is at `y`."""

    x: float
    y: float
    text: str
    style: str
    kind: str = "label"


@dataclass(frozen=True, slots=True)
class Group:
    """Marks that share one tip."""

    tip: str
    marks: Sequence[Rect | Line | Circle | Label]
    kind: str = "group"


Mark: TypeAlias = Rect | Line | Circle | Path | Label | Group


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing. name: its id within the page. title: what a screen reader says."""

    name: str
    title: str
    width: int
    height: float
    marks: Sequence[Mark]


# Texts of the report: numbers as a person writes them, and names from events made readable.


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
