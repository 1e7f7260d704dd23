"""The geometry of the report's charts: figures become marks with coordinates, and no markup.

Rules
1. A chart is a plain value. The templates alone turn it into SVG, and escape its texts.
2. Every chart has a title for screen readers, and every mark a tip that a pointer brings up.
3. Colours are CSS classes of ``templates/style.css``.
4. Names from events are cleaned here (`clean`): one line, no control characters, not too long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from aztask.support.display import printable

# -- Marks -----------------------------------------------------------------------------------------
#
# What a chart consists of: marks with coordinates, which ``templates/chart.svg`` draws.
#
# A mark's `kind` selects its macro there. `style` is a CSS class of ``templates/style.css``; `tip`
# is the text that a pointer brings up. Lengths are units of the chart's own width and height.


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
class MarkGroup:
    """Marks that share one tip."""

    tip: str
    marks: Sequence[Rect | Line | Circle | Label]
    kind: str = "group"


Mark: TypeAlias = Rect | Line | Circle | Path | Label | MarkGroup


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
MAX_SENTENCE: Final = 800


def clean(text: object) -> str:
    """Any text on one line, without control characters, cut after `MAX_LENGTH` characters.

    It is not escaped: the templates escape every text they show.
    """
    return printable(str(text), MAX_LENGTH)[1:-1] if str(text) else "(none)"


def sentence(text: object) -> str:
    """As `clean`, for sentences and commands, which may be longer."""
    return printable(str(text), MAX_SENTENCE)[1:-1] if str(text) else "(none)"


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


# -- Charts ----------------------------------------------------------------------------------------


WIDTH: Final = 960
"""The width of a chart, in units of its own coordinates."""
HALF_WIDTH: Final = 480
"""The width of a chart that shares its row with another."""
LABEL_WIDTH: Final = 210
ROW_HEIGHT: Final = 30
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Series:
    """One column of the rows: its name in the legend and its CSS class."""

    column: str
    name: str
    style: str


OUTCOMES: Final = (
    Series("succeeded", "succeeded", "ok"),
    Series("resubmitted", "retried", "retry"),
    Series("snoozed", "snoozed", "calm"),
    Series("waiting", "waiting", "mute"),
    Series("failed", "failed", "bad"),
    Series("cancelled", "cancelled", "mute"),
    Series("expired", "expired", "mute2"),
)


def outcomes_over_time(rows: Sequence[Row], step: int) -> Chart:
    """Runs by outcome over time, one stacked bar for each step of so many seconds."""
    height, left, bottom, top = 260, 56, 28, 12
    begin, steps = _time_range(rows, step)
    tallest = max((sum(row[each.column] for each in OUTCOMES) for row in rows), default=0) or 1
    ceiling = round_up(tallest)
    bar_width = (WIDTH - left) / steps
    scale = (height - bottom - top) / ceiling
    marks = _count_grid(left, height - bottom, top, ceiling)
    for row in rows:
        x = left + (row["at"] - begin) / step * bar_width
        y = float(height - bottom)
        for each in OUTCOMES:
            part = row[each.column] * scale
            if part <= 0:
                continue
            y -= part
            tip = f"{moment(row['at'])}: {count(row[each.column])} {each.name}"
            size = max(1.0, bar_width - 1), max(part, 0.6)
            marks.append(Rect(x + 0.5, y, *size, each.style, tip))
    marks += _time_axis(begin, step, steps, left, height - bottom)
    return Chart("outcomes_over_time", "Outcomes over time", WIDTH, height, marks)


def durations_over_time(title: str, rows: Sequence[Row], step: int, column: str) -> Chart:
    """Median and 99th percentile over time, on a logarithmic scale.

    column: ``wait`` or ``run``, whose values are (median, 99th percentile) in seconds, or None. One
    of them is None where runs that were cut off do not tell it: the line has no point there.
    """
    height, left, bottom, top = 220, 64, 28, 12
    begin, steps = _time_range(rows, step)
    values = [value for row in rows for value in row[column] or () if value is not None]
    scale = LogScale(values, height - bottom, top)
    step_width = (HALF_WIDTH - left) / steps
    marks: list[Mark] = []
    for tick in scale.ticks():
        y = scale.at(tick)
        marks.append(Line(left, HALF_WIDTH, y, y, "grid"))
        marks.append(Label(left - 8, y + 4, seconds(tick), "axis end"))
    points = [
        (left + ((row["at"] - begin) / step + 0.5) * step_width, row) for row in rows if row[column]
    ]
    for index, style in ((1, "line99"), (0, "line50")):
        known = [(x, row[column][index]) for x, row in points if row[column][index] is not None]
        marks.append(Path([(x, scale.at(value)) for x, value in known], style))
    for x, row in points:
        median, high = row[column]
        cut, longest = row.get("run_cut_off", 0) if column == "run" else 0, row.get("run_longest")
        texts = [
            f"> {seconds(longest)}"
            if value is None and cut
            else f"{'~' * bool(cut)}{seconds(value)}"
            for value in (median, high)
        ]
        tip = f"{moment(row['at'])}: median {texts[0]}, 99th percentile {texts[1]}"
        tip += f", {count(cut)} cut off" if cut else ""
        marks.append(
            Circle(x, scale.at(high if high is not None else longest or 0), 3, "dot99", tip)
        )
    marks += _time_axis(begin, step, steps, left, height - bottom, width=HALF_WIDTH)
    return Chart(f"{column}_over_time", title, HALF_WIDTH, height, marks)


def spreads(title: str, rows: Sequence[Row], key: str, measure: str) -> Chart:
    """For each row a bar from the median over the 90th to the 99th percentile, and the longest.

    key: the column with the row's name. measure: ``wait`` or ``run``.
    """
    rows = [row for row in rows if row[f"{measure}_p50"] is not None]
    height = ROW_HEIGHT * len(rows) + 34
    values = [row[f"{measure}_{part}"] for row in rows for part in ("p50", "max")]
    scale = LogScale(values, LABEL_WIDTH + 10, WIDTH - 90)
    marks: list[Mark] = []
    for tick in scale.ticks():
        x = scale.at(tick)
        marks.append(Line(x, x, 0, height - 24, "grid"))
        marks.append(Label(x, height - 8, seconds(tick), "axis middle"))
    for number, row in enumerate(rows):
        marks.append(_spread(row, number * ROW_HEIGHT + 5, key, measure, scale))
    return Chart(f"{measure}_by_{key}", title, WIDTH, height, marks)


def _spread(row: Row, y: float, key: str, measure: str, scale: LogScale) -> MarkGroup:
    durations = [row[f"{measure}_{part}"] for part in ("p50", "p90", "p99", "max")]
    # What runs that were cut off do not tell lies beyond the longest one that is known.
    known = [durations[-1] if value is None else value for value in durations]
    median, p90, p99, longest = (scale.at(value) for value in known)
    names = ("median", "90th percentile", "99th", "longest")
    texts = [
        f"> {seconds(durations[-1])}" if value is None else seconds(value) for value in durations
    ]
    tip = ", ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))
    return MarkGroup(
        f"{clean(row[key])}: {tip}",
        [
            Label(0, y + 14, short(row[key]), "label"),
            Line(median, longest, y + 10, y + 10, "whisker"),
            Rect(median, y + 2, max(2.0, p90 - median), 16, "p90", radius=3),
            Rect(p90, y + 5, max(1.0, p99 - p90), 10, "p99", radius=2),
            Circle(longest, y + 10, 3, "dot99"),
            Label(WIDTH, y + 14, texts[2], "axis end"),
        ],
    )


def outcome_shares(rows: Sequence[Row]) -> Chart:
    """For each task a bar of 100 %, divided by outcome."""
    height = ROW_HEIGHT * len(rows) + 4
    marks: list[Mark] = []
    for number, row in enumerate(rows):
        y, x = number * ROW_HEIGHT + 4, float(LABEL_WIDTH + 10)
        total = sum(row[each.column] for each in OUTCOMES)
        scale = (WIDTH - 80 - x) / (total or 1)
        marks.append(Label(0, y + 15, short(row["task"]), "label"))
        for each in OUTCOMES:
            part = row[each.column] * scale
            if part <= 0:
                continue
            tip = f"{row['task']}: {count(row[each.column])} {each.name}"
            tip += f" ({share(row[each.column] / total)})"
            marks.append(Rect(x, y, max(part, 1.0), 20, each.style, clean(tip)))
            x += part
        marks.append(Label(WIDTH, y + 15, count(total), "axis end"))
    return Chart("outcomes_by_task", "Outcomes by task", WIDTH, height, marks)


PATH_PARTS: Final = (
    Series("ran_seconds", "ran", "ok"),
    Series("between_seconds", "between runs", "retry"),
    Series("wait_seconds", "waited", "mute"),
)


def critical_paths(rows: Sequence[Row]) -> Chart:
    """The time on each workflow's critical path: in code, between runs and waiting."""
    left, right = LABEL_WIDTH + 10, WIDTH - 80
    sums = [sum(row[each.column] for each in PATH_PARTS) for row in rows]
    scale = (right - left) / (max(sums, default=0.0) or 1.0)
    marks: list[Mark] = []
    for number, (row, total) in enumerate(zip(rows, sums, strict=True)):
        y, x = number * ROW_HEIGHT + 4, float(left)
        marks.append(Label(0, y + 15, short(row["workflow_id"]), "label"))
        for each in PATH_PARTS:
            part = row[each.column]
            if part <= 0:
                continue
            tip = f"{row['workflow_id']}: {seconds(part)} {each.name} ({share(part / total)})"
            marks.append(Rect(x, y, max(part * scale, 1.0), 20, each.style, clean(tip)))
            x += part * scale
        marks.append(Label(WIDTH, y + 15, seconds(total), "axis end"))
    height = ROW_HEIGHT * len(rows) + 4
    return Chart("critical_paths", "Critical paths of workflows", WIDTH, height, marks)


