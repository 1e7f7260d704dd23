"""What workers did over the last hour, day, week or 30 days, by queue, task or worker.

Rules
1. One question for the dashboard, the command line and agents: `history` gives all of them the same
   figures for the same store and time.
2. What is merged comes from the days' rows, what is not from the workers' own
   (`aztask.stores.records.history`). A time in which no worker wrote is a gap: None, not 0.
3. A window costs a few requests, however many workers there are: `WINDOWS` says what is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from aztask.app import App
from aztask.errors import ConfigurationError, did_you_mean
from aztask.operate.action import audit, results_of
from aztask.operate.workers import heartbeats
from aztask.stores.records.backlogs import Backlogs, waiting_at
from aztask.stores.records.history import TASKS, WORKERS, HistoryStore, history_of
from aztask.stores.records.tallies import (
    DAY_SLOT,
    HOUR,
    SLOT,
    Author,
    Tally,
    percentile,
    total,
)
from aztask.stores.records.tallysums import KeptHours, WindowSums
from aztask.support import clock
from aztask.support.display import plural
from aztask.version import shown_release

__all__ = [
    "BY",
    "WINDOWS",
    "Figure",
    "HistoryView",
    "KeptHours",
    "Mark",
    "WorkerStart",
    "HistoryWindow",
    "history",
    "percentile",
]

DAY: Final = 24 * HOUR


@dataclass(frozen=True, slots=True)
class HistoryWindow:
    """How far back one looks. `seconds`: of all. `step`: of one point of a chart."""

    name: str
    seconds: int
    step: int


WINDOWS: Final[Mapping[str, HistoryWindow]] = {
    each.name: each
    for each in (
        HistoryWindow("hour", HOUR, 2 * SLOT),
        HistoryWindow("day", DAY, DAY_SLOT),
        HistoryWindow("week", 7 * DAY, HOUR),
        HistoryWindow("30d", 30 * DAY, 4 * HOUR),
    )
}
"""An hour is read from the workers' own rows, a day from the days' rows with their slots, and the
longer ones from the sums of hours alone."""

WINDOW_NAMES: Final = {"hour": "hour", "day": "day", "week": "week", "30d": "30 days"}
"""As people read them, behind "the last"."""

BY: Final = ("queue", "task", "worker")
CONDITIONS: Final = BY
"""The names of what a view may be narrowed to: in the URL of the page, for commands and agents."""

Points: TypeAlias = Sequence[Tally | None]


@dataclass(frozen=True, slots=True)
class Figure:
    """What happened in a time: of everything, or of one queue, task or worker.

    `ended` is all runs that ended; percentiles are in seconds, and at most a fifth off. None:
    nothing to take it from.
    """

    ended: int
    succeeded: int
    failed: int
    retried: int
    other: int
    lost: int
    wait_median: float | None
    wait_95: float | None
    run_median: float | None
    run_95: float | None

    @classmethod
    def of(cls, tally: Tally) -> Figure:
        """The figure of these counts, with the percentiles of its buckets."""
        waits, runs = tally.waits, tally.runs
        ends = tally.ended, tally.succeeded, tally.failed, tally.retried, tally.other, tally.lost
        times = percentile(waits, 0.5), percentile(waits, 0.95)
        return cls(*ends, *times, percentile(runs, 0.5), percentile(runs, 0.95))


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """A worker process that started in the window. `release`: the versions of app and aztask."""

    at: float
    worker: str
    release: str


class Waited(NamedTuple):
    """How many messages waited: the most, and at last. Times are UTC epoch seconds."""

    most: int
    most_at: int
    last: int
    last_at: int


@dataclass(frozen=True, slots=True)
class HistoryView:
    """The answer of `history`.

    * `begins`, `at`: the first second of the first point, and when it was read; UTC epoch seconds.
    * `times`: when each point begins. `points`: what happened then; None for a gap.
    * `total`: all of the window. `rows`: by queue, task or worker, the busiest first.
    * `waiting`: messages that waited at each point, where it was looked: of one queue or of all,
      and not known by task or worker.
    * `starts`: of workers, the oldest first: a deploy is many of them together.
    * `conditions`: what was asked for, by the names of `history`'s arguments.
    """

    window: HistoryWindow
    by: str
    begins: int
    at: float
    times: Sequence[int]
    points: Points
    total: Tally
    rows: Sequence[tuple[str, Tally]]
    waiting: Sequence[int | None]
    starts: Sequence[WorkerStart] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)

    def chart(self) -> dict[str, Sequence[float | None]]:
        """The points by figure: ``ended``, ``failed``, ``retried`` and ``lost`` a second,
        percentiles in seconds, and ``waiting`` messages. None: nothing was recorded then, which is
        not the same as nothing.
        """
        passed = [max(1.0, min(float(self.window.step), self.at - each)) for each in self.times]
        found: dict[str, Sequence[float | None]] = {
            name: [
                None if tally is None else getattr(tally, name) / seconds
                for tally, seconds in zip(self.points, passed, strict=True)
            ]
            for name in ("ended", "failed", "retried", "lost")
        }
        figures = [None if tally is None else Figure.of(tally) for tally in self.points]
        for name in ("wait_median", "wait_95", "run_median", "run_95"):
            found[name] = [None if each is None else getattr(each, name) for each in figures]
        found["waiting"] = self.waiting
        return found

    @property
    def waited(self) -> Waited | None:
        """What is known of `waiting`, in short; None if nothing is."""
        known = [
            (count, at)
            for count, at in zip(self.waiting, self.times, strict=True)
            if count is not None
        ]
        return Waited(*max(known, key=lambda each: each[0]), *known[-1]) if known else None

    @property
    def figure(self) -> Figure:
        """The figure of the whole window."""
        return Figure.of(self.total)

    def figures(self) -> list[tuple[str, Figure]]:
        """The figure of each row, the busiest first."""
        return [(name, Figure.of(tally)) for name, tally in self.rows]


def history(
    app: App,
    window: str = "hour",
    by: str = "queue",
    only: Mapping[str, str] | None = None,
    *,
    now: float | None = None,
    kept: KeptHours | None = None,
) -> HistoryView:
    """What workers did in a window.

    * `window`: of `WINDOWS`. `by`: what the rows are about, of `BY`.
    * `only`: the queue, task or worker that it is about, by these names (`CONDITIONS`). Queues and
      tasks of one worker are known for the last hour alone.
    * `now`: UTC epoch seconds; the store's time if it is None.
    * `kept`: for a caller who asks again and again: the sums of hours that have ended.

    Raises BrokerUnavailable, and ConfigurationError for an unknown window, for a question that the
    history cannot answer, and without a result store that keeps one.
    """
    found = WINDOWS.get(window)
    if found is None or by not in BY:
        wrong, known = (window, [*WINDOWS]) if found is None else (by, [*BY])
        raise ConfigurationError(
            f"the history has no {wrong!r}; give one of {', '.join(known)}."
            f"{did_you_mean(wrong, known)}"
        )
    given = only or {}
    conditions = {each: given.get(each, "") for each in CONDITIONS}
    _check(found, by, conditions)
    store = history_of(results_of(app))
    if store is None:
        raise ConfigurationError("this result store keeps no history")
    at = clock.current().wall() if now is None else now
    # The last point is not over; the window ends with it.
    begins = int(at // found.step + 1) * found.step - found.seconds
    sums = WindowSums(begins, found.step, by, conditions)
    starts = _read(store, found, sums, at, kept)
    return _view(found, sums, at, starts, _waiting(store, found, sums, at))


def _check(window: HistoryWindow, by: str, conditions: Mapping[str, str]) -> None:
    named = conditions["queue"] or conditions["task"] or by != "worker"
    if window.name != "hour" and (conditions["worker"] or by == "worker") and named:
        raise ConfigurationError(
            "queues and tasks of one worker are kept for an hour; take the window hour, or leave "
            "out the worker"
        )
    if window.seconds > DAY and by == "worker":
        raise ConfigurationError("workers are kept for a day; take the window hour or day")


# -- reading ---------------------------------------------------------------------------------


def _read(
    store: HistoryStore,
    window: HistoryWindow,
    sums: WindowSums,
    at: float,
    kept: KeptHours | None,
) -> list[WorkerStart]:
    """Add up what is known of the window; returns the starts of workers that are known."""
    first, end = sums.begins // HOUR, int(at // HOUR) + 1
    if window.name == "hour":
        return _starts(store.add_hours(sums, first, end, kept))
    brief = window.step >= HOUR
    # The head first: an hour that is merged in between is read twice, and not missed; its own rows
    # count then, as those of the days are only taken up to the head.
    following = max(first, store.following())
    if brief:
        hours = store.hours(following, end, brief=True)
        for stored in hours:
            for (queue, task), tallies in stored.hour.series.items():
                sums.add(queue, task, stored.hour.author.name, tallies)
        starts = _starts(stored.hour.author for stored in hours)
    else:
        starts = _starts(store.add_hours(sums, following, end, kept))
    by_worker = bool(sums.only.get("worker")) or sums.by == "worker"
    part = WORKERS if by_worker else TASKS
    for day_begins, day in store.days(part, first // 24, end // 24 + 1, brief=brief):
        source = day.hours if brief else day.slots
        scale = HOUR if brief else 1
        tallies = {
            moment: tally
            for number, tally in source.items()
            if (moment := day_begins + number * scale) < following * HOUR
        }
        sums.add(*(("", "", day.name[0]) if by_worker else (*day.name, "")), tallies)
        starts += [WorkerStart(born, day.name[0], release) for born, release in day.notes]
    return starts


def _waiting(
    store: HistoryStore, window: HistoryWindow, sums: WindowSums, at: float
) -> Mapping[int, int]:
    """What waited, by point; empty for a question about tasks or workers."""
    if sums.only.get("task") or sums.only.get("worker"):
        return {}
    queue = sums.only.get("queue", "")
    return waiting_at(Backlogs(store), sums.begins, int(at) + 1, window.step, queue)


def _starts(authors: Iterable[Author]) -> list[WorkerStart]:
    return [WorkerStart(each.born, each.name, each.release) for each in authors]


def _view(
    window: HistoryWindow,
    sums: WindowSums,
    at: float,
    starts: Sequence[WorkerStart],
    waiting: Mapping[int, int],
) -> HistoryView:
    begins, (points, rows) = sums.begins, sums.totals()
    times = list(range(begins, begins + window.seconds, window.step))
    known = sorted({each for each in starts if each.at >= begins}, key=lambda each: each.at)
    return HistoryView(
        window,
        sums.by,
        begins,
        at,
        times,
        [points.get(each) for each in times],
        total(rows.values()),
        sorted(rows.items(), key=lambda each: (-each[1].ended, each[0])),
        [waiting.get(each) for each in times],
        known,
        {name: value for name, value in sums.only.items() if value},
    )


# -- what happened beside --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that explains a figure.

    * `at`: UTC epoch seconds. `text`: in words.
    * `kind`: ``deploy`` (workers that started together), ``silent`` (the last report of a silent
      worker), or the name of an action in the audit, such as ``pause``.
    """

    at: float
    kind: str
    text: str


