"""What the pages share: the app, the readings of its figures, and answers for many viewers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final

from aztask.app import App
from aztask.dashboard.access import Visitor
from aztask.errors import NotFound
from aztask.operate.history import KeptHours
from aztask.operate.overview import Figures, Reader
from aztask.operate.requests import Role
from aztask.support.durations import parse_duration

FRESH_SECONDS: Final = 2.0
MOST_ANSWERS: Final = 256
PAGE_SIZE: Final = 50
LONGEST_CONDITION: Final = 500


@dataclass(frozen=True, slots=True)
class Ask:
    """What a visitor asks: the page's address without its host, split.

    * `sees_values`: whether the visitor may see arguments, results and checkpoints.
    """

    path: str
    query: Mapping[str, str]
    visitor: Visitor
    sees_values: bool = False

    def text(self, name: str) -> str:
        """A condition of the query, without spaces around it; "" if it is not given."""
        return self.query.get(name, "").strip()[:LONGEST_CONDITION]

    def needed(self, name: str) -> str:
        """As `text`. Raises NotFound if it is not given."""
        found = self.query.get(name, "")
        if not found:
            raise NotFound(f"the address of this page needs {name}=; go back to the list")
        return found

    def seconds(self, name: str) -> float:
        """A duration in the query, such as ``5m``; 0 if it is not given. Raises as the parser."""
        text = self.text(name)
        return parse_duration(text) if text else 0.0


@dataclass(frozen=True, slots=True)
class Shown:
    """A page: the template's name, its title, and what the template writes."""

    template: str
    title: str
    values: Mapping[str, Any]


@dataclass(slots=True)
class _Answer:
    """The last answer to one question, and when it was given (monotonic seconds)."""

    lock: Lock = field(default_factory=Lock)
    at: float = float("-inf")
    page: Shown | None = None


@dataclass
class Site:
    """One dashboard of one app.

    * `queues`: that it shows; empty means all.
    * `values_role`: the least role that sees arguments, results and checkpoints.
    """

    app: App
    queues: Sequence[str] = ()
    values_role: Role = Role.ACT
    reader: Reader = field(init=False)
    kept: KeptHours = field(default_factory=KeptHours, init=False)
    _figures: Figures = field(default_factory=Figures, init=False)
    _reading: Lock = field(default_factory=Lock, init=False)
    _answers: dict[object, _Answer] = field(default_factory=dict, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)

    def __post_init__(self) -> None:
        self.reader = Reader(self.app, lambda: self.queues or self.app.broker.listing().queues)

    def figures(self) -> Figures:
        """Figures that are at most `FRESH_SECONDS` old. One thread reads, the others wait."""
        with self._reading:
            if time.time() - self._figures.at > FRESH_SECONDS:
                self._figures = self.reader.read()
            return self._figures

    def answer(
        self, page: Callable[[Site, Ask], Shown], ask: Ask, fresh: float = FRESH_SECONDS
    ) -> Shown:
        """The page, made at most once in `fresh` seconds for each address and kind of visitor."""
        key = (ask.path, tuple(sorted(ask.query.items())), ask.sees_values)
        with self._lock:
            if len(self._answers) >= MOST_ANSWERS and key not in self._answers:
                self._answers.pop(next(iter(self._answers)))
            known = self._answers.setdefault(key, _Answer())
        with known.lock:
            if known.page is None or time.monotonic() - known.at > fresh:
                known.page, known.at = page(self, ask), time.monotonic()
            return known.page

    def forget(self) -> None:
        """Forget all answers: something was changed, and the next page must show it."""
        with self._lock:
            self._answers.clear()
