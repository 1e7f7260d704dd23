"""The recorded steps of a task: what it has done, going back to one of them, and signals to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from aztask.app import App
from aztask.errors import CodecError, ConfigurationError, NotFound, StepError, did_you_mean
from aztask.operate.action import Action, Progress, Subject, results_of
from aztask.settlement import DeadLetter
from aztask.steps.history import IN_ORDER
from aztask.steps.home import StepHome
from aztask.steps.records import (
    ARGUMENTS,
    FAILED,
    ORDER,
    SIGNAL,
    WAITING,
    StepRecord,
    StepStore,
)
from aztask.steps.signals import check_name, refuse
from aztask.stores.records.base import RunRecord, State
from aztask.stores.rows import Row
from aztask.support.display import plural, visible


@dataclass(frozen=True, slots=True)
class ShownStep:
    """A recorded step.

    * `history`: the name of its history; a forced send and a fresh replay begin a new one.
    * `value`: what the step returned; of an error, its text. `problem`: why it cannot be read.
    """

    history: str
    record: StepRecord
    value: Any = None
    problem: str = ""


def steps(app: App, task_id: str) -> list[ShownStep]:
    """The recorded steps of a task, the oldest history first. Raises NotFound, StepsDamaged."""
    results_of(app)
    store = StepHome(app).store()
    found = [
        _shown(app, history, record)
        for history in store.histories(task_id)
        for _, record in store.read(task_id, history)
        if record.kind not in (ORDER, ARGUMENTS)
    ]
    if not found:
        raise NotFound(f"task {task_id} has no recorded steps; see: aztask result {task_id}")
    return found


def _shown(app: App, history: str, record: StepRecord) -> ShownStep:
    if not record.value or record.state == WAITING:
        return ShownStep(history, record)
    try:
        value = app.codec.decode_value(record.value)
    except CodecError as error:
        return ShownStep(history, record, None, str(error))
    if record.kind == SIGNAL and isinstance(value, list) and len(value) == 2:
        several = "|" in record.name
        value = value if several else value[1]
    if record.state == FAILED and isinstance(value, dict):
        value = f"{value.get('class')}: {value.get('text')}"
    return ShownStep(history, record, value)


def reset(app: App, task_id: str, first: str) -> ResetSteps:
    """Go back: forget a step of the task's newest history, and all that were recorded after it.

    first: the step, as `StepRecord.label` has it. Raises NotFound. Raises ConfigurationError while
    the task runs, because it knows its steps, and if it has ended without a dead letter, because
    nothing would run it again.
    """
    results = results_of(app)
    record = results.get(task_id)
    if record is not None and record.state is State.STARTED:
        raise ConfigurationError(
            f"task {task_id} runs now and knows its steps; cancel it with aztask cancel --running, "
            "or wait until it has ended"
        )
    if record is not None and record.state.final and not _is_dead(record):
        raise ConfigurationError(
            f"task {task_id} has ended ({record.state}) and has no dead letter to replay, so no "
            "run would follow a reset; send it again with force=True, which begins a new history"
        )
    store = StepHome(app).store()
    histories = store.histories(task_id)
    found = store.read(task_id, histories[-1]) if histories else []
    labels = [each.label for _, each in found if each.kind in IN_ORDER]
    number = next((each.number for _, each in found if each.label == first), None)
    if number is None:
        raise NotFound(
            f"task {task_id} has no recorded step {first!r}.{did_you_mean(first, labels)} "
            f"See: aztask steps show {task_id}"
        )
    rows = [row for row, each in found if each.number >= number or each.kind == ORDER]
    count = sum(each.number >= number for _, each in found)
    return ResetSteps(app, count, store, task_id, first, rows)


def signal(app: App, task_id: str, name: str, value: Any = None) -> SignalTask:
    """Send a signal to a task; see `aztask.AsyncResult.signal`.

    Raises NotFound for an unknown task, SignalRefused for one that has ended.
    """
    check_name(name)
    refuse(task_id, results_of(app).get(task_id))
    return SignalTask(app, 1, task_id, name, value)


@dataclass(slots=True)
class SignalTask(Action[None]):
    """Sends a signal to a task."""

    name: ClassVar[str] = "signal"

    task_id: str
    signal: str
    value: Any = field(repr=False)

    def __str__(self) -> str:
        return f"send signal {visible(self.signal)} to task {visible(self.task_id)}"

    def subject(self) -> Subject:
        """The task that gets it."""
        return Subject(task_id=self.task_id)

    def _act(self, progress: Progress) -> None:
        self.app.result(self.task_id).signal(self.signal, self.value)
        self.done = 1


def _is_dead(record: RunRecord) -> bool:
    return record.outcome is not None and isinstance(record.outcome.settlement, DeadLetter)


@dataclass(slots=True)
class ResetSteps(Action[int]):
    """Forgets steps; `act` returns how many rows were deleted."""

    name: ClassVar[str] = "steps-reset"

    store: StepStore
    task_id: str
    first: str
    rows: Sequence[Row] = field(repr=False)

    def __str__(self) -> str:
        steps = plural(self.count, "recorded step")
        return f"forget {steps} of task {visible(self.task_id)}, from {self.first} on"

    def subject(self) -> Subject:
        """The task whose steps are forgotten."""
        return Subject(task_id=self.task_id)

    def _act(self, progress: Progress) -> int:
        removed = self.store.remove(self.rows)
        if removed < len(self.rows):
            raise StepError(
                f"some steps of task {self.task_id} have changed in the meantime; look at them "
                "with aztask steps show, and reset again"
            )
        self.done = self.count
        return removed
