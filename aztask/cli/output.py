"""What commands print on stdout: tables for people, JSON lines for programs.

Secrets are masked in both. Control characters in foreign text never reach a terminal.
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click

from aztask.support.display import short_repr, visible
from aztask.support.masking import mask

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


def span(seconds: float) -> str:
    """A duration in one unit: ``5m``; a negative one is ``0s``."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "m")):
        if seconds >= 2 * size:
            return f"{int(seconds / size)}{unit}"
    return f"{int(max(0.0, seconds))}s"
