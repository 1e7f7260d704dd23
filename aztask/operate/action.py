"""An action: counted before, done once, and reported afterwards: as an event, and in the audit.

Rules
1. Making an action changes nothing. `Action.count` is what a person confirms.
2. What is done is what was counted: an action keeps the names, ids or positions that it found. What
   comes in between is left alone, what goes in between is missing from `Action.done`. Where the
   service has no positions, or only deletes everything at once, `Action.exact` is False.
3. `Action.act` leaves one event ``operator_acted`` where events are on: also when it failed or was
   interrupted, with what was done until then. Crash window: a process that dies before the event
   is written leaves none, whatever it has done.
4. The event follows the act and never prevents it: a disk that is full costs the event.
5. It leaves one entry of the audit, too (`aztask.operate.action`), where there is a result store.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Final, Generic, TypeVar

from aztask.app import App
from aztask.errors import AztaskError, ConfigurationError, NotFound
from aztask.limits.control import operator_name
from aztask.operate.ledger import AUDIT, Ledger, ledger_of, newest_first, packed, unpacked
from aztask.stores.events.event import Event
from aztask.stores.records.base import ResultStore
from aztask.stores.records.controls import ControlStore, controls_of
from aztask.stores.rows import Row
from aztask.support import clock
from aztask.support.display import mask, one_line, safe_str

# -- audit -----------------------------------------------------------------------------------
#
# The audit: who did what, when, through what, to how many, and how it ended.
#
# Rules
# 1. Every `aztask.operate.action.Action` leaves one entry when it has ended, whatever it ended
#    with. Crash window: a process that dies before leaves none, whatever it has done.
# 2. An entry follows the act and never prevents it: if the store is unreachable, a line in the log
#    says what was not noted.
# 3. Entries have no arguments of tasks, and secrets in their texts are masked.


logger = logging.getLogger(__name__)

COMMAND: Final = "command line"
LONGEST: Final = 2_000
MOST_READ: Final = 2_000
"""Entries that are read at most to fill one page."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Something that was done.

    * `at`: when it ended, UTC epoch seconds. `by`: who. `via`: the command line, the page or MCP.
    * `action`: a fixed word, as `Action.name`. `text`: what, in words.
    * `selected`: on how many it should act; `done`: on how many it did.
    * `error`: why it stopped, "" if it did not.
    * `subject`: the one task, queue or workflow that it was about, "" if it was none.
    """

    at: float
    by: str
    via: str
    action: str
    text: str
    selected: int
    done: int
    error: str = ""
    subject: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Entries, the newest first. next: behind which the next page begins, "". damaged: skipped."""

    entries: Sequence[AuditEntry]
    next: str
    damaged: int = 0


_TEXTS: Final = ("by", "via", "action", "text", "error", "subject")
_COUNTS: Final = ("selected", "done")


def note(app: App, entry: AuditEntry) -> str:
    """Write an entry; returns its key, "" if it could not be written (rule 2)."""
    ledger = ledger_of(app.results)
    if ledger is None:
        return ""
    record: dict[str, Any] = {**asdict(entry)}
    for name in _TEXTS:
        record[name] = one_line(mask(record[name]), LONGEST)
    try:
        key = newest_first(entry.at)
        ledger.write(AUDIT, key, packed(record), None)
        ledger.remove(AUDIT, ledger.old(AUDIT, entry.at))
    except AztaskError as error:
        logger.warning("the audit has no entry of %r: %s", record["text"], error)
        return ""
    return key


def audit(
    app: App, *, by: str = "", action: str = "", text: str = "", limit: int = 50, after: str = ""
) -> AuditPage:
    """A page of the audit. Conditions: who, which action, and a part of the text; "" means any.

    Raises ConfigurationError without a result store, BrokerUnavailable.
    """
    ledger = _ledger(app)
    found: list[AuditEntry] = []
    damaged, read, wanted = 0, 0, text.casefold()
    while len(found) <= limit and read < MOST_READ:
        rows = ledger.page(AUDIT, limit + 1, after)
        for row in rows:
            entry = _entry(row)
            damaged += entry is None
            if entry is not None and (
                by in ("", entry.by)
                and action in ("", entry.action)
                and wanted in f"{entry.text} {entry.subject} {entry.error}".casefold()
            ):
                found.append(entry)
        read += len(rows)
        if len(rows) <= limit:
            break
        after = rows[-1].place.key
    more = len(found) > limit
    return AuditPage(found[:limit], found[limit - 1].key if more else "", damaged)


def entry(app: App, key: str) -> AuditEntry:
    """One entry by its key. Raises NotFound, and as `audit` does."""
    (row,) = _ledger(app).get(AUDIT, [key])
    found = None if row is None else _entry(row)
    if found is None:
        raise NotFound("the audit has no such entry; entries are kept for 90 days")
    return found


def _ledger(app: App) -> Ledger:
    found = ledger_of(app.results)
    if found is None:
        raise ConfigurationError(
            "the audit is kept in the result store, and none is configured: set AZTASK_RESULTS"
        )
    return found


def _entry(row: Row) -> AuditEntry | None:
    record = unpacked(row)
    if record is None:
        return None
    known: dict[str, Any] = {each.name: record.get(each.name) for each in fields(AuditEntry)}
    texts = all(isinstance(known[name], str) for name in _TEXTS)
    counts = all(type(known[name]) is int for name in _COUNTS)
    if not texts or not counts or not isinstance(known["at"], int | float):
        return None
    return AuditEntry(**{**known, "key": str(row.place.key)})


# -- action ----------------------------------------------------------------------------------


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
