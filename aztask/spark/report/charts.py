"""The report's charts, as SVG text: no scripts, no fonts, no files. Colours are CSS variables.

Every chart has a title and a description for those who do not see it, and every mark a title that
a pointer brings up. Texts are made safe here: callers pass them as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count as counting
from typing import Any, Final

from aztask.spark.report.text import count, moment, safe, seconds, share

WIDTH: Final = 960
HALF: Final = 480
"""The width of a chart that has another beside it."""
LABELS: Final = 210
ROW: Final = 30
Row = dict[str, Any]
_ids = counting(1)


@dataclass(frozen=True, slots=True)
class Series:
    """One column of the rows: its name in the legend and its CSS class."""

    column: str
    name: str
    colour: str


OUTCOMES: Final = (
    Series("succeeded", "succeeded", "ok"),
    Series("resubmitted", "retried", "retry"),
    Series("snoozed", "snoozed", "calm"),
    Series("failed", "failed", "bad"),
    Series("cancelled", "cancelled", "mute"),
    Series("expired", "expired", "mute2"),
)


def svg(title: str, height: float, body: str, *, width: int = WIDTH) -> str:
    """A whole chart."""
    number = next(_ids)
    return (
        f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-labelledby="c{number}">'
        f'<title id="c{number}">{safe(title)}</title>{body}</svg>'
    )


def legend(series: Sequence[Series]) -> str:
    """What the colours mean, as HTML before a chart."""
    items = "".join(
        f'<li><svg viewBox="0 0 12 12" aria-hidden="true"><rect width="12" height="12" rx="3" '
        f'class="{each.colour}"/></svg>{safe(each.name)}</li>'
        for each in series
    )
    return f'<ul class="legend">{items}</ul>'


def stacked_bars(title: str, rows: Sequence[Row], step: int, series: Sequence[Series]) -> str:
    """Counts over time, one bar for each step."""
    height, left, bottom, top = 260, 56, 28, 12
    begin, steps = _range(rows, step)
    most = max((sum(row[each.column] for each in series) for row in rows), default=0) or 1
    ceiling = nice(most)
    wide = (WIDTH - left) / steps
    scale = (height - bottom - top) / ceiling
    marks = [_grid(left, height - bottom, top, ceiling, count)]
    for row in rows:
        x = left + (row["at"] - begin) / step * wide
        y = float(height - bottom)
        for each in series:
            tall = row[each.column] * scale
            if tall <= 0:
                continue
            y -= tall
            told = f"{moment(row['at'])}: {count(row[each.column])} {each.name}"
            marks.append(
                f'<rect x="{x + 0.5:.2f}" y="{y:.2f}" width="{max(1.0, wide - 1):.2f}" '
                f'height="{max(tall, 0.6):.2f}" class="{each.colour}"><title>{safe(told)}</title>'
                "</rect>"
            )
    marks.append(_time_axis(begin, step, steps, left, height - bottom))
    return svg(title, height, "".join(marks))


def lines(title: str, rows: Sequence[Row], step: int, column: str) -> str:
    """Median and 99th percentile over time, on a logarithmic scale."""
    height, left, bottom, top = 220, 64, 28, 12
    begin, steps = _range(rows, step)
    values = [value for row in rows for value in row[column] or () if value is not None]
    scale = LogScale(values, height - bottom, top)
    wide = (HALF - left) / steps
    marks = [
        f'<line x1="{left}" x2="{HALF}" y1="{scale.at(tick):.1f}" y2="{scale.at(tick):.1f}" '
        f'class="grid"/><text x="{left - 8}" y="{scale.at(tick) + 4:.1f}" class="axis end">'
        f"{seconds(tick)}</text>"
        for tick in scale.ticks()
    ]
    points = [
        (left + ((row["at"] - begin) / step + 0.5) * wide, row) for row in rows if row[column]
    ]
    for place, colour in ((1, "line99"), (0, "line50")):
        path = " ".join(f"{x:.1f},{scale.at(row[column][place]):.1f}" for x, row in points)
        marks.append(f'<polyline points="{path}" class="{colour}"/>')
    for x, row in points:
        median, high = row[column]
        told = f"{moment(row['at'])}: median {seconds(median)}, 99th percentile {seconds(high)}"
        marks.append(
            f'<circle cx="{x:.1f}" cy="{scale.at(high):.1f}" r="3" class="dot99"><title>'
            f"{safe(told)}</title></circle>"
        )
    marks.append(_time_axis(begin, step, steps, left, height - bottom, width=HALF))
    return svg(title, height, "".join(marks), width=HALF)


def spreads(title: str, rows: Sequence[Row], key: str, measure: str) -> str:
    """For each row a bar from the median over the 90th to the 99th percentile, and the longest."""
    rows = [row for row in rows if row[f"{measure}_p50"] is not None]
    height = ROW * len(rows) + 34
    values = [row[f"{measure}_{part}"] for row in rows for part in ("p50", "max")]
    scale = LogScale(values, LABELS + 10, WIDTH - 90)
    marks = []
    for tick in scale.ticks():
        x = scale.at(tick)
        marks.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 24}" class="grid"/>'
            f'<text x="{x:.1f}" y="{height - 8}" class="axis middle">{seconds(tick)}</text>'
        )
    for number, row in enumerate(rows):
        marks.append(_spread(row, number * ROW + 5, key, measure, scale))
    return svg(title, height, "".join(marks))


def _spread(row: Row, y: float, key: str, measure: str, scale: LogScale) -> str:
    low, mid, high, most = (scale.at(row[f"{measure}_{p}"]) for p in ("p50", "p90", "p99", "max"))
    told = ", ".join(
        f"{name} {seconds(row[f'{measure}_{part}'])}"
        for name, part in (
            ("median", "p50"),
            ("90th percentile", "p90"),
            ("99th", "p99"),
            ("longest", "max"),
        )
    )
    return (
        f'<g><title>{safe(row[key])}: {told}</title><text x="0" y="{y + 14}" class="label">'
        f'{short(row[key])}</text><line x1="{low:.1f}" x2="{most:.1f}" y1="{y + 10}" y2="{y + 10}" '
        f'class="whisker"/><rect x="{low:.1f}" y="{y + 2}" width="{max(2.0, mid - low):.1f}" '
        f'height="16" rx="3" class="p90"/><rect x="{mid:.1f}" y="{y + 5}" '
        f'width="{max(1.0, high - mid):.1f}" height="10" rx="2" class="p99"/>'
        f'<circle cx="{most:.1f}" cy="{y + 10}" r="3" class="dot99"/>'
        f'<text x="{WIDTH}" y="{y + 14}" class="axis end">{seconds(row[f"{measure}_p99"])}</text>'
        "</g>"
    )


def mix(title: str, rows: Sequence[Row], key: str, series: Sequence[Series]) -> str:
    """For each row a bar of 100 %, cut by outcome."""
    height = ROW * len(rows) + 4
    marks = []
    for number, row in enumerate(rows):
        y, x = number * ROW + 4, float(LABELS + 10)
        total = sum(row[each.column] for each in series)
        wide = (WIDTH - 80 - x) / (total or 1)
        marks.append(f'<text x="0" y="{y + 15}" class="label">{short(row[key])}</text>')
        for each in series:
            part = row[each.column] * wide
            if part <= 0:
                continue
            told = f"{row[key]}: {count(row[each.column])} {each.name}"
            told += f" ({share(row[each.column] / total)})"
            marks.append(
                f'<rect x="{x:.2f}" y="{y}" width="{max(part, 1.0):.2f}" height="20" '
                f'class="{each.colour}"><title>{safe(told)}</title></rect>'
            )
            x += part
        marks.append(f'<text x="{WIDTH}" y="{y + 15}" class="axis end">{count(total)}</text>')
    return svg(title, height, "".join(marks))


def margins(title: str, rows: Sequence[Row]) -> str:
    """For each queue what was left of the lease at settlement: least, 1 %, 10 % and median."""
    rows = [row for row in rows if row["margin_p50"] is not None]
    height = ROW * len(rows) + 34
    most: float = max([row["lease_max"] or row["margin_p50"] for row in rows], default=1.0) or 1.0
    least: float = min([0.0, *(row["margin_min"] for row in rows)])
    left, right = LABELS + 10, WIDTH - 90

    def at(value: float) -> float:
        return left + (value - least) / (most - least or 1.0) * (right - left)

    marks = [
        f'<rect x="{left}" y="0" width="{max(0.0, at(0.1 * most) - left):.1f}" '
        f'height="{height - 26}" class="danger"/>'
    ]
    for part in range(5):
        value = most * part / 4
        marks.append(
            f'<line x1="{at(value):.1f}" x2="{at(value):.1f}" y1="0" y2="{height - 26}" '
            f'class="grid"/><text x="{at(value):.1f}" y="{height - 8}" class="axis middle">'
            f"{seconds(value)}</text>"
        )
    for number, row in enumerate(rows):
        marks.append(_margin(row, number * ROW + 5, at))
    return svg(title, height, "".join(marks))


def _margin(row: Row, y: float, at: Callable[[float], float]) -> str:
    least, low, tenth, half = (row[f"margin_{part}"] for part in ("min", "p01", "p10", "p50"))
    told = (
        f"{row['queue']}: least {seconds(least)}, 1 % below {seconds(low)}, "
        f"10 % below {seconds(tenth)}, median {seconds(half)}, lease {seconds(row['lease_max'])}"
    )
    end = at(row["lease_max"] or half)
    dot = "dotbad" if least < 0 else "dot"
    return (
        f'<g><title>{safe(told)}</title><text x="0" y="{y + 14}" class="label">'
        f'{short(row["queue"])}</text><line x1="{at(least):.1f}" x2="{end:.1f}" y1="{y + 10}" '
        f'y2="{y + 10}" class="whisker"/><rect x="{at(low):.1f}" y="{y + 4}" '
        f'width="{max(2.0, at(half) - at(low)):.1f}" height="12" rx="3" class="margin"/>'
        f'<circle cx="{at(least):.1f}" cy="{y + 10}" r="4" class="{dot}"/>'
        f'<line x1="{end:.1f}" x2="{end:.1f}" y1="{y + 2}" y2="{y + 18}" class="edge"/>'
        f'<text x="{WIDTH}" y="{y + 14}" class="axis end">{seconds(low)}</text></g>'
    )


def heat(title: str, rows: Sequence[Row]) -> str:
    """Runs of each queue in each hour, darker where there are more."""
    begin, steps = _range([{"at": row["hour"]} for row in rows], 3600)
    queues = sorted({row["queue"] for row in rows})
    most = max((row["runs"] for row in rows), default=0) or 1
    left = LABELS + 10
    wide = (WIDTH - left) / steps
    bottom = len(queues) * (ROW - 4)
    marks = [
        f'<text x="0" y="{number * (ROW - 4) + 17}" class="label">{short(queue)}</text>'
        for number, queue in enumerate(queues)
    ]
    for row in rows:
        x = left + (row["hour"] - begin) / 3600 * wide
        y = queues.index(row["queue"]) * (ROW - 4)
        told = f"{row['queue']}, {moment(row['hour'])}: {count(row['runs'])} runs"
        depth = 0.12 + 0.88 * math.sqrt(row["runs"] / most) if row["runs"] else 0.05
        marks.append(
            f'<rect x="{x + 0.5:.2f}" y="{y + 1}" width="{max(1.0, wide - 1):.2f}" height="24" '
            f'rx="2" class="heat" fill-opacity="{depth:.2f}"><title>{safe(told)}</title></rect>'
        )
    marks.append(_time_axis(begin, 3600, steps, left, bottom))
    return svg(title, bottom + 28, "".join(marks))


class LogScale:
    """Durations to coordinates, from `low` to `high`, by the logarithm."""

    def __init__(self, values: Sequence[float], low: float, high: float) -> None:
        positive = [value for value in values if value > 0] or [0.001, 1.0]
        self._first = math.floor(math.log10(max(min(positive), 1e-6)))
        self._last = max(self._first + 1, math.ceil(math.log10(max(positive))))
        self._low, self._high = low, high

    def at(self, value: float) -> float:
        """Where a value stands; what is zero or less stands at the beginning."""
        power = math.log10(value) if value > 0 else self._first
        part = (max(power, self._first) - self._first) / (self._last - self._first)
        return self._low + min(1.0, part) * (self._high - self._low)

    def ticks(self) -> list[float]:
        """Powers of ten."""
        return [10.0**power for power in range(self._first, self._last + 1)]


def nice(value: float) -> float:
    """A round number that is not below `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.2, 1.6, 2, 3, 4, 6, 8, 10) if step * power >= value)


def short(text: object) -> str:
    """A label that fits its column."""
    label = str(text)
    return safe(label if len(label) <= 30 else f"{label[:13]}…{label[-16:]}")


def _range(rows: Sequence[Row], step: int) -> tuple[int, int]:
    """The first moment, and how many steps there are to the last."""
    if not rows:
        return 0, 1
    moments = [row["at"] for row in rows]
    return min(moments), (max(moments) - min(moments)) // step + 1


def _grid(left: float, bottom: float, top: float, most: float, form: Callable[[float], str]) -> str:
    marks = []
    for part in range(5):
        y = bottom - (bottom - top) * part / 4
        marks.append(
            f'<line x1="{left}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
            f'<text x="{left - 8}" y="{y + 4:.1f}" class="axis end">{form(most * part / 4)}</text>'
        )
    return "".join(marks)


def _time_axis(
    begin: int, step: int, steps: int, left: float, y: float, *, width: int = WIDTH
) -> str:
    """A moment for each 150 units of width at the most."""
    form = "%H:%M:%S" if step < 60 else "%H:%M" if step * steps <= 86400 else "%m-%d %H:%M"
    every = max(1, -(-steps // (width // 150)))
    wide = (width - left) / steps
    return "".join(
        f'<text x="{left + place * wide + 2:.1f}" y="{y + 18}" class="axis">'
        f"{moment(begin + place * step, form)}</text>"
        for place in range(0, steps, every)
        if left + place * wide < width - 50 or place == 0
    )
