"""Find runs: a list with conditions, page by page, figures of a list, and one search for any id.

Rules
1. A page ends with a place, and the next one begins behind it: runs that end in the meantime move
   nothing and repeat nothing.
2. Lists are read in bulk (`ResultStore.lines`), and the row of a run only if it may be shown. A
   page looks at `MOST_LOOKED` runs, reads `MOST_ROWS` rows and takes `SEARCH_SECONDS` at most, and
   as many requests as who asks may spend.
3. If that does not fill a page, it shows what was found until then, says how far back it looked,
   and has a place all the same: the next page goes on from there. It is an error only if the store
   answers nothing at all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Final

from aztask.app import App
from aztask.errors import (
    AztaskError,
    BrokerUnavailable,
    CapabilityError,
    ConfigurationError,
    ForeignId,
    NotFound,
)
from aztask.operate.action import results_of
from aztask.operate.workers import running
from aztask.operate.workflows import workflow
from aztask.stores.records.base import (
    NO_SUCH_PLACE,
    WAITING,
    ResultStore,
    RunKey,
    RunLine,
    RunLines,
    RunRecord,
    State,
)
from aztask.support import clock

MOST_LOOKED: Final = 5_000
"""Runs that a page looks at: on Azure Tables an answer has a thousand of them, which cost 0.1 s of
CPU time, most of it in the SDK."""
MOST_ROWS: Final = 500
"""Rows that a page reads one by one, beside those that it shows: of runs whose line does not tell
whether they fit."""
SEARCH_SECONDS: Final = 5.0
LEAST_SECONDS: Final = 1.0
"""What is asked for in the last moment has so long to answer."""
FIRST_SECONDS: Final = 20.0
"""The first lines and rows have so long: without them there is nothing to show."""
MOST_FIGURED: Final = 2_000
MOST_UNREADABLE: Final = 200


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs are listed: those that meet every condition; "" means any.

    * `text`: in the id, the error's type or its message, upper and lower case alike.
    """

    state: str = ""
    task: str = ""
    queue: str = ""
    worker: str = ""
    text: str = ""

    def matches(self, run: RunRecord) -> bool:
        """True for a run that meets every condition."""
        error = "" if run.outcome is None else run.outcome.error_text
        return (
            self.state in ("", run.shown_state)
            and self.task in ("", run.task)
            and self.queue in ("", run.queue)
            and self.worker in ("", run.worker)
            and self._has_text(run.key.task_id, error)
        )

    def may_match(self, line: RunLine) -> bool:
        """False for a run that does not meet a condition, as far as its line tells."""
        return (
            self.task in ("", line.task or self.task)
            and self.queue in ("", line.queue or self.queue)
            and self.worker in ("", self.worker if line.worker is None else line.worker)
            and (None in (line.task_id, line.error) or self._has_text(line.task_id, line.error))
        )

    def _has_text(self, *texts: str | None) -> bool:
        wanted = self.text.casefold()
        return not wanted or any(wanted in each.casefold() for each in texts if each)

    def given(self) -> dict[str, str]:
        """The conditions that are given, by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if value}


@dataclass(frozen=True, slots=True)
class RunsPage:
    """One page of runs, the newest first.

    * `next`: the place behind which the next page begins; "" if this is the last one.
    * `searched`: how many runs were looked at; `back`: when the last of them ended or started, UTC
      epoch seconds, None if that is not known.
    * `stopped`: the page is not full, and there are more runs (rule 3).
    * `damaged`: task ids and reasons of rows that cannot be read.
    """

    runs: Sequence[RunRecord]
    next: str
    searched: int
    back: float | None = None
    stopped: bool = False
    damaged: Sequence[tuple[str, str]] = ()


def find_runs(
    app: App,
    chosen: RunFilter,
    *,
    limit: int = 50,
    after: str = "",
    requests: float = math.inf,
) -> RunsPage:
    """A page of runs of all owners. after: `RunsPage.next` of the page before.

    requests: that lines and rows may cost of a service, beside the first lines.

    Raises ConfigurationError for a place that no page has, BrokerUnavailable, and CapabilityError
    for a state whose runs the store does not list.
    """
    store = results_of(app)
    if chosen.state == State.UNREADABLE.value:
        return _unreadable(store, chosen, limit, after)
    page = _listed(store, chosen, limit, requests, after)
    if after or chosen.state or not store.remote:
        return page
    # Damaged rows that workers have found: a list of ended runs on a network has none of them.
    found = store.recent(state=State.UNREADABLE, limit=MOST_UNREADABLE, everyone=True)
    known = dict(page.damaged) | {each.key.task_id: each.damage for each in found}
    return replace(page, damaged=list(known.items()))


def _listed(
    store: ResultStore, chosen: RunFilter, limit: int, requests: float, after: str = ""
) -> RunsPage:
    """A page of the runs that the store's list has."""
    stored = State.SNOOZED.value if chosen.state == WAITING else chosen.state
    state = State(stored) if stored else None
    searches = any(getattr(chosen, name) for name in ("task", "queue", "worker", "text"))
    lines = store.lines(state=state, after=after, everyone=True, many=searches)
    return _Search(lines, chosen, limit, requests).page()


