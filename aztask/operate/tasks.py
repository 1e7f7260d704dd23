"""Tasks: those that an app registers, how they ended, and cancelling them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any, ClassVar, Final

from aztask.app import App
from aztask.errors import AztaskError, CodecError, ForeignId, NotFound, did_you_mean
from aztask.operate.action import Action, Progress, Subject, results_of
from aztask.operate.queues import LeftOut, all_queues, hidden, waiting
from aztask.settlement import name_of
from aztask.steps.stream import StreamPart
from aztask.steps.waits import ParkedRun
from aztask.stores.records.base import WAITING, ResultStore, RunRecord, State
from aztask.support.display import MASK, plural, visible
from aztask.task import Task

__all__ = [
    "ParkedRun",
    "CancelChosen",
    "CancelTasks",
    "Chosen",
    "RecentRuns",
    "Registered",
    "RunRecord",
    "StreamPart",
    "STATES",
    "Task",
    "TaskResult",
    "cancel",
    "cancel_chosen",
    "recent",
    "registered",
    "result",
    "settlement_of",
    "stream",
]

STATES: Final = (*(each.value for each in State), WAITING)
"""The states of a run, as `recent` takes them."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A task that an app registers. about: the first line of its docstring, None without one."""

    task: Task[..., Any]
    signature: str
    queue: str
    about: str | None


def registered(app: App) -> list[Registered]:
    """The tasks of the app, by name."""
    return [
        Registered(task, _signature(task), app.queue_for(task, {}), _about(task))
        for _, task in sorted(app.tasks.items())
    ]


def _signature(task: Task[..., Any]) -> str:
    """The parameters that a caller gives: without the context, which the worker gives."""
    parameters = list(task.signature.parameters.values())
    if task.with_context and parameters and parameters[0].kind is not Parameter.VAR_POSITIONAL:
        del parameters[0]
    return str(task.signature.replace(parameters=parameters))


def _about(task: Task[..., Any]) -> str | None:
    lines = (task.__doc__ or "").strip().splitlines()
    return lines[0] if lines else None


# -- results ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecentRuns:
    """The newest runs. damaged: task ids and reasons of rows that were left out."""

    runs: Sequence[RunRecord]
    damaged: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class TaskResult:
    """How a task ended.

    * `latest`: its latest run. `runs`: all, the oldest first.
    * `value`: of its result, masked if it is secret; if this version cannot read it, a text that
      says why.
    * `progress`: its last checkpoint while it runs.
    * `waits`: what it waits for, if it does. `signals`: names of those that no wait has taken yet.
    """

    latest: RunRecord
    runs: Sequence[RunRecord]
    value: Any
    progress: Any
    waits: ParkedRun | None = None
    signals: Sequence[str] = ()


def stream(app: App, task_id: str) -> Iterator[StreamPart]:
    """What a task emits, part by part, until it has ended; see `AsyncResult.stream`."""
    return app.result(task_id).stream()


def recent(app: App, state: str | None, limit: int) -> RecentRuns:
    """Up to `limit` runs of all owners, the newest first. state: only those, one of `STATES`.

    A damaged row does not take the place of another run: if there are some, more runs are read.
    """
    stored = State.SNOOZED.value if state == WAITING else state
    store, wanted = results_of(app), State(stored) if stored else None
    found = store.recent(state=wanted, limit=limit, everyone=True)
    if wanted is State.UNREADABLE:
        return RecentRuns(found)
    return _readable(store, wanted, limit, found, state or "")


def _readable(
    store: ResultStore, state: State | None, limit: int, found: list[RunRecord], shown: str
) -> RecentRuns:
    asked = limit
    while True:
        runs = [run for run in found if run.state is not State.UNREADABLE]
        runs = [run for run in runs if shown in ("", run.shown_state)]
        if len(runs) >= limit or len(found) < asked:
            break
        asked *= 2
        found = store.recent(state=state, limit=asked, everyone=True)
    damaged = [(run.key.task_id, run.damage) for run in found if run.damage]
    return RecentRuns(runs[:limit], damaged)


def result(app: App, task_id: str) -> TaskResult:
    """How a task ended. Raises NotFound, BrokerUnavailable, ForeignId."""
    store = results_of(app)
    latest = store.get(task_id)
    if latest is None:
        if _is_workflow(app, task_id):
            raise NotFound(f"{task_id!r} is a workflow; see aztask workflow show {task_id}")
        raise NotFound(f"the result store has no task {task_id!r}; it may not have started yet")
    runs = store.history(task_id)
    value, progress = _value(app, latest), app.result(task_id).progress
    waits = app.sends.signals.store
    if waits is None or latest.state.final:
        return TaskResult(latest, runs, value, progress)
    found = waits.read(task_id)
    parked = found.parked if latest.shown_state == WAITING else None
    names = [each.name for each in found.signals]
    return TaskResult(latest, runs, value, progress, parked, names)


def settlement_of(run: RunRecord) -> str | None:
    """The name of what followed the run; None if it has not ended."""
    return name_of(run.outcome.settlement) if run.outcome else None


def _is_workflow(app: App, task_id: str) -> bool:
    """Whether the id names a workflow; False if the store keeps none, or its row is damaged."""
    try:
        return app.workflows.result(task_id).state != State.PENDING.value
    except AztaskError:
        return False


def _value(app: App, run: RunRecord) -> Any:
    if run.outcome is None or run.outcome.value is None:
        return None
    task = app.tasks.get(run.task)
    if task is not None and task.conversion.secret_result:
        return MASK
    try:
        return app.codec.decode_value(run.outcome.value)
    except CodecError as error:
        return f"(cannot be read: {error})"


# -- cancelling ------------------------------------------------------------------------------