def margins(rows: Sequence[Row]) -> Chart:
    """For each queue the lease left at settlement: least, 1 %, 10 % and median."""
    rows = [row for row in rows if row["margin_p50"] is not None]
    height = ROW_HEIGHT * len(rows) + 34
    most: float = max([row["lease_max"] or row["margin_p50"] for row in rows], default=1.0) or 1.0
    least: float = min([0.0, *(row["margin_min"] for row in rows)])
    left, right = LABEL_WIDTH + 10, WIDTH - 90

    def at(value: float) -> float:
        return left + (value - least) / (most - least or 1.0) * (right - left)

    danger = max(0.0, at(0.1 * most) - left)
    marks: list[Mark] = [Rect(left, 0, danger, height - 26, "danger")]
    for part in range(5):
        value = most * part / 4
        marks.append(Line(at(value), at(value), 0, height - 26, "grid"))
        marks.append(Label(at(value), height - 8, seconds(value), "axis middle"))
    for number, row in enumerate(rows):
        marks.append(_margin(row, number * ROW_HEIGHT + 5, at))
    title = "Lease left at settlement, by queue"
    return Chart("margin_by_queue", title, WIDTH, height, marks)


def _margin(row: Row, y: float, at: Callable[[float], float]) -> MarkGroup:
    least, p01, p10, median = (row[f"margin_{part}"] for part in ("min", "p01", "p10", "p50"))
    tip = (
        f"{row['queue']}: least {seconds(least)}, 1 % below {seconds(p01)}, "
        f"10 % below {seconds(p10)}, median {seconds(median)}, lease {seconds(row['lease_max'])}"
    )
    end = at(row["lease_max"] or median)
    return MarkGroup(
        clean(tip),
        [
            Label(0, y + 14, short(row["queue"]), "label"),
            Line(at(least), end, y + 10, y + 10, "whisker"),
            Rect(at(p01), y + 4, max(2.0, at(median) - at(p01)), 12, "margin", radius=3),
            Circle(at(least), y + 10, 4, "dotbad" if least < 0 else "dot"),
            Line(end, end, y + 2, y + 18, "edge"),
            Label(WIDTH, y + 14, seconds(p01), "axis end"),
        ],
    )


