"""What a person on call looks at first: the overview of the dashboard, and ``aztask top``.

Rules
1. Both draw an `Overview`, so both have the same figures. What workers did comes from
   `aztask.operate.history`, as in ``aztask stats``.
2. Both read their filter with `OverviewFilter.parse`: the query of the page's address is what you
   type in ``aztask top``.
3. A filter narrows what workers did, and the lists. It never hides what needs attention, nor does
   it change the sums of the first line.
4. What cannot be read is a line of text (`Done.why`), and the rest is shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final
from urllib.parse import parse_qsl, urlencode

from aztask.app import App
from aztask.errors import AztaskError, ConfigurationError, did_you_mean
from aztask.operate.attention import Notice, attention, backlog
from aztask.operate.history import CONDITIONS, HistoryView, KeptHours, Mark, history, marks
from aztask.operate.overview import Figures, Reader, WorkerFigures
from aztask.operate.workers import RunningRow
from aztask.queues.base import QueueStats
from aztask.stores.records.base import RunRecord
from aztask.support import clock
from aztask.support.display import printable, safe_str

LONGEST_CONDITION: Final = 500
HISTORY_EVERY: Final = 10.0
"""Seconds: workers write what they did this often, so reading it more often shows nothing new."""


@dataclass(frozen=True, slots=True)
class OverviewFilter:
    """What an overview is about.

    * `window`: how far back, of `aztask.operate.history.WINDOWS`. `by`: what each line is about.
    * `queue`, `task`, `worker`: what it is narrowed to; "" is everything.
    """

    window: str = "hour"
    by: str = "task"
    queue: str = ""
    task: str = ""
    worker: str = ""

    @classmethod
    def parse(cls, given: str | Mapping[str, str]) -> OverviewFilter:
        """A filter as the query of an address: ``queue=mail&window=day``, or its names and values.

        A text may be the whole address of a page, and may have spaces in the place of ``&``. A
        condition without a value is none. Raises ConfigurationError for an unknown name.
        """
        pairs = _pairs(given) if isinstance(given, str) else given.items()
        found: dict[str, str] = {}
        for name, value in pairs:
            if name not in NAMES:
                raise ConfigurationError(
                    f"the overview has no filter {printable(name, 40)}; give "
                    f"{', '.join(f'{each}=' for each in NAMES)}{did_you_mean(name, NAMES)}"
                )
            if value.strip():
                found[name] = value.strip()[:LONGEST_CONDITION]
        return cls(**found)

    @property
    def conditions(self) -> dict[str, str]:
        """What it is narrowed to, by name."""
        return {name: value for name in CONDITIONS if (value := getattr(self, name))}

    def query(self) -> dict[str, str]:
        """What differs from the filter without anything, by name."""
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) != each.default
        }

    def __str__(self) -> str:
        return urlencode(self.query(), errors="replace")


NAMES: Final = tuple(each.name for each in fields(OverviewFilter))


def _pairs(text: str) -> list[tuple[str, str]]:
    """The names and values of a query, an address with one, or conditions with spaces between."""
    query = text.strip().removeprefix("?")
    if query.startswith(("http://", "https://", "/")):
        query = query.partition("#")[0].partition("?")[2]
    return parse_qsl(re.sub(r"\s+", "&", query), keep_blank_values=True)


@dataclass(frozen=True, slots=True)
class Done:
    """What workers did: the history with what happened beside it; or why it cannot be shown."""

    view: HistoryView | None = None
    marks: Sequence[Mark] = ()
    why: str = ""


def done(app: App, chosen: OverviewFilter, kept: KeptHours) -> Done:
    """What workers did in the window of a filter. kept: of the caller. Raises as `history` does."""
    view = history(app, chosen.window, chosen.by, chosen.conditions, kept=kept)
    return Done(view, marks(app, view))


@dataclass(frozen=True, slots=True)
class Overview:
    """One reading of everything.

    * `figures`: the lists of a reading, narrowed by the filter; its sums are of everything.
    * `notices`: what needs attention, the most urgent first.
    * `backlog`, `dead`: messages. `alive`, `silent`: workers. `running`: tasks.
    """

    chosen: OverviewFilter = field(default_factory=OverviewFilter)
    figures: Figures = field(default_factory=Figures)
    notices: Sequence[Notice] = ()
    backlog: int = 0
    dead: int = 0
    alive: int = 0
    silent: int = 0
    running: int = 0
    done: Done = field(default_factory=Done)


def overview(app: App, figures: Figures, chosen: OverviewFilter, did: Done) -> Overview:
    """What there is to see. figures: of one reading, not narrowed."""
    states = [each.state for each in figures.workers]
    return Overview(
        chosen,
        _narrowed(figures, chosen),
        attention(app, figures),
        backlog(figures.queues),
        sum(each.dead or 0 for each in figures.queues),
        states.count("alive"),
        states.count("silent"),
        len(figures.running),
        did,
    )


def _narrowed(figures: Figures, chosen: OverviewFilter) -> Figures:
    """The lists of what the filter names. What a list does not know, does not narrow it: a queue
    has no worker, and a worker no task.
    """

    def queue(each: QueueStats) -> bool:
        return chosen.queue in ("", each.queue)

    def worker(each: WorkerFigures) -> bool:
        record = each.record
        return chosen.worker in ("", record.name) and (
            not chosen.queue or chosen.queue in record.queues
        )

    def runs(each: RunningRow) -> bool:
        return _is(chosen, each.task.queue, each.task.task, each.worker.name)

    def failure(each: RunRecord) -> bool:
        return _is(chosen, each.queue, each.task, each.worker)

    return replace(
        figures,
        queues=list(filter(queue, figures.queues)),
        workers=list(filter(worker, figures.workers)),
        running=list(filter(runs, figures.running)),
        failures=list(filter(failure, figures.failures)),
    )


def _is(chosen: OverviewFilter, queue: str, task: str, worker: str) -> bool:
    wanted = (chosen.queue, chosen.task, chosen.worker)
    return all(each in ("", has) for each, has in zip(wanted, (queue, task, worker), strict=True))


@dataclass
class OverviewReader:
    """Reads overviews again and again; the history at most every `HISTORY_EVERY` seconds.

    One thread at a time may call `read`.
    """

    reader: Reader
    _kept: KeptHours = field(default_factory=KeptHours)
    _did: Done = field(default_factory=Done)
    _of: OverviewFilter | None = None
    _at: float = 0.0

    def read(self, chosen: OverviewFilter) -> Overview:
        """Read everything once; never raises for a service that does not answer."""
        app = self.reader.app
        if self._of != chosen or clock.monotonic() - self._at >= HISTORY_EVERY:
            try:
                self._did = done(app, chosen, self._kept)
            except AztaskError as error:
                self._did = Done(why=safe_str(error))
            self._of, self._at = chosen, clock.monotonic()
        return overview(app, self.reader.read(), chosen, self._did)
