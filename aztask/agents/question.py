"""What an agent asks, as the queries get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from aztask.app import App
from aztask.errors import ConfigurationError

FEW: Final = 20
MOST: Final = 100
MOST_OLDEST: Final = 20
"""Queues whose oldest message is asked for in one answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """What an agent asks. sees: whether it may see arguments, results and checkpoints."""

    app: App
    values: Mapping[str, str]
    sees: bool = False

    def text(self, key: str) -> str:
        """A value, "" if it is not given."""
        return self.values.get(key, "").strip()

    def needed(self, key: str) -> str:
        """A value that must be given. Raises ConfigurationError."""
        if not self.values.get(key):
            raise ConfigurationError(f"this tool needs {key}")
        return self.values[key]

    @property
    def limit(self) -> int:
        """How many items are asked for. Raises ConfigurationError."""
        text = self.text("limit") or str(FEW)
        if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= MOST:
            raise ConfigurationError(f"limit is a number from 1 to {MOST}")
        return int(text)


def short(seconds: float | None) -> float | None:
    """Seconds in an answer: milliseconds are enough."""
    return None if seconds is None else round(seconds, 3)
