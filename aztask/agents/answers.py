"""What an agent asks, and answers that a model reads: short, with ids to go on, and foreign texts
marked as data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from aztask.app import App
from aztask.errors import ConfigurationError
from aztask.support.display import mask, one_line, short_repr, visible

# -- What is asked ---------------------------------------------------------------------------------
#
# As the queries get it.

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


# -- What is answered ------------------------------------------------------------------------------

LONGEST_ANSWER: Final = 16_000
"""Characters of one answer, about 5,000 tokens."""
LONGEST_TEXT: Final = 400
LONGEST_TRACE: Final = 2_000

_PLAIN: Final = re.compile(r"[A-Za-z0-9._:@=+~-]{1,120}")

Answer = dict[str, Any]


def data(text: object, limit: int = LONGEST_TEXT) -> Answer | None:
    """A text that a task, a sender or another program wrote, marked as data; None for ""."""
    shown = visible(mask(str(text)))
    if not shown:
        return None
    return {"data": shown if len(shown) <= limit else f"{shown[: limit - 3]}..."}


def name(text: str | None) -> str | Answer | None:
    """A name or an id: as it is if it is a plain word; else marked as data, and not cut."""
    if not text:
        return None
    if _PLAIN.fullmatch(text) and mask(text) == text:
        return text
    return {"data": visible(mask(text))}


def value(given: object) -> Answer:
    """An argument, a result or a checkpoint, as JSON if it has that form."""
    try:
        text = json.dumps(given, default=short_repr, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = short_repr(given)
    return {"data": one_line(mask(text), LONGEST_TEXT)}


def trace(text: str) -> Answer | None:
    """The end of a traceback: the error is in its last lines."""
    shown = "\n".join(visible(line) for line in mask(text).splitlines())
    if len(shown) > LONGEST_TRACE:
        shown = f"...{shown[-LONGEST_TRACE:]}"
    return {"data": shown} if shown else None


def when(at: float | None) -> str | None:
    """A time as ISO 8601 in UTC."""
    if at is None:
        return None
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{at:g}"


def fields(**given: Any) -> Answer:
    """These values without those that are None or empty."""
    return {key: each for key, each in given.items() if each is not None and each not in ("", [])}


def listed(items: Sequence[Any], after: str = "", **more: Any) -> Answer:
    """A list. after: what the tool takes as ``after`` for the next page, "" if this is the end."""
    return {**fields(**more), "items": list(items), **fields(next=after or None)}


def text_of(answer: Mapping[str, Any]) -> str:
    """The answer as JSON of at most `LONGEST_ANSWER` characters.

    From one that is longer, items are dropped at the end, and ``shortened`` says how many are left.
    """
    whole = json.dumps(answer, ensure_ascii=False)
    if len(whole) <= LONGEST_ANSWER:
        return whole
    items = answer.get("items")
    kept = list(items) if isinstance(items, list) else []
    while kept:
        kept = kept[: len(kept) // 2]
        note = f"the first {len(kept)} of {len(items or [])}; ask with a smaller limit or a filter"
        rest = {key: each for key, each in answer.items() if key != "next"}
        shorter = json.dumps({**rest, "items": kept, "shortened": note}, ensure_ascii=False)
        if len(shorter) <= LONGEST_ANSWER:
            return shorter
    note = "the answer is too long; ask with a filter"
    return json.dumps({"shortened": note, **data_of(whole)}, ensure_ascii=False)


def data_of(whole: str) -> Answer:
    """The beginning of an answer that cannot be shortened otherwise."""
    return {"data": whole[: LONGEST_ANSWER // 2]}
