"""One entry of a task's history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GAP: Final = "gap"


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that happened to a task, or a gap.

    * `at`: UTC epoch seconds; None for a gap whose time is not known.
    * `kind`: of an event (see `aztask.events.event`), ``start`` or an outcome's state for what only
      a row knows, or `GAP`.
    * `text`: what happened, in words; not masked against terminals.
    * `source`: ``event``, ``row`` or ``both``; "" for a gap.
    * `worker`: that it happened on, or the sender.
    * `delivery`: the broker's delivery count, if it is known.
    """

    at: float | None
    kind: str
    text: str
    source: str = ""
    worker: str = ""
    delivery: int | None = None


def gap(text: str, at: float | None = None) -> Entry:
    """A gap: `text` says what is not known."""
    return Entry(at, GAP, text)


def seconds(value: float) -> str:
    """A duration with three digits: ``0.00123 s``, ``12.5 s``, ``123 s``."""
    return f"{value:.0f} s" if abs(value) >= 1000 else f"{value:.3g} s"