def _unreadable(store: ResultStore, chosen: RunFilter, limit: int, after: str) -> RunsPage:
    """A page of the quarantine, which has few rows. Its places are numbers."""
    if after and not (after.isascii() and after.isdigit() and len(after) < 10):
        raise ConfigurationError(NO_SUCH_PLACE)
    found = store.recent(state=State.UNREADABLE, limit=MOST_UNREADABLE, everyone=True)
    runs = [each for each in found if chosen.matches(each)]
    begin = int(after or 0)
    end = begin + limit
    return RunsPage(runs[begin:end], str(end) if len(runs) > end else "", len(found))


@dataclass
class _Search:
    """The search for one page.

    * `place`, `count`, `back`: up to where runs were looked at, how many, and when it ended.
    * `rows`: how many rows were read one by one.
    """

    lines: RunLines
    chosen: RunFilter
    limit: int
    requests: float
    until: float = field(default_factory=lambda: clock.monotonic() + SEARCH_SECONDS)
    found: dict[RunKey, tuple[str, RunRecord]] = field(default_factory=dict)
    damaged: list[tuple[str, str]] = field(default_factory=list)
    place: str = ""
    count: int = 0
    back: float | None = None
    rows: int = 0

    def page(self) -> RunsPage:
        """Search until the page is full, the list ends, or a bound is reached (rule 2)."""
        self.place = self.lines.place
        try:
            while not (self._full or self.lines.ended or self._bound):
                self._look(self.lines.more(self._seconds))
        except BrokerUnavailable:
            if not self.count:
                raise
        runs = list(self.found.values())[: self.limit]
        whole = self.lines.ended and self.place == self.lines.place
        following = runs[-1][0] if self._full else "" if whole else self.place
        stopped = bool(following) and not self._full
        shown = [run for _, run in runs]
        return RunsPage(shown, following, self.count, self.back, stopped, self.damaged)

    @property
    def _full(self) -> bool:
        """One more than the page shows: so it is known that there is a next one."""
        return len(self.found) > self.limit

    @property
    def _bound(self) -> bool:
        if clock.monotonic() >= self.until or (self.count and self.lines.requests > self.requests):
            return True
        return self.count >= MOST_LOOKED or self.rows >= MOST_ROWS + self.limit

    @property
    def _seconds(self) -> float:
        """What the next question may take: nothing can be shown without an answer to the first."""
        left = self.until - clock.monotonic() if self.count else FIRST_SECONDS
        return max(LEAST_SECONDS, left)

    def _look(self, lines: Sequence[RunLine]) -> None:
        """Look at lines, and read the rows of those that may match, some at a time."""
        waiting: list[RunLine] = []
        seen = 0
        for number, line in enumerate(lines, 1):
            if self.chosen.may_match(line):
                waiting.append(line)
            wanted = len(waiting) + len(self.found) > self.limit
            if wanted or number == len(lines):
                self._read(waiting)
                # Not before: if the rows do not come, the next page begins with them.
                self.count, self.place, self.back = self.count + number - seen, line.place, line.at
                waiting, seen = [], number
                if self._full or (self._bound and number < len(lines)):
                    return
        self.place = self.lines.place

    def _read(self, lines: Sequence[RunLine]) -> None:
        if not lines:
            return
        self.rows += len(lines)
        for line, run in zip(lines, self.lines.read(lines, self._seconds), strict=True):
            if run is None:
                continue
            if run.state is State.UNREADABLE:
                self.damaged.append((run.key.task_id, run.damage))
            elif self.chosen.matches(run):
                if run.damage:
                    self.damaged.append((run.key.task_id, run.damage))
                self.found.setdefault(run.key, (line.place, run))


def ended_at(run: RunRecord) -> float | None:
    """When the run ended, else when it started; UTC epoch seconds."""
    return run.outcome.at if run.outcome is not None else run.started_at


