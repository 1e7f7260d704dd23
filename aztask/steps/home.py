"""Where the history of a run comes from: the result store of its app, or the memory of a test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from aztask.config import Settings
from aztask.errors import StepError
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.steps.history import RunHistory
from aztask.steps.keepers import MemoryOutside, MemorySteps, StoredOutside, StoredSteps
from aztask.steps.records import StepStore, steps_of
from aztask.steps.waits import waits_of
from aztask.stores.payloads.payloads import Payloads
from aztask.stores.records.base import ResultStore
from aztask.support.clock import SYSTEM_CLOCK

MOST_STEPS: Final = 1_000
"""The default of ``max_steps``."""

LONGEST_WAIT: Final = 90 * 86400.0
"""The default of ``max_wait``, in seconds."""


class StepApp(Protocol):
    """What histories need of an app: `aztask.app.App`, and what tests make."""

    codec: Codec
    payloads: Payloads | None
    settings: Settings

    @property
    def tasks(self) -> Mapping[str, Any]:
        """The registered tasks, by name."""
        ...

    @property
    def results(self) -> ResultStore | None:
        """The result store; None if there is none."""
        ...


class StepHome:
    """The histories of one app. Asks no store before a task takes its first step."""

    def __init__(self, app: StepApp, worker: int = 0) -> None:
        """worker: the process id of the worker, for failpoints."""
        self._app = app
        self._worker = worker
        self._store: tuple[object, StepStore] | None = None

    def history(self, message: TaskMessage) -> RunHistory:
        """The history that a run of this message continues. Raises StepError."""
        task = self._app.tasks.get(message.task)
        if task is not None and task.delivery == "at-most-once":
            raise StepError(
                f"task {message.task} is delivered at most once, so no later run could go on after "
                "its steps; call the functions themselves"
            )
        app = self._app
        store, results = self.store(), app.results
        waits = waits_of(results, app.codec)
        assert results is not None and waits is not None  # noqa: S101  # there is a store of steps
        keeper = StoredSteps(store, message, app.codec, app.payloads, self._worker, task)
        outside = StoredOutside(waits, results, message.id)
        settings = app.settings
        return RunHistory(keeper, outside, message, settings.max_steps, settings.max_wait_seconds)

    def store(self) -> StepStore:
        """The histories in the result store. Raises StepError if there is none."""
        results = self._app.results  # inline mode replaces it
        if self._store is None or self._store[0] is not results:
            made = steps_of(results, self._app.codec)
            if made is None:
                raise StepError(
                    'steps need a result store; give the App results="local://" or "tables://..."'
                )
            self._store = results, made
        return self._store[1]


class MemoryHome:
    """For functions that are called without a worker: nothing is kept after the call."""

    def __init__(self, signals: Mapping[str, Iterable[Any]] | None = None) -> None:
        """signals: the values that waits get, by name, in order."""
        self._signals = signals

    def history(self, message: TaskMessage) -> RunHistory:
        """A history of its own for each context."""
        outside = MemoryOutside(self._signals)
        return RunHistory(MemorySteps(SYSTEM_CLOCK), outside, message, MOST_STEPS, LONGEST_WAIT)
