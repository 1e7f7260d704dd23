"""How findings name several rows in one line."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

DAMAGED_ROWS: Final = 100
"""The most damaged rows that are counted."""
NAMED_ROWS: Final = 3
"""The most rows that one line names."""


def named_rows(rows: Sequence[tuple[str, str]]) -> str:
    """How many rows there are, and the first of them with their reasons."""
    count = f"{len(rows)}{'' if len(rows) < DAMAGED_ROWS else ' or more'}"
    first = "; ".join(f"{name} ({reason})" for name, reason in rows[:NAMED_ROWS])
    return f"{count}: {first}{'; ...' if len(rows) > NAMED_ROWS else ''}"


def minute(at: float) -> str:
    """UTC epoch seconds as a date and a time to the minute."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"
