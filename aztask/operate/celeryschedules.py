"""The schedules of a Celery application in a result store: what `aztask.operate.celerybeat` sends.

Rules
1. The owner is the application's beat, not the application: an aztask App of the same name and
   broker, to which tasks move one by one, has schedules of its own.
2. A definition holds the whole call, so that any beat sends it, whatever its code: the task, its
   arguments, and the options of the entry. Routes are those of the beat that sends.
3. A call with a value that has no encoding, such as a `BeatLazyFunc`, stays in the code: its
   definition only says so. A beat whose code lacks it leaves it to another one.
4. Celery sends: `Task.apply_async`, with its signals, routes and custom classes.

Crash window: an occurrence is made, then sent, then closed. If beat dies between the last two,
another one sends it again, at least ten seconds later, under the same task id and message id: at
least once. It does not if the result backend knows the task by then. Else the second message is
dropped by a queue with duplicate detection and by an aztask worker that knows the task; a Celery
worker runs it again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, Protocol

from aztask.app import App
from aztask.context import SCHEDULE
from aztask.errors import AztaskError, BrokerError, ConfigurationError, EncodeError
from aztask.message.codec import Codec
from aztask.message.message import MESSAGE_ID_LIMIT, TaskMessage
from aztask.schedules.engine import OccurrenceStarts
from aztask.schedules.rules import Rules
from aztask.schedules.runner import Runner
from aztask.schedules.schedules import NAME_CHARACTERS, Plan, Schedules
from aztask.schedules.template import Definition
from aztask.schedules.triggers import Trigger
from aztask.stores.connections import Connections
from aztask.stores.events.event import Event
from aztask.support.display import safe_str
from aztask.support.parts import Part
from aztask.taskoptions import SendOptions

logger = logging.getLogger(__name__)

USUAL: Final = Rules()
IN_CODE: Final = "in the code"
CALL: Final = "call"


@dataclass(frozen=True, slots=True)
class BeatEntry:
    """An entry of beat's schedule: what is sent, with which options, and when.

    * `release`: see `aztask.schedules.view`. Equal ones: the code that started last counts.
    """

    name: str
    task: str
    trigger: Trigger
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    rules: Rules = USUAL

    def __post_init__(self) -> None:
        """Raises ConfigurationError for a name that the store does not take."""
        name: object = self.name
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARACTERS:
            raise ConfigurationError(
                f"the name of an entry is a text of 1 to {NAME_CHARACTERS} characters, not "
                f"{name!r:.80}"
            )
        if not name.isprintable():
            raise ConfigurationError(f"the name of entry {name!r:.80} has an unprintable character")


class Reports(Protocol):
    """What writes the events of occurrences."""

    def report(self, event: Event) -> None:
        """Write the event of an occurrence that is sent, or skipped."""
        ...


class CelerySends:
    """Sends occurrences as Celery's beat does.

    * `celery`: the application.
    * `entries`: those of the code, by name (rule 3).
    """

    def __init__(self, celery: Any, reports: Reports) -> None:
        self._celery = celery
        self._reports = reports
        self.entries: dict[str, BeatEntry] = {}

    def route(self, task: Any, options: Mapping[str, Any]) -> str:
        """The queue that the routes of this process name, for those who list schedules.

        * `task`: its name.
        """
        try:
            found = self._celery.amqp.router.route(dict(options), task).get("queue")
        except Exception as error:  # noqa: BLE001  # a function of the user's; the send raises it
            logger.debug("the route of task %s cannot be found out: %s", task, error)
            found = None
        found = found or self._celery.conf.task_default_queue
        return str(getattr(found, "name", found))

    def send_occurrence(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Mapping[str, Any],
        headers: Mapping[str, Any],
    ) -> None:
        """Send the task, unless the result backend knows its id.

        Raises BrokerError for whatever Celery raises, and AztaskError where rule 3 keeps it.
        """
        task_id = str(options["task_id"])
        given, keywords, own = self._call(str(headers[SCHEDULE]), name, args)
        if self._is_known(task_id):
            logger.info("task %s was sent before", task_id)
            return
        short = len(task_id) <= MESSAGE_ID_LIMIT
        own = {
            **own,
            "task_id": task_id,
            "message_id": task_id if short else sha256(task_id.encode()).hexdigest(),
            "headers": {**(own.get("headers") or {}), "celery_beat_task": True, **headers},
        }
        task = self._celery.tasks.get(name)
        try:
            if task is not None:
                task.apply_async(given, keywords, **own)
            else:
                self._celery.send_task(name, given, keywords, **own)
        except AztaskError:
            raise
        except Exception as error:  # noqa: BLE001  # of Kombu's transports, and of signals
            text = safe_str(error)
            raise BrokerError(f"task {name} is not sent: {type(error).__name__}: {text}") from None
        logger.info("sent due task %s: %s", name, task_id)

    def _call(
        self, schedule: str, task: str, args: tuple[Any, ...]
    ) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        """The arguments and options of the call; lazy ones are asked for now, as beat does."""
        match args:
            case (str(kind), list() as found, dict() as keywords, dict() as own) if kind == CALL:
                return found, keywords, own
            case (str(kind), str() as digest) if kind == IN_CODE:
                entry = self.entries.get(schedule)
                if entry is None or entry.task != task or in_code(entry) != digest:
                    raise AztaskError(
                        "its arguments are in the code of another beat, which sends it"
                    )
                values = {name: _evaluated(each) for name, each in entry.kwargs.items()}
                return [_evaluated(each) for each in entry.args], values, dict(entry.options)
        raise EncodeError(f"the call of task {task} is unknown; a newer aztask may know it")

    def _is_known(self, task_id: str) -> bool:
        try:
            meta = self._celery.backend.get_task_meta(task_id)
        except Exception as error:  # noqa: BLE001  # disabled, or away: then it is sent
            logger.debug("the result backend cannot be asked for task %s: %s", task_id, error)
            return False
        return str(meta.get("status", "PENDING")) != "PENDING"

    def report(self, event: Event) -> None:
        """Write the event of an occurrence that is sent, or skipped."""
        self._reports.report(event)


def _evaluated(value: Any) -> Any:
    return value() if type(value).__name__ == "BeatLazyFunc" else value


def in_code(entry: BeatEntry) -> str:
    """Names the version of a call that stays in the code: the types of its values, no more."""
    values = [*entry.args, *entry.kwargs, *entry.kwargs.values()]
    shown = [each if isinstance(each, str | int | float) else type(each) for each in values]
    return sha256(repr((entry.task, shown, sorted(entry.options))).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Declared:
    """An entry of the code, as a `Runner` takes it."""

    entry: BeatEntry
    schedules: CelerySchedules
    release: int = 0

    @property
    def name(self) -> str:
        """The name of the entry."""
        return self.entry.name

    def define(self) -> Definition:
        """What the store keeps of it."""
        return self.schedules.definition_of(self.entry)


class CelerySchedules(Schedules):
    """The schedules of a Celery application, for its beats and for the commands."""

    def __init__(
        self,
        celery: Any,
        name: str,
        connections: Connections,
        reports: Reports,
        codec: Codec,
        *,
        workflows: OccurrenceStarts,
    ) -> None:
        """Connects to nothing.

        * `connections`: of the owner of rule 1, see `beat_name`.
        """
        self.sends = CelerySends(celery, reports)
        self._places, self._encodes = connections, codec
        super().__init__(name, connections, self.sends, codec, workflows=workflows)

    def full_name(self, name: str) -> str:
        """The name as beat's schedule has it."""
        return name

    def definition_of(self, entry: BeatEntry) -> Definition:
        """What the store keeps of an entry (rules 2 and 3)."""
        call = [CALL, list(entry.args), dict(entry.kwargs), dict(entry.options)]
        try:
            body, content_type, encoding = self._encodes.encode_arguments(call, {})
        except EncodeError:
            parts = self._encodes.encode_arguments([IN_CODE, in_code(entry)], {})
            body, content_type, encoding = parts
        queue = self.sends.route(entry.task, entry.options)
        message = TaskMessage(entry.name, entry.task, queue, body, content_type, encoding)
        return Definition(message, entry.trigger, entry.rules, digests=self._encodes.digests)

    def put(self, entry: BeatEntry, *, paused: bool = False) -> bool:
        """Make or replace an entry at run time; False if the code of a beat has one of that name.

        It lasts until `delete`. Raises BrokerUnavailable and Damaged.
        """
        engine, definition = self.engine, self.definition_of(entry)
        while True:
            view = engine.view(entry.name)
            if view is not None and view.schedule.of_code:
                return False
            done = view if view is not None and view.schedule.digest == definition.digest else None
            done = done or engine.define(definition, 0, "", view, of_code=False)
            if done is not None:
                break
        if paused and done.schedule.paused_at is None:
            self.pause(entry.name)
        return True

    def declare_entries(self, entries: Iterable[BeatEntry]) -> None:
        """Set the entries of the code."""
        self.sends.entries = {each.name: each for each in entries}

    def runner(self, by: str, part: Part | None = None) -> Runner:
        """What a beat does all the time. `by`: its name."""
        declared = [_Declared(each, self) for each in self.sends.entries.values()]
        return Runner(self.engine, declared, by, part=part)

    def close(self) -> None:
        """Close the connections of this process."""
        self._places.close()


def make_schedule(app: App, entry: BeatEntry, *, paused: bool, write: bool) -> list[str]:
    """Make a schedule of a task of the app; returns what is different from the entry.

    Raises ConfigurationError, CodecError, DuplicateTask and TypeError if it cannot be one.
    """
    task = app.tasks.get(entry.task)
    if task is None:
        raise ConfigurationError(f"the app has no task {entry.task}")
    options, notes = dict(entry.options), []
    sent: SendOptions = {}
    if queue := options.pop("queue", None):
        sent["queue"] = str(queue)
    expires = options.pop("expires", None)
    if isinstance(expires, int | float):
        sent["expires"] = expires
    elif expires is not None:
        notes.append("those of aztask do not expire then")
    notes += [f"without its {name}" for name in sorted(options)]
    call = task.with_options(**sent).s(*entry.args, **entry.kwargs)
    plan = Plan(app.schedules.full_name(entry.name), call, entry.trigger, entry.rules)
    if write:
        app.schedules.make(plan)
        if paused:
            app.schedules.pause(plan.name)
    return notes


def beat_name(app: str) -> str:
    """The name of the owner of an application's beat entries."""
    return f"{app} (beat)"
