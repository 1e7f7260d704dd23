"""The columns of events: for Spark, for Arrow, and what makes a row of them.

Rules
1. A row is an event, or tells of something odd in a file; ``odd`` is null for events and names the
   oddity otherwise. So one file can hold both, and one filter parts them.
2. Times are seconds since 1970 (UTC) and durations are seconds, as in the lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from aztask.support.masking import mask

TEXTS: Final = ("id", "event", "task_id", "task", "queue", "worker")
"""Texts that every event has."""
COUNTS: Final = ("delivery_count", "resubmit_count")
"""Whole numbers that are 0 where they are left out."""
NUMBERS: Final = (
    "duration_seconds",
    "wait_seconds",
    "lease_seconds",
    "margin_seconds",
    "held_seconds",
)
"""Numbers that may be left out."""

ODD_COLUMNS: Final = ("odd", "odd_text", "odd_file", "odd_line")

ARROW: Final = pa.schema(
    [
        ("id", pa.string()),
        ("event", pa.string()),
        ("ts", pa.float64()),
        *((name, pa.string()) for name in ("task_id", "task", "queue", "worker")),
        *((name, pa.int64()) for name in COUNTS),
        *((name, pa.float64()) for name in NUMBERS),
        ("renewals", pa.int64()),
        ("error_type", pa.string()),
        ("error", pa.string()),
        ("odd", pa.string()),
        ("odd_text", pa.string()),
        ("odd_file", pa.string()),
        ("odd_line", pa.int64()),
    ]
)
EVENT_COLUMNS: Final = tuple(name for name in ARROW.names if name not in ODD_COLUMNS)

_SQL_TYPES: Final = {pa.string(): "STRING", pa.float64(): "DOUBLE", pa.int64(): "BIGINT"}
DDL: Final = ", ".join(f"{field.name} {_SQL_TYPES[field.type]}" for field in ARROW)
"""The same for Spark."""

NOT_AN_EVENT: Final = "not an event"
EMPTY: Final = "empty line"
TORN: Final = "torn line"
TOO_LONG: Final = "line too long"
NULS: Final = "NUL bytes"
CLOCK_BACK: Final = "clock went back"
CORRUPT: Final = (NOT_AN_EVENT, EMPTY, TORN, TOO_LONG, NULS)
"""Lines that are no events, or hold bytes that are none. `CLOCK_BACK` tells of sound lines."""
DAMAGED: Final = "damaged Parquet file"
UNREADABLE: Final = "unreadable file"
"""Of files: one row for each, after the events that could be read."""
EXCERPT: Final = 200
"""Characters of an odd line, or of an error, that are kept."""


def table_of(columns: dict[str, Any], rows: int) -> pa.Table:
    """All columns in order, null where not given."""
    return pa.table(
        [columns.get(field.name, pa.nulls(rows, field.type)) for field in ARROW], schema=ARROW
    )


def odd_table(file: str, rows: Sequence[tuple[str, str, int | None]]) -> pa.Table:
    """Odd rows of one file: what is wrong, a text, the line's number (None: of the whole file)."""
    whats, texts, numbers = zip(*rows, strict=True)
    columns: dict[str, Any] = {
        "odd": pa.array(whats, pa.string()),
        "odd_text": pa.array(map(_excerpt, texts), pa.string()),
        "odd_file": pa.array([file] * len(whats), pa.string()),
        "odd_line": pa.array(numbers, pa.int64()),
    }
    return table_of(columns, len(whats))


def storable(text: str) -> str:
    """The text, with half surrogate pairs as the text of their escape: Arrow has UTF-8 only."""
    return text.encode("utf-8", "backslashreplace").decode()


def _excerpt(text: str) -> str:
    """The beginning, without secrets."""
    return mask(storable(text[: 2 * EXCERPT]).replace("\0", "\\0"))[:EXCERPT]
