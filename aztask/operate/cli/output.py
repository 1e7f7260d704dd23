"""What commands print on stdout: tables for people, JSON lines for programs.

Secrets are masked in both. Control characters in foreign text never reach a terminal.
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from aztask.operate.cli.failures import one_line
from aztask.support.display import mask, plural, short_repr, visible
from aztask.support.durations import span

if TYPE_CHECKING:  # a command that reads no queue does not load the App for it
    from aztask.operate.queues import LeftOut

STATE_COLOURS = {
    "succeeded": "green",
    "alive": "green",
    "failed": "red",
    "silent": "red",
    "expired": "red",
    "unreadable": "red",
    "cancelled": "yellow",
    "retrying": "yellow",
    "snoozed": "yellow",
    "waiting": "cyan",
    "started": "cyan",
}
SHORTEST_COLUMN = 8
GAP = "  "


def print_json(value: Any) -> None:
    """Print any value as one line of JSON, secrets masked."""
    click.echo(mask(to_json(value)))


def to_json(value: Any) -> str:
    """Any value as one line of JSON.

    Dates become ISO 8601 text, UUIDs and Decimals text, bytes base64 text. Values that JSON cannot
    hold (NaN, a dict whose keys are tuples) become their repr as text.
    """
    try:
        return json.dumps(value, default=_plain, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            parts = (f"{json.dumps(key)}: {_part(part)}" for key, part in value.items())
            return "{" + ", ".join(parts) + "}"
        return json.dumps(short_repr(value))


def _part(value: Any) -> str:
    try:
        return json.dumps(value, default=_plain, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(short_repr(value))


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return str(value)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print an aligned table: numbers to the right, long texts cut on a narrow terminal."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [
        max([len(header), *(len(row[column]) for row in cells)])
        for column, header in enumerate(headers)
    ]
    if sys.stdout is not None and sys.stdout.isatty():
        fit(widths, [len(header) for header in headers], shutil.get_terminal_size().columns)
    numeric = [
        bool(rows) and all(isinstance(row[column], int | float | None) for row in rows)
        for column in range(len(headers))
    ]
    click.secho(_line([header.upper() for header in headers], widths, numeric), bold=True)
    for row in cells:
        click.echo(_line(row, widths, numeric))


def fit(widths: list[int], headers: Sequence[int], room: int) -> None:
    """Narrow the widest columns until the table fits into `room`, if it can fit."""
    least = [max(SHORTEST_COLUMN, header) for header in headers]
    while sum(widths) + len(GAP) * (len(widths) - 1) > room:
        spare = [width - low for width, low in zip(widths, least, strict=True)]
        if max(spare) <= 0:
            return
        widths[spare.index(max(spare))] -= 1


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}"
    return visible(mask(str(value)))


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    parts = []
    for cell, width, right in zip(cells, widths, numeric, strict=True):
        text = cell if len(cell) <= width else cell[: width - 1] + "…"
        text = text.rjust(width) if right else text.ljust(width)
        colour = STATE_COLOURS.get(cell)
        parts.append(click.style(text, fg=colour) if colour else text)
    return GAP.join(parts).rstrip()


def print_fields(fields: Sequence[tuple[str, object]]) -> None:
    """Print aligned ``name: value`` lines; values that are None are skipped."""
    shown = [(name, value) for name, value in fields if value is not None]
    width = max((len(name) for name, _ in shown), default=0) + 1
    for name, value in shown:
        text = _cell(value)
        colour = STATE_COLOURS.get(text)
        click.echo(f"{name + ':':<{width}} {click.style(text, fg=colour) if colour else text}")


def local_time(at: float | None) -> str | None:
    """UTC epoch seconds as local time for a table."""
    if at is None:
        return None
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (ValueError, OverflowError, OSError):
        return f"{at:g}"


def iso_time(at: float | None) -> str | None:
    """UTC epoch seconds as ISO 8601 in UTC, for JSON."""
    if at is None:
        return None
    try:
        return datetime.fromtimestamp(at, UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return f"{at:g}"


def ago(at: float, now: float) -> str:
    """How long ago, in one unit: ``5m ago``."""
    return f"{span(now - at)} ago"


# -- what a listing leaves out ---------------------------------------------------------------
#
# Queues that aztask cannot use, queues that refuse, and damaged rows.
# One line on stderr names them, so that stdout stays the same for programs.


NAMED: Final = 3
"""Damaged rows that the line names; it counts the others."""


def say_left_out(left_out: LeftOut) -> None:
    """Name the queues that were left out, if there are any."""
    if left_out.foreign:
        names = ", ".join(left_out.foreign)
        _say(f"skipped {plural(len(left_out.foreign), 'queue')} that aztask cannot use: {names}")
    for queue, why in left_out.refused.items():
        _say(f"skipped queue {queue}: {why}")


def warn_of_damage(what: str, damaged: Sequence[tuple[str, str]], then: str) -> None:
    """Name the damaged rows, if there are any.

    what: the noun, such as ``worker``. damaged: name and reason of each. then: what to do next.
    """
    if not damaged:
        return
    named = "; ".join(f"{name or '?'} ({reason})" for name, reason in damaged[:NAMED])
    more = f" and {len(damaged) - NAMED} more" if len(damaged) > NAMED else ""
    _say(f"warning: {plural(len(damaged), f'damaged {what}')}: {named}{more}; {then}")


def _say(text: str) -> None:
    click.echo(f"aztask: {one_line(text)}", err=True)


# -- progress on stderr ----------------------------------------------------------------------
#
# On a terminal one line that is rewritten, elsewhere a line now and then.


BAR_CELLS = 30
REDRAW_SECONDS = 0.1
LINE_SECONDS = 2.0


class ProgressLine:
    """Shows how many of `total` items are done, and how fast."""

    def __init__(
        self,
        total: int,
        noun: str,
        *,
        rate: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """rate: show how many are done in a second."""
        self._total = total
        self._noun = noun
        self._rated = rate
        self._clock = clock
        self._live = sys.stderr is not None and sys.stderr.isatty()
        self._started = clock()
        self._drawn_at = self._started - (REDRAW_SECONDS if self._live else 0.0)

    def show(self, done: int, note: str = "", *, last: bool = False) -> None:
        """Show the progress, unless it was shown a moment ago. last: show it in any case."""
        now = self._clock()
        pause = REDRAW_SECONDS if self._live else LINE_SECONDS
        if not last and now - self._drawn_at < pause:
            return
        self._drawn_at = now
        rate = f", {done / max(now - self._started, 1e-6):,.0f}/s" if self._rated else ""
        text = f"{done:,} of {self._total:,} {self._noun}{rate}{note}"
        if not self._live:
            click.echo(text, err=True)
            return
        filled = BAR_CELLS * done // max(1, self._total)
        bar = f"[{'#' * filled}{'-' * (BAR_CELLS - filled)}] "
        width = shutil.get_terminal_size().columns - 1
        click.echo(f"\r{(bar + text)[:width]}\x1b[K", err=True, nl=last)

    def clear(self) -> None:
        """Erase the line before something else is written."""
        if self._live:
            click.echo("\r\x1b[K", err=True, nl=False)
