"""An action: counted before, done once, and reported as an event afterwards.

Rules
1. Making an action changes nothing. `Action.count` is what a person confirms.
2. What is done is what was counted: an action keeps the names, ids or positions that it found. What
   comes in between is left alone, what goes in between is missing from `Action.done`. Where the
   service has no positions, or only deletes everything at once, `Action.exact` is False.
3. `Action.act` leaves one event ``operator_acted`` where events are on: also when it failed or was
   interrupted, with what was done until then. Crash window: a process that dies before the event
   is written leaves none, whatever it has done.
4. The event follows the act and never prevents it: a disk that is full costs the event.
5. It leaves one entry of the audit, too (`aztask.operate.audit`), where there is a result store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from aztask.app import App
from aztask.errors import ConfigurationError
from aztask.limits.control import operator_name
from aztask.operate.audit import COMMAND, AuditEntry, note
from aztask.stores.events.event import Event
from aztask.stores.records.base import ResultStore
from aztask.stores.records.controls import ControlStore, controls_of
from aztask.support import clock
from aztask.support.display import safe_str

Result = TypeVar("Result")
Progress = Callable[[int], None]
"""Called now and then with how many are done or given up so far."""


@dataclass(slots=True)
class Subject:
    """What an action is about, for its event: one task, a task's name, a queue, a workflow."""

    task_id: str = ""
    task: str = ""
    queue: str = ""
    workflow_id: str = ""

    def __str__(self) -> str:
        return self.task_id or self.workflow_id or self.task or self.queue


@dataclass(slots=True)
class Action(ABC, Generic[Result]):
    """Something that was counted and is not done yet. ``str()`` says what, as a command.

    * `count`: on how many it acts. `done`: how many were done, also after an error.
    * `by`: who acts, while it does. `entry`: the key of its entry in the audit, afterwards.
    """

    name: ClassVar[str]
    """A fixed word for programs: ``replay``, ``queue-purge``."""
    app: App = field(repr=False)
    count: int
    done: int = field(default=0, init=False)
    by: str = field(default="", init=False)
    entry: str = field(default="", init=False)

    def act(
        self, *, by: str = "", via: str = COMMAND, progress: Progress = lambda done: None
    ) -> Result:
        """Do it, and write the event and the audit. Raises what the action raises, after both.

        by: who acts; this process's user and machine by default. via: through what, for the audit.
        """
        self.by = by or operator_name()
        problem: BaseException | None = None
        try:
            return self._act(progress)
        except BaseException as error:
            problem = error
            raise
        finally:
            self._report(via, problem)

    @property
    def exact(self) -> bool:
        """False if it may act on what came after the count, too (rule 2)."""
        return True

    def subject(self) -> Subject:
        """The task, queue or workflow that the event names; by default none."""
        return Subject()

    @abstractmethod
    def _act(self, progress: Progress) -> Result:
        """Do it, and keep `done` up to date on the way."""

    def _report(self, via: str, problem: BaseException | None) -> None:
        about = self.subject()
        kind = "" if problem is None else type(problem).__name__
        error = "" if problem is None else safe_str(problem)
        sink = self.app.open_events(operator_name())
        sink.emit(
            Event(
                "operator_acted",
                about.task_id,
                about.task,
                about.queue,
                reason=str(self),
                workflow_id=about.workflow_id or None,
                by=self.by,
                action=self.name,
                selected=self.count,
                done=self.done,
                error_type=kind or None,
                error=None if problem is None else error,
            )
        )
        sink.close()
        why = f"{kind}: {error}" if kind else ""
        text, at = str(self), clock.wall()
        self.entry = note(
            self.app,
            AuditEntry(at, self.by, via, self.name, text, self.count, self.done, why, str(about)),
        )


def results_of(app: App) -> ResultStore:
    """The app's result store. Raises ConfigurationError if it has none."""
    store = app.results
    if store is None:
        raise ConfigurationError(
            "no result store is configured: set AZTASK_RESULTS, for example to local://, or name "
            "an app with a result store with -A"
        )
    return store


def control_store(app: App, what: str = "pauses") -> ControlStore:
    """The control entries of the app's result store. Raises ConfigurationError if it has none.

    what: it is to keep, for the error.
    """
    store = controls_of(results_of(app))
    if store is None:
        raise ConfigurationError(f"this result store cannot keep {what}; use local:// or tables://")
    return store
