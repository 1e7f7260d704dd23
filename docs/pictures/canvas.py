"""A canvas for boxes, arrows and text, written as SVG that follows the light or dark theme.

Rules
1. Every text lies inside the picture, and no text covers another: `Canvas.svg` raises otherwise, so
   a picture with cut-off or overlapping text cannot be committed.
2. Colours are classes. The style sheet in the SVG gives each class a colour for both themes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import hypot
from typing import NamedTuple
from xml.sax.saxutils import escape

STYLE = """\
svg { --bg: #ffffff; --ink: #1f2328; --dim: #59636e; --line: #818b98; --fill: #f6f8fa;
  --blue: #0969da; --blue-fill: #ddf4ff; --green: #1a7f37; --green-fill: #dafbe1;
  --red: #cf222e; --red-fill: #ffebe9; --amber: #9a6700; --amber-fill: #fff8c5; }
@media (prefers-color-scheme: dark) {
  svg { --bg: #0d1117; --ink: #f0f6fc; --dim: #9198a1; --line: #656c76; --fill: #161b22;
    --blue: #58a6ff; --blue-fill: #121d2f; --green: #3fb950; --green-fill: #12261e;
    --red: #ff7b72; --red-fill: #2d1518; --amber: #d29922; --amber-fill: #272115; }
}
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); }
.bold { font-weight: 600; } .small { font-size: 12px; } .dim { fill: var(--dim); }
.title { font-size: 15px; font-weight: 600; }
.t-blue { fill: var(--blue); } .t-green { fill: var(--green); }
.t-red { fill: var(--red); } .t-amber { fill: var(--amber); }
.shape { stroke-width: 1.3; } .plain { fill: var(--fill); stroke: var(--line); }
.halo { paint-order: stroke; stroke: var(--bg); stroke-width: 5px; }
.frame { fill: none; stroke: var(--line); stroke-dasharray: 5 4; }
.hollow { fill: var(--bg); stroke: var(--line); stroke-dasharray: 5 4; }
.blue { fill: var(--blue-fill); stroke: var(--blue); }
.green { fill: var(--green-fill); stroke: var(--green); }
.red { fill: var(--red-fill); stroke: var(--red); }
.amber { fill: var(--amber-fill); stroke: var(--amber); }
.arrow { fill: none; stroke: var(--dim); stroke-width: 1.4; }
.a-red { stroke: var(--red); } .a-blue { stroke: var(--blue); } .a-green { stroke: var(--green); }
.a-dash { stroke-dasharray: 5 4; } .head { fill: var(--dim); } .head.a-red { fill: var(--red); }
.head.a-blue { fill: var(--blue); } .head.a-green { fill: var(--green); }"""

NARROW, WIDE = frozenset("iljtfrI.,:;'|!()[] -"), frozenset("mwMW@%")


class Extent(NamedTuple):
    """Where a text lies: its left, top, right and bottom, in pixels."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    def covers(self, other: Extent) -> bool:
        """The two have an area in common."""
        beside = self.right <= other.left or other.right <= self.left
        return not beside and self.top < other.bottom and other.top < self.bottom


def width_of(text: str, size: float = 13.0, *, bold: bool = False) -> float:
    """Pixels that a text takes in a wide font (DejaVu Sans), so that it fits in any other."""
    units = sum(
        0.38 if each in NARROW else 0.92 if each in WIDE else 0.70 if each.isupper() else 0.61
        for each in text
    )
    return units * size * (1.08 if bold else 1.0)


class Canvas:
    """One picture. Coordinates are pixels from its upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        """title: what a screen reader says in place of the picture."""
        self.width, self.height, self._title = width, height, title
        self._parts: list[str] = []
        self._texts: list[Extent] = []
        self._problems: list[str] = []

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        """One line whose baseline is at `y`. style: classes; anchor: start, middle or end."""
        styles = style.split()
        size = 15.0 if "title" in styles else 12.0 if "small" in styles else 13.0
        width = width_of(text, size, bold="bold" in styles or "title" in styles)
        left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
        extent = Extent(text, left, y - size * 0.75, left + width, y + size * 0.2)
        self._texts.append(extent)
        beyond = extent.left < 0 or extent.right > self.width
        if beyond or extent.top < 0 or extent.bottom > self.height:
            self._problems.append(f"{text!r} is cut off")
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{_class(style)}>{escape(text)}</text>'
        )

    def lines(
        self, x: float, y: float, lines: Sequence[str], style: str = "", anchor: str = "start"
    ) -> None:
        """Several lines, 17 pixels apart."""
        for number, line in enumerate(lines):
            self.text(x, y + 17 * number, line, style, anchor)

    def box(
        self, x: float, y: float, width: float, height: float, *lines: str, style: str = "plain"
    ) -> None:
        """A box with centred lines, the first one bold."""
        self._rect(x, y, width, height, style)
        first = y + height / 2 - 17 * (len(lines) - 1) / 2 + 4.5
        for number, line in enumerate(lines):
            kind = "bold" if number == 0 else "small dim"
            wide = width_of(line, 13.0 if number == 0 else 12.0, bold=number == 0)
            if wide > width - 6:
                self._problems.append(f"{line!r} is {wide:.0f} wide in a box of {width:g}")
            self.text(x + width / 2, first + 17 * number, line, kind, "middle")

    def bar(self, x: float, y: float, width: float, height: float, style: str) -> None:
        """A box without text and without round corners."""
        self._rect(x, y, width, height, style, radius=2)

    def frame(self, x: float, y: float, width: float, height: float, title: str) -> None:
        """A dashed frame around other things, its title in the upper left corner."""
        self._rect(x, y, width, height, "frame")
        self.text(x + 12, y + 20, title, "bold")

    def _rect(
        self, x: float, y: float, width: float, height: float, style: str, radius: int = 6
    ) -> None:
        if min(x, y) < 0 or x + width > self.width or y + height > self.height:
            self._problems.append(f"a box at {x:g}, {y:g} is cut off")
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}"'
            f"{_class('shape ' + style)}/>"
        )

    def arrow(
        self, *points: tuple[float, float], style: str = "", head: bool = True, both: bool = False
    ) -> None:
        """A line through the points, with a head at its end. both: at its beginning as well."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{path}"{_class("arrow " + style)}/>')
        if head:
            self._head(points[-2], points[-1], style)
        if both:
            self._head(points[1], points[0], style)

    def _head(self, start: tuple[float, float], end: tuple[float, float], style: str) -> None:
        (x, y), length = end, hypot(end[0] - start[0], end[1] - start[1])
        dx, dy = (end[0] - start[0]) / length * 9, (end[1] - start[1]) / length * 9
        corners = ((x, y), (x - dx - dy / 2, y - dy + dx / 2), (x - dx + dy / 2, y - dy - dx / 2))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self._parts.append(f'<polygon points="{points}"{_class("head " + style)}/>')

    def cross(self, x: float, y: float, size: float = 6) -> None:
        """Where something dies."""
        for sign in (1, -1):
            self.arrow(
                (x - size, y - sign * size), (x + size, y + sign * size), style="a-red", head=False
            )

    def svg(self) -> str:
        """The file. Raises ValueError where a text is cut off or covers another."""
        problems = self._problems + [
            f"{one.text!r} and {two.text!r} overlap"
            for one, two in combinations(self._texts, 2)
            if one.covers(two)
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img">',
                f"<title>{escape(self._title)}</title>",
                f"<style>\n{STYLE}\n</style>",
                f'<rect width="{self.width}" height="{self.height}" style="fill: var(--bg)"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def _class(style: str) -> str:
    return f' class="{style.strip()}"' if style.strip() else ""
