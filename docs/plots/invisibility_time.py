"""Draws ``invisibility-time.svg``: how long a message waits, over the moment of the crash.

Run: ``python docs/plots/invisibility_time.py``. A test compares the file with what this draws.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

SVG = Path(__file__).with_name("invisibility-time.svg")
LONGEST = 35.0
"""Minutes on both axes."""
LEFT, TOP, SIDE, RIGHT = 60, 20, 420, 190


def wait_without_renewal(lease: float, crash: float) -> float:
    """Minutes from a crash until the message can be received again; 0 once the lease is over."""
    return max(0.0, lease - crash)


def wait_with_renewal(lease: float, crash: float, renew_at: float = 0.7) -> float:
    """The same, for a lease that is renewed to its full length after `renew_at` of it."""
    return lease - crash % (renew_at * lease)


STYLE = """\
svg { --bg: #ffffff; --ink: #1f2328; --line: #59636e; --red: #b3261e; --amber: #9a6700;
  --green: #1b6e3c; }
@media (prefers-color-scheme: dark) {
  svg { --bg: #0d1117; --ink: #f0f6fc; --line: #9198a1; --red: #ff7b72; --amber: #d29922;
    --green: #3fb950; }
}
text { fill: var(--ink); }"""
"""A colour for each theme of the reader."""


class Curve(NamedTuple):
    """One line of the plot and its label."""

    label: str
    colour: str
    wait: Callable[[float], float]
    until: float


CURVES = (
    Curve("30 min, no renewal", "red", lambda crash: wait_without_renewal(30, crash), 30.0),
    Curve("5 min, no renewal", "amber", lambda crash: wait_without_renewal(5, crash), 5.0),
    Curve("1 min, renewed at 70 %", "green", lambda crash: wait_with_renewal(1, crash), LONGEST),
)


def place(minutes: float, wait: float) -> str:
    """A point of the plot in SVG coordinates."""
    scale = SIDE / LONGEST
    return f"{LEFT + minutes * scale:.1f},{TOP + SIDE - wait * scale:.1f}"


def line(curve: Curve) -> str:
    """The curve, sampled every tenth of a minute."""
    points = [n / 10 for n in range(int(curve.until * 10) + 1)]
    path = " ".join(place(minutes, curve.wait(minutes)) for minutes in points)
    return (
        f'<polyline fill="none" stroke="var(--{curve.colour})" stroke-width="2" points="{path}"/>'
    )


def axes() -> Iterable[str]:
    """Frame, ticks and captions."""
    frame = f'x="{LEFT}" y="{TOP}" width="{SIDE}" height="{SIDE}"'
    yield f'<rect {frame} fill="none" stroke="var(--line)"/>'
    for minutes in range(0, int(LONGEST) + 1, 5):
        x, _ = place(minutes, 0).split(",")
        _, y = place(0, minutes).split(",")
        yield f'<text x="{x}" y="{TOP + SIDE + 16}" text-anchor="middle">{minutes}</text>'
        yield f'<text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end">{minutes}</text>'
    middle = LEFT + SIDE / 2
    yield (
        f'<text x="{middle}" y="{TOP + SIDE + 36}" text-anchor="middle">'
        "the worker dies after ... minutes of work</text>"
    )
    centre = TOP + SIDE / 2
    yield (
        f'<text x="18" y="{centre}" text-anchor="middle" transform="rotate(-90 18 {centre})">'
        "the message waits ... minutes</text>"
    )


def example() -> Iterable[str]:
    """The crash after 10 minutes under a lease of 30."""
    x, y = place(10, 20).split(",")
    yield f'<circle cx="{x}" cy="{y}" r="4" fill="var(--red)"/>'
    yield f'<text x="{float(x) + 8:.1f}" y="{float(y) - 4:.1f}">crash after 10: waits 20</text>'


def legend() -> Iterable[str]:
    """The labels, beside the plot."""
    for number, curve in enumerate(CURVES):
        x, y = LEFT + SIDE + 14, TOP + 14 + number * 22
        yield (
            f'<rect x="{x}" y="{y - 9}" width="14" height="4" fill="var(--{curve.colour})"/>'
            f'<text x="{x + 20}" y="{y}">{curve.label}</text>'
        )


def draw() -> str:
    """The whole picture."""
    width, height = LEFT + SIDE + RIGHT, TOP + SIDE + 50
    parts = [*axes(), *map(line, CURVES), *example(), *legend()]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">\n'
        f"<style>\n{STYLE}\n</style>\n"
        f'<rect width="{width}" height="{height}" fill="var(--bg)"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    SVG.write_text(draw(), encoding="utf-8")
