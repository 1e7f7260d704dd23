"""What a chart consists of: marks with coordinates, which ``templates/chart.svg`` draws.

A mark's `kind` selects its macro there. `style` is a CSS class of ``templates/style.css``; `tip` is
the text that a pointer brings up. Lengths are units of the chart's own width and height.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


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
