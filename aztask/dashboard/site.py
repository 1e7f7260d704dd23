"""What the pages share: the app, the readings of its figures, and answers for many viewers.

Rules
1. Each question, an address and what its visitor may see, is answered once for all who ask.
2. Who asks waits for `Site.patience` at most. Then they get the answer before, which says how old
   it is, or a page that says since when it is being made (`Making`). So a page of a million dead
   letters does not hang: open pages ask again by themselves.
3. What takes long is not begun again at once: however many ask, it takes a tenth of a core, and a
   third of its time it waits for a service, at most.
4. After a change, nothing older than it is shown (`Site.forget`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, Final

from aztask.app import App
from aztask.dashboard.access import Visitor
from aztask.dashboard.render import Live
from aztask.errors import AztaskError, NotFound
from aztask.operate.deadletters.letters import ReadLetters
from aztask.operate.history import KeptHours
from aztask.operate.overview import Figures, Reader
from aztask.operate.requests import Role
from aztask.support.durations import parse_duration
from aztask.support.threadpool import ThreadPool

FRESH_SECONDS: Final = 2.0
PATIENCE: Final = 0.3
"""Seconds: a page that comes later seems to hang."""

CPU_REST: Final = 10
WAITING_REST: Final = 2
"""For so many times what it took, CPU time and time, an answer is not made again."""

OLD_SECONDS: Final = 15.0
"""A page that is older says so."""

MOST_ANSWERS: Final = 256
MAKERS: Final = 8
"""Threads that make answers: most of them wait for a service."""

PAGE_SIZE: Final = 50
SEARCH_REQUESTS: Final = 12
"""A search that has cost so many is not continued: a page costs at most 20 with everything else."""

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
    """A page: the template's name, its title, and what the template writes.

    * `at`: when it was made, UTC epoch seconds, if it is older than a page is as a rule; else None.
    * `live`: what the template has written of it, see `aztask.dashboard.render.Live`.
    """

    template: str
    title: str
    values: Mapping[str, Any]
    at: float | None = None
    live: Live = field(default_factory=Live, compare=False)


class Making(AztaskError):
    """An answer is still being made. `seconds`: for so long already."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it is still being counted, after {seconds:.0f} s; look in a moment")
        self.seconds = seconds


@dataclass(slots=True)
class _Answer:
    """The last answer to one question: a page or an error, neither before the first one.

    * `at`: when it was begun, monotonic; `wall`: and by the wall clock.
    * `took`, `rest`: seconds that it took, and that it is not made again.
    * `making`: the next one, which was begun at `since`; None if none is made.
    """

    lock: Lock = field(default_factory=Lock)
    page: Shown | None = None
    error: Exception | None = None
    at: float = float("-inf")
    wall: float = 0.0
    took: float = 0.0
    rest: float = 0.0
    making: Future[None] | None = None
    since: float = 0.0

    def given(self, now: float) -> Shown:
        """The page, with its age if it is old. Raises the error, or Making if there is neither."""
        if self.error is not None:
            raise self.error
        if self.page is None:
            raise Making(now - self.since)
        return self.page if now - self.at <= OLD_SECONDS else replace(self.page, at=self.wall)


@dataclass
class Site:
    """One dashboard of one app.

    * `queues`: that it shows; empty means all.
    * `values_role`: the least role that sees arguments, results and checkpoints.
    * `patience`: seconds that who asks waits for an answer.
    """

    app: App
    queues: Sequence[str] = ()
    values_role: Role = Role.ACT
    patience: float = PATIENCE
    reader: Reader = field(init=False)
    kept: KeptHours = field(default_factory=KeptHours, init=False)
    letters: ReadLetters = field(default_factory=ReadLetters, init=False)
    _figures: Figures = field(default_factory=Figures, init=False)
    _reading: Lock = field(default_factory=Lock, init=False)
    _answers: dict[object, _Answer] = field(default_factory=dict, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)
    _makers: ThreadPool = field(init=False)

    def __post_init__(self) -> None:
        self._makers = ThreadPool("pages", MAKERS, longest=float("inf"))
        self.reader = Reader(self.app, lambda: self.queues or self.app.broker.listing().queues)

    def figures(self) -> Figures:
        """Figures that are at most `FRESH_SECONDS` old. One thread reads, the others wait."""
        with self._reading:
            if time.time() - self._figures.at > FRESH_SECONDS:
                self._figures = self.reader.read()
            return self._figures

    def answer(
        self,
        page: Callable[[Site, Ask], Shown],
        ask: Ask,
        fresh: float = FRESH_SECONDS,
        patience: float | None = None,
    ) -> Shown:
        """The page, made at most once in `fresh` seconds for each address and kind of visitor.

        patience: other than that of the site. Raises Making, and what `page` raises.
        """
        known = self._known((ask.path, tuple(sorted(ask.query.items())), ask.sees_values))
        with known.lock:
            now = time.monotonic()
            if now - known.at <= known.took + max(fresh, known.rest):
                return known.given(now)
            making = known.making
            if making is None or making.done():  # done, and still there: its thread was ended
                known.since = now
                making = known.making = self._makers.submit(partial(self._make, known, page, ask))
        wait([making], self.patience if patience is None else patience)
        with known.lock:
            return known.given(time.monotonic())

    def _make(self, known: _Answer, page: Callable[[Site, Ask], Shown], ask: Ask) -> None:
        """Make an answer, in a thread of its own. An error is an answer, too, for those who ask."""
        at, wall, cpu = time.monotonic(), time.time(), time.thread_time()
        made, error = None, None
        try:
            made = page(self, ask)
        except Exception as raised:  # noqa: BLE001  # an SDK may raise anything; the page says it
            error = raised
        took, cpu = time.monotonic() - at, time.thread_time() - cpu
        with known.lock:
            known.page, known.error, known.making = made, error, None
            known.at, known.wall, known.took = at, wall, took
            known.rest = 0.0 if error else max(CPU_REST * cpu, WAITING_REST * took)

    def _known(self, question: object) -> _Answer:
        """What is known of a question. Answers have a bound: the oldest go, not those in work."""
        with self._lock:
            if len(self._answers) >= MOST_ANSWERS and question not in self._answers:
                idle = (each for each, known in self._answers.items() if known.making is None)
                if (oldest := next(idle, None)) is None:
                    raise AztaskError("too many pages are being made; look again in a moment")
                del self._answers[oldest]
            return self._answers.setdefault(question, _Answer())

    def forget(self) -> None:
        """Forget all answers: something was changed, and the next page must show it."""
        with self._lock:
            self._answers.clear()