def runs_by_hour(rows: Sequence[Row]) -> Chart:
    """Runs of each queue in each hour, darker where there are more."""
    return _by_hour(rows, "runs_by_queue_and_hour", "Runs", ("runs",), "runs", "heat")


def failures_by_hour(rows: Sequence[Row]) -> Chart:
    """Failed and retried runs and lost leases of each queue in each hour."""
    name, columns = "failures_by_queue_and_hour", ("failed", "resubmitted", "lease_lost")
    return _by_hour(rows, name, "Failures", columns, "failures", "heatbad")


def _by_hour(
    rows: Sequence[Row], name: str, what: str, columns: Sequence[str], unit: str, style: str
) -> Chart:
    """A cell for each queue and hour, by the sum of these columns."""
    begin, steps = _time_range([{"at": row["hour"]} for row in rows], 3600)
    queues = sorted({row["queue"] for row in rows})
    sums = [sum(row[column] for column in columns) for row in rows]
    most = max(sums, default=0) or 1
    left = LABEL_WIDTH + 10
    cell = (WIDTH - left) / steps
    bottom = len(queues) * (ROW_HEIGHT - 4)
    marks: list[Mark] = [
        Label(0, number * (ROW_HEIGHT - 4) + 17, short(queue), "label")
        for number, queue in enumerate(queues)
    ]
    for row, number in zip(rows, sums, strict=True):
        x = left + (row["hour"] - begin) / 3600 * cell
        y = queues.index(row["queue"]) * (ROW_HEIGHT - 4)
        tip = f"{row['queue']}, {moment(row['hour'])}: {count(number)} {unit}"
        tip += f", {count(row['run_cut_off'])} cut off" if row.get("run_cut_off") else ""
        # The square root keeps quiet hours visible beside busy ones.
        depth = 0.12 + 0.88 * math.sqrt(number / most) if number else 0.05
        size = max(1.0, cell - 1), 24
        marks.append(Rect(x + 0.5, y + 1, *size, style, clean(tip), radius=2, opacity=depth))
    marks += _time_axis(begin, 3600, steps, left, bottom)
    return Chart(name, f"{what} by queue and hour", WIDTH, bottom + 28, marks)