# -- figures of a list ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """Figures of the runs of one task in a list.

    * `failed`: runs that ended as failed. `retried`: runs after which the task comes again.
    * `median`, `p95`, `p99`: seconds that its runs took; None if none has ended.
    """

    task: str
    runs: int
    failed: int
    retried: int
    median: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class NewestFigures:
    """Figures of the newest runs, the task with the most failures first. runs: how many."""

    tasks: Sequence[TaskFigures]
    runs: int


def newest_figures(app: App) -> NewestFigures:
    """The figures of each task among the newest `MOST_FIGURED` runs, as their lines tell.

    In a store where an older release has written lines, `MOST_ROWS` runs are read for them. Raises
    BrokerUnavailable, and ConfigurationError without a result store.
    """
    by_task: dict[str, list[RunLine]] = defaultdict(list)
    count = 0
    for line in islice(_told(results_of(app).lines(everyone=True, many=True)), MOST_FIGURED):
        by_task[line.task or ""].append(line)
        count += 1
    tasks = [_figures(task, each) for task, each in by_task.items()]
    tasks.sort(key=lambda each: (-each.failed, -each.retried, each.task))
    return NewestFigures(tasks, count)


def _told(lines: RunLines) -> Iterator[RunLine]:
    """Lines that name their tasks; of others, the first `MOST_ROWS` are read."""
    until, rows = clock.monotonic() + SEARCH_SECONDS, 0
    while not lines.ended and clock.monotonic() < until:
        try:
            some = lines.more(FIRST_SECONDS)
        except BrokerUnavailable:
            if not lines.place:
                raise
            return
        silent = [each for each in some if each.task is None][: MOST_ROWS - rows]
        rows += len(silent)
        read = zip(silent, lines.read(silent, FIRST_SECONDS), strict=True)
        runs = {line.place: run for line, run in read if run is not None}
        for line in some:
            if line.task is not None:
                yield line
            elif (run := runs.get(line.place)) is not None and run.state is not State.UNREADABLE:
                taken = None if run.outcome is None else run.outcome.duration
                yield replace(line, task=run.task, duration=taken)


def _figures(task: str, runs: Sequence[RunLine]) -> TaskFigures:
    durations = sorted(each.duration for each in runs if each.duration is not None)
    states = [each.state for each in runs]
    return TaskFigures(
        task,
        len(runs),
        states.count(State.FAILED),
        states.count(State.RETRYING),
        *(percentile(durations, share) for share in (0.5, 0.95, 0.99)),
    )


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of them does not exceed; None without values."""
    if not ordered:
        return None
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)]


# -- one search for everything -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hit:
    """Something that was found. kind: ``task``, ``workflow``, ``worker``, ``queue``, ``name``."""

    kind: str
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Hits:
    """What was found. runs: how far the search of runs looked; None if it could not."""

    found: Sequence[Hit]
    runs: RunsPage | None = None


def search(app: App, text: str, *, limit: int = 50, requests: float = math.inf) -> Hits:
    """What has this id or name, then the runs whose id or error contains the text.

    requests: as in `find_runs`. A queue is found by its whole name. Raises BrokerUnavailable, and
    ConfigurationError without a result store.
    """
    hits = [*_by_name(app, text), *_running(app, text)]
    page = None
    with suppress(CapabilityError):
        page = _listed(results_of(app), RunFilter(text=text), limit, requests)
        hits += _runs_in(page.runs)
    once = {(each.kind, each.name): each for each in reversed(hits)}
    return Hits(list(once.values())[::-1][:limit], page)


def _runs_in(runs: Iterable[RunRecord]) -> Iterator[Hit]:
    for run in runs:
        error = run.outcome.error_type if run.outcome is not None else ""
        about = f"{run.shown_state} run of {run.task}{': ' if error else ''}{error}"
        yield Hit("task", run.key.task_id, about)


def _by_name(app: App, text: str) -> Iterator[Hit]:
    store = results_of(app)
    with suppress(ForeignId):
        run = store.get(text)
        if run is not None:
            yield Hit("task", text, f"task {run.task}, {run.shown_state}")
    with suppress(NotFound, AztaskError):
        root = workflow(app, text).root
        yield Hit("workflow", text, f"workflow of {root.tasks} tasks, {root.state.value}")
    if text in app.tasks:
        yield Hit("name", text, "a task that the app registers")
    if text in app.broker.listing().queues:
        yield Hit("queue", text, "queue")


def _running(app: App, text: str) -> Iterator[Hit]:
    """Workers and running tasks whose names contain the text."""
    for row in running(app).rows:
        if text in row.worker.name:
            yield Hit("worker", row.worker.name, f"worker, {row.state}")
        if text in row.task.task_id:
            yield Hit("task", row.task.task_id, f"runs {row.task.task} on {row.worker.name}")
