"""Find runs: a list with conditions, page by page, figures of a list, and one search for any id.

Rules
1. A page ends with a key, and the next one begins behind that key: runs that end in the meantime
   move nothing and repeat nothing.
2. The newest `MOST_SEARCHED` runs are read, in the order in which the result store lists them. What
   lies behind them is not guessed: `RunsPage.whole` is False.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Final

from aztask.app import App
from aztask.errors import AztaskError, CapabilityError, ConfigurationError, ForeignId, NotFound
from aztask.operate.action import results_of
from aztask.operate.tasks import recent
from aztask.operate.workers import running
from aztask.operate.workflows import workflow
from aztask.stores.records.base import RunRecord, State

MOST_SEARCHED: Final = 2_000
_KEY: Final = re.compile(
    r"(inf|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)~(\d{1,10})~(\d{1,10})~(.+)", re.ASCII | re.DOTALL
)


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
        outcome, wanted = run.outcome, self.text.casefold()
        error = "" if outcome is None else f"{outcome.error_type}: {outcome.error}"
        return (
            self.state in ("", run.shown_state)
            and self.task in ("", run.task)
            and self.queue in ("", run.queue)
            and self.worker in ("", run.worker)
            and (wanted in run.key.task_id.casefold() or wanted in error.casefold())
        )

    def given(self) -> dict[str, str]:
        """The conditions that are given, by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if value}


@dataclass(frozen=True, slots=True)
class RunsPage:
    """One page of runs, the newest first.

    * `next`: the key behind which the next page begins; "" if this is the last one.
    * `searched`: how many runs were read. `whole`: False if the store has more than that.
    * `damaged`: task ids and reasons of rows that cannot be read.
    """

    runs: Sequence[RunRecord]
    next: str
    searched: int
    whole: bool
    damaged: Sequence[tuple[str, str]] = ()


def find_runs(app: App, chosen: RunFilter, *, limit: int = 50, after: str = "") -> RunsPage:
    """A page of runs of all owners. after: `RunsPage.next` of the page before.

    Raises ConfigurationError for a key that no page has, and what `recent` raises.
    """
    start = _read_key(after) if after else None
    found = recent(app, chosen.state or None, MOST_SEARCHED)
    runs = [each for each in sorted(found.runs, key=_order) if chosen.matches(each)]
    left = runs if start is None else [each for each in runs if _order(each) > start]
    page = left[:limit]
    key = _key(page[-1]) if len(left) > limit else ""
    count = len(found.runs)
    return RunsPage(page, key, count, count < MOST_SEARCHED, found.damaged)


def ended_at(run: RunRecord) -> float | None:
    """When the run ended, else when it started; UTC epoch seconds."""
    return run.outcome.at if run.outcome is not None else run.started_at


def _order(run: RunRecord) -> tuple[float, str, int, int]:
    """The newest first; a run that was only sent comes before all that started."""
    at = ended_at(run)
    key = run.key
    return (-at if at is not None else float("-inf"), key.task_id, key.generation, key.hop)


def _key(run: RunRecord) -> str:
    at, _, generation, hop = _order(run)
    return f"{-at!r}~{generation}~{hop}~{run.key.task_id}"


def _read_key(text: str) -> tuple[float, str, int, int]:
    parts = _KEY.fullmatch(text)
    if parts is None:
        raise ConfigurationError("this page does not exist; go back to the first page of the list")
    at, generation, hop, task_id = parts.groups()
    return -float(at), task_id, int(generation), int(hop)


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
    """The figures of each task among the newest `MOST_SEARCHED` runs. Raises as `recent`."""
    found = recent(app, None, MOST_SEARCHED).runs
    by_task: dict[str, list[RunRecord]] = defaultdict(list)
    for run in found:
        by_task[run.task].append(run)
    tasks = [_figures(task, each) for task, each in by_task.items()]
    tasks.sort(key=lambda each: (-each.failed, -each.retried, each.task))
    return NewestFigures(tasks, len(found))


def _figures(task: str, runs: Sequence[RunRecord]) -> TaskFigures:
    durations = sorted(each.outcome.duration for each in runs if each.outcome is not None)
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


def search(app: App, text: str, *, limit: int = 50) -> list[Hit]:
    """What has this id or name, then the runs whose id or error contains the text.

    A queue is found by its whole name. Raises BrokerUnavailable, and ConfigurationError without a
    result store.
    """
    hits = [*_by_name(app, text), *_running(app, text)]
    with suppress(CapabilityError):
        for run in find_runs(app, RunFilter(text=text), limit=limit).runs:
            error = run.outcome.error_type if run.outcome is not None else ""
            about = f"{run.shown_state} run of {run.task}{': ' if error else ''}{error}"
            hits.append(Hit("task", run.key.task_id, about))
    return list({(each.kind, each.name): each for each in reversed(hits)}.values())[::-1][:limit]


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
