"""The columns of event rows, for Spark and for Arrow.

Rules
1. A row is either an event or a problem found in a file. ``odd`` is null for events and names the
   problem otherwise, so one file can hold both, and one filter separates them.
2. Times are seconds since 1970 (UTC) and durations are seconds, as in the lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from aztask.support.masking import mask

TEXTS: Final = ("id", "event", "task_id", "task", "queue", "worker")
"""Text columns that every event has."""
COUNTS: Final = ("delivery_count", "resubmit_count")
"""Whole numbers; 0 if a line has none."""
NUMBERS: Final = (
    "duration_seconds",
    "wait_seconds",
    "lease_seconds",
    "margin_seconds",
    "held_seconds",
)
"""Optional numbers; null if a line has none."""
WORKFLOW: Final = ("workflow_id", "parent_id")
"""Optional texts; null in events of 0.1 and in files that it compacted."""

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
        *((name, pa.string()) for name in WORKFLOW),
        ("odd", pa.string()),
        ("odd_text", pa.string()),
        ("odd_file", pa.string()),
        ("odd_line", pa.int64()),
    ]
)
EVENT_COLUMNS: Final = tuple(name for name in ARROW.names if name not in ODD_COLUMNS)

_SQL_TYPES: Final = {pa.string(): "STRING", pa.float64(): "DOUBLE", pa.int64(): "BIGINT"}
DDL: Final = ", ".join(f"{field.name} {_SQL_TYPES[field.type]}" for field in ARROW)
"""The columns of `ARROW` as Spark writes a schema."""

NOT_AN_EVENT: Final = "not an event"
EMPTY: Final = "empty line"
TORN: Final = "torn line"
TOO_LONG: Final = "line too long"
NULS: Final = "NUL bytes"
CLOCK_BACK: Final = "clock went back"
CORRUPT: Final = (NOT_AN_EVENT, EMPTY, TORN, TOO_LONG, NULS)
"""Problems of damaged lines. `CLOCK_BACK` is not among them: its lines are valid events."""
DAMAGED: Final = "damaged Parquet file"
UNREADABLE: Final = "unreadable file"
"""Problems of files: one row for each file, after the events that could be read."""
EXCERPT: Final = 200
"""Characters that are kept of a damaged line or an error text."""


def table_of(columns: dict[str, Any], rows: int) -> pa.Table:
    """A table of all columns in order; those not given are null."""
    return pa.table(
        [columns.get(field.name, pa.nulls(rows, field.type)) for field in ARROW], schema=ARROW
    )


def odd_table(file: str, rows: Sequence[tuple[str, str, int | None]]) -> pa.Table:
    """Problem rows of one file. rows: (problem, excerpt, line number; None: the whole file)."""
    problems, texts, numbers = zip(*rows, strict=True)
    columns: dict[str, Any] = {
        "odd": pa.array(problems, pa.string()),
        "odd_text": pa.array(map(_excerpt, texts), pa.string()),
        "odd_file": pa.array([file] * len(problems), pa.string()),
        "odd_line": pa.array(numbers, pa.int64()),
    }
    return table_of(columns, len(problems))


def storable(text: str) -> str:
    """The text with lone surrogates escaped, because Arrow stores UTF-8 only."""
    return text.encode("utf-8", "backslashreplace").decode()


def _excerpt(text: str) -> str:
    """The beginning of a text, with secrets masked."""
    return mask(storable(text[: 2 * EXCERPT]).replace("\0", "\\0"))[:EXCERPT]