class LogScale:
    """Durations to coordinates, from `low` to `high`, by the logarithm."""

    def __init__(self, values: Sequence[float], low: float, high: float) -> None:
        positive = [value for value in values if value > 0] or [0.001, 1.0]
        self._first = math.floor(math.log10(max(min(positive), 1e-6)))
        self._last = max(self._first + 1, math.ceil(math.log10(max(positive))))
        self._low, self._high = low, high

    def at(self, value: float) -> float:
        """The coordinate of a value; zero and less are drawn at the low end."""
        power = math.log10(value) if value > 0 else self._first
        part = (max(power, self._first) - self._first) / (self._last - self._first)
        return self._low + min(1.0, part) * (self._high - self._low)

    def ticks(self) -> list[float]:
        """The powers of ten that the scale covers."""
        return [10.0**power for power in range(self._first, self._last + 1)]


def round_up(value: float) -> float:
    """A round number that is not below `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.2, 1.6, 2, 3, 4, 6, 8, 10) if step * power >= value)


def short(text: object) -> str:
    """A label that fits its column: long names keep their beginning and end."""
    label = str(text)
    return clean(label if len(label) <= 30 else f"{label[:13]}…{label[-16:]}")


def _time_range(rows: Sequence[Row], step: int) -> tuple[int, int]:
    """The first moment, and the number of steps up to the last."""
    if not rows:
        return 0, 1
    moments = [row["at"] for row in rows]
    return min(moments), (max(moments) - min(moments)) // step + 1


def _count_grid(left: float, bottom: float, top: float, ceiling: float) -> list[Mark]:
    """Five horizontal lines, each with its count."""
    marks: list[Mark] = []
    for part in range(5):
        y = bottom - (bottom - top) * part / 4
        marks.append(Line(left, WIDTH, y, y, "grid"))
        marks.append(Label(left - 8, y + 4, count(ceiling * part / 4), "axis end"))
    return marks


def _time_axis(
    begin: int, step: int, steps: int, left: float, y: float, *, width: int = WIDTH
) -> list[Label]:
    """Times along the bottom, one for every 150 units of width at most."""
    form = "%H:%M:%S" if step < 60 else "%H:%M" if step * steps <= 86400 else "%m-%d %H:%M"
    every = max(1, -(-steps // (width // 150)))
    step_width = (width - left) / steps
    return [
        Label(left + at * step_width + 2, y + 18, moment(begin + at * step, form), "axis")
        for at in range(0, steps, every)
        if left + at * step_width < width - 50 or at == 0
    ]