TOGETHER_SECONDS: Final = 120.0
"""Workers that start within so long of each other are one mark."""

MARKED: Final = frozenset({"pause", "resume", "scale", "limit", "purge", "replay", "stop"})
"""The actions that change what workers do."""

MOST_ENTRIES: Final = 200


def marks(app: App, view: HistoryView) -> list[Mark]:
    """What happened in the window of a view, the oldest first: deploys, actions, outages.

    Two requests. Raises BrokerUnavailable.
    """
    found = [*_deploys(view.starts)]
    for entry in audit(app, limit=MOST_ENTRIES).entries:
        if entry.action in MARKED and entry.at >= view.begins:
            by = f" by {entry.by}" if entry.by else ""
            found.append(Mark(entry.at, entry.action, f"{entry.text}{by}"))
    known = heartbeats(results_of(app), view.at, everyone=False)
    for worker in known.records:
        if known.state(worker) == "silent" and worker.seen_at >= view.begins:
            text = f"worker {worker.name} reported for the last time"
            found.append(Mark(worker.seen_at, "silent", text))
    return sorted(found, key=lambda each: each.at)


def _deploys(starts: Sequence[WorkerStart]) -> Iterator[Mark]:
    """One mark for the workers that started together."""
    together: list[WorkerStart] = []
    for each in (*starts, None):
        if together and (each is None or each.at > together[-1].at + TOGETHER_SECONDS):
            names = sorted({start.worker for start in together})
            listed = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
            releases = sorted({shown_release(start.release) for start in together})
            text = f"{plural(len(names), 'worker')} started, {', '.join(releases)}: {listed}"
            yield Mark(together[0].at, "deploy", text)
            together = []
        if each is not None:
            together.append(each)