def cancel(app: App, task_ids: Sequence[str], *, running: bool = False) -> CancelTasks:
    """Cancel tasks by id. running: also stop runs that have started.

    Reads the queues for ids that the result store does not know; of a Storage queue, only the first
    32 messages can be searched. An id that neither knows is marked too: its message may be where it
    cannot be searched.
    """
    store = results_of(app)
    before: dict[str, RunRecord | None] = {}
    for task_id, known in zip(task_ids, store.get_many(task_ids), strict=True):
        if isinstance(known, ForeignId):
            raise known
        before[task_id] = known
    missing = {task_id for task_id, record in before.items() if record is None}
    left_out = LeftOut()
    unknown = missing - _waiting_ids(app, missing, left_out) if missing else set()
    ended = [task_id for task_id, record in before.items() if record is not None and _over(record)]
    return CancelTasks(app, len(before) - len(ended), before, unknown, running, left_out, ended)


def _over(record: RunRecord) -> bool:
    return record.state.final and not record.damage


def _waiting_ids(app: App, missing: set[str], left_out: LeftOut) -> set[str]:
    """Those of these ids whose messages are in a queue."""
    found: set[str] = set()
    for queue in all_queues(app, left_out):
        with left_out.reading(queue):
            for each in waiting(app, queue):
                found |= missing & {str(each.peeked.envelope.headers.get("id"))}
                if found == missing:
                    return found
    return found


@dataclass(slots=True)
class CancelTasks(Action[None]):
    """Cancels tasks by id.

    * `records`: by id, as they were found. `unknown`: ids that nothing knows.
    * `ended`: those that have ended, before the act or until then. `marked`: those that were not.
    """

    name: ClassVar[str] = "cancel"

    records: Mapping[str, RunRecord | None]
    unknown: set[str]
    running: bool
    left_out: LeftOut
    ended: list[str]
    marked: list[str] = field(default_factory=list, init=False)

    def __str__(self) -> str:
        return f"cancel {', '.join(map(visible, self.records))}"

    def subject(self) -> Subject:
        """The task, if it is one alone."""
        return Subject(task_id=next(iter(self.records)) if len(self.records) == 1 else "")

    def runs(self, task_id: str) -> bool:
        """Whether the task ran when it was counted."""
        record = self.records[task_id]
        return record is not None and record.state is State.STARTED

    def _act(self, progress: Progress) -> None:
        over = set(self.ended)
        for task_id in self.records:
            if task_id in over:
                continue
            if self.app.result(task_id).cancel(running=self.running):
                self.marked.append(task_id)
                self.done += 1
            else:
                self.ended.append(task_id)
            progress(self.done)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tasks to cancel: those of this name, in these queues; None and () mean all.

    running: those that have started too.
    """

    task: str | None = None
    queues: tuple[str, ...] = ()
    running: bool = False

    def matches(self, task: str, queue: str) -> bool:
        """True for a task of that name in that queue."""
        return self.task in (None, task) and (not self.queues or queue in self.queues)


def cancel_chosen(app: App, chosen: Chosen) -> CancelChosen:
    """Cancel tasks by name and queue. A task that is sent after the count is not cancelled.

    Raises NotFound if there are none and the app has tasks, but none of that name; QueueNotFound
    for a queue that is named.
    """
    results_of(app)  # the cancellations are kept there: without one, fail before reading queues
    left_out = LeftOut()
    found = dict(_found(app, chosen, left_out))
    if not found and chosen.task and app.tasks and chosen.task not in app.tasks:
        hint = did_you_mean(chosen.task, list(app.tasks))
        raise NotFound(f"the app has no task {chosen.task!r}.{hint} See: aztask tasks")
    return CancelChosen(app, len(found), chosen, found, left_out)


def _found(app: App, chosen: Chosen, left_out: LeftOut) -> Iterator[tuple[str, tuple[str, str]]]:
    """The id of each chosen task, with its name and queue."""
    for queue in chosen.queues or all_queues(app, left_out):
        if chosen.queues:
            app.broker.stats(queue)  # a missing queue that you name is an error
        with left_out.reading(queue):
            for each in waiting(app, queue):
                message = each.message
                if message is not None and chosen.matches(message.task, queue):
                    yield message.id, (message.task, queue)
    if chosen.running:
        for worker in results_of(app).workers():
            for task in () if worker.stopped else worker.tasks:
                if chosen.matches(task.task, task.queue):
                    yield task.task_id, (task.task, task.queue)


@dataclass(slots=True)
class CancelChosen(Action[int]):
    """Cancels the tasks that were found; `act` returns how many had ended already.

    found: by id, the task's name and queue.
    """

    name: ClassVar[str] = "cancel"

    chosen: Chosen
    found: Mapping[str, tuple[str, str]]
    left_out: LeftOut

    @property
    def hidden(self) -> str:
        """What the search could not see, if that is more than the states of messages."""
        capabilities = self.app.broker.capabilities
        return "" if capabilities.paged_peek else hidden(capabilities)

    def __str__(self) -> str:
        counts = ", ".join(
            f"{count:,} {visible(task)} in {visible(queue)}"
            for (task, queue), count in Counter(self.found.values()).most_common()
        )
        return f"cancel {plural(self.count, 'task')} ({counts})"

    def subject(self) -> Subject:
        """The task's name and the queue, if it is one."""
        queues = self.chosen.queues
        return Subject(task=self.chosen.task or "", queue=queues[0] if len(queues) == 1 else "")

    def _act(self, progress: Progress) -> int:
        for task_id in self.found:
            self.done += self.app.result(task_id).cancel(running=self.chosen.running)
            progress(self.done)
        return self.count - self.done
