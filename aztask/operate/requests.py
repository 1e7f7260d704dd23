"""Actions by name with values as text: what a page's form and a tool of an agent send.

Rules
1. `prepare` counts and changes nothing; what it returns is an `Action`, as the commands make it. So
   the command line, the page and MCP act on the same, and count the same.
2. A request names each value; an unknown name or a value that cannot be read is an error.
3. Each kind says the least role that may ask for it. `prepare` does not check it: who receives a
   request knows who asks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NoReturn

from aztask.app import App
from aztask.errors import ConfigurationError, did_you_mean
from aztask.limits.control import MOST
from aztask.operate import controls, jobs, queues, schedules, steps, tasks, workflows
from aztask.operate.action import Action
from aztask.operate.deadletters import Selection, mutes
from aztask.operate.deadletters import actions as letters
from aztask.support.display import printable

Values = Mapping[str, str]


class Role(IntEnum):
    """What a person or a program may do; each role may do what the ones before may."""

    READ = 1
    ACT = 2
    CONFIGURE = 3

    @classmethod
    def named(cls, text: str) -> Role:
        """The role with this name. Raises ConfigurationError."""
        if text.upper() not in cls.__members__:
            raise ConfigurationError(f"{printable(text, 40)} is no role: read, act or configure")
        return cls[text.upper()]


@dataclass(frozen=True, slots=True)
class RequestKind:
    """A kind of request.

    * `title`: what it does, for a heading. `about`: a sentence more. `role`: who may ask for it.
    * `fields`: its values by name, and what each one is; those of `needed` must be given.
    * `many`: it acts on items one by one, which may take long. `final`: it cannot be undone.
    """

    name: str
    title: str
    about: str
    role: Role
    fields: Mapping[str, str]
    needed: tuple[str, ...] = ()
    many: bool = False
    final: bool = False


_LETTERS: Final = {
    "queue": "the queue; all queues if it is not given",
    "ids": "task ids, one on each line",
    "task": "only of this task, by its registered name",
    "reason": "only with this dead-letter reason",
    "error": "only with this error signature, as the list of groups shows it",
    "all": "yes for all dead letters, if nothing else selects them",
}
_NAMES: Final = {
    "queue": "a queue",
    "task": "a task, by its registered name",
    "tenant": "a key of a limit: LIMIT=KEY",
}
_GROUP: Final = {
    "queue": "the queue",
    "task": "the task of the group",
    "reason": "its dead-letter reason",
    "error": "its error signature, as the list of groups shows it",
}
_SCHEDULE: Final = {"name": "the schedule"}
_WORKFLOW: Final = {"id": "the workflow"}

KINDS: Final[Mapping[str, RequestKind]] = {
    each.name: each
    for each in (
        RequestKind(
            "replay",
            "Replay dead letters",
            "They are sent to their queues again, each as a new generation of its task.",
            Role.ACT,
            {
                **_LETTERS,
                "rate": "messages a second at most",
                "fresh": "yes to begin from the start",
            },
            many=True,
        ),
        RequestKind(
            "edit",
            "Edit and replay a dead letter",
            "It is sent again with these arguments, signed anew. A unique task keeps its key.",
            Role.ACT,
            {
                "queue": "the queue",
                "id": "the task's id",
                "args": "the positional arguments, a JSON list",
                "kwargs": "the keyword arguments, a JSON object",
            },
            needed=("queue", "id", "args", "kwargs"),
        ),
        RequestKind(
            "purge",
            "Delete dead letters",
            "They are deleted for good.",
            Role.ACT,
            _LETTERS,
            many=True,
            final=True,
        ),
        RequestKind(
            "cancel",
            "Cancel tasks",
            "Waiting tasks do not start. Running ones go on to their end, and are not retried.",
            Role.ACT,
            {
                "ids": "task ids, one on each line",
                "task": "the waiting invocations of this task",
                "queue": "the tasks that wait in this queue",
            },
            many=True,
            final=True,
        ),
        RequestKind(
            "stop",
            "Cancel and stop tasks",
            "Waiting tasks do not start, and running ones are stopped within some seconds.",
            Role.ACT,
            {
                "ids": "task ids, one on each line",
                "task": "the invocations of this task",
                "queue": "the tasks that wait in this queue or came from it",
            },
            many=True,
            final=True,
        ),
        RequestKind(
            "pause",
            "Pause",
            "Workers obey within 5 seconds, until it is resumed. Tasks that run go on.",
            Role.ACT,
            _NAMES,
        ),
        RequestKind(
            "resume",
            "Resume",
            "Workers obey within 5 seconds. The circuit breaker of a task is closed, too.",
            Role.ACT,
            _NAMES,
        ),
        RequestKind(
            "schedule-pause",
            "Pause a schedule",
            "It makes no tasks until it is resumed.",
            Role.ACT,
            _SCHEDULE,
            needed=("name",),
        ),
        RequestKind(
            "schedule-resume",
            "Resume a schedule",
            "Times in between are skipped.",
            Role.ACT,
            _SCHEDULE,
            needed=("name",),
        ),
        RequestKind(
            "schedule-trigger",
            "Trigger a schedule",
            "Its task is sent now; the next times stay as they are.",
            Role.ACT,
            _SCHEDULE,
            needed=("name",),
        ),
        RequestKind(
            "workflow-resume",
            "Resume a workflow",
            "Its dead-lettered tasks are replayed, and it goes on behind each that succeeds.",
            Role.ACT,
            _WORKFLOW,
            needed=("id",),
        ),
        RequestKind(
            "workflow-cancel",
            "Cancel a workflow",
            "No further task of it starts.",
            Role.ACT,
            _WORKFLOW,
            needed=("id",),
            final=True,
        ),
        RequestKind(
            "signal",
            "Send a signal",
            "A task that waits for it goes on. Signals that no wait has taken yet are kept.",
            Role.ACT,
            {"id": "the task", "name": "the signal", "value": "its value as JSON; null by default"},
            needed=("id", "name"),
        ),
        RequestKind(
            "mute",
            "Mute a group of dead letters",
            "It is listed last, and no watcher sends it, until it has more dead letters.",
            Role.ACT,
            _GROUP,
            needed=("queue",),
        ),
        RequestKind(
            "unmute",
            "Unmute a group of dead letters",
            "It is listed and sent as others are.",
            Role.ACT,
            _GROUP,
            needed=("queue",),
        ),
        RequestKind(
            "job-cancel",
            "Cancel a job",
            "What it has done stays done.",
            Role.ACT,
            {"id": "the job"},
            needed=("id",),
        ),
        RequestKind(
            "scale",
            "Change the concurrency of workers",
            "It holds until it is reset, also for workers that start later.",
            Role.CONFIGURE,
            {
                "size": f"how many tasks run at the same time, 1 to {MOST:,}, or reset",
                "worker": "only this worker",
                "queue": "only the workers of this queue",
            },
            needed=("size",),
        ),
        RequestKind(
            "limit",
            "Change a limit",
            "Workers obey within 5 seconds, until it is reset. The rest stays as declared.",
            Role.CONFIGURE,
            {
                "name": "the limit",
                "rate": 'starts per time, for example "10/s" or "600/m"',
                "burst": "how many of them may come at once",
                "concurrency": "how many tasks run at the same time",
                "reset": "yes for the numbers of its declaration",
            },
            needed=("name",),
        ),
        RequestKind(
            "queue-purge",
            "Empty a queue",
            "All messages in it are deleted for good, those too that come until then.",
            Role.CONFIGURE,
            {"queue": "the queue"},
            needed=("queue",),
            final=True,
        ),
    )
}


def kind_of(name: str) -> RequestKind:
    """The kind with this name. Raises ConfigurationError."""
    if name not in KINDS:
        raise ConfigurationError(
            f"there is no action {printable(name, 40)}.{did_you_mean(name, list(KINDS))}"
        )
    return KINDS[name]


def prepare(app: App, name: str, values: Values) -> Action[Any]:
    """The action, counted. Raises ConfigurationError, and what counting raises."""
    kind = kind_of(name)
    given = {field: value for field, value in values.items() if value.strip()}
    for field in given:
        if field not in kind.fields:
            raise ConfigurationError(
                f"{name} takes no {printable(field, 40)}.{did_you_mean(field, list(kind.fields))}"
            )
    for field in kind.needed:
        if field not in given:
            raise ConfigurationError(f"{name} needs {field}: {kind.fields[field]}")
    return _MAKERS[name](app, given)


def _lines(values: Values, field: str) -> list[str]:
    return [line.strip() for line in values.get(field, "").splitlines() if line.strip()]


def _one(values: Values, field: str) -> tuple[str, ...]:
    return (values[field],) if field in values else ()


def _flag(values: Values, field: str) -> bool:
    text = values.get(field, "no")
    if text not in ("yes", "no"):
        raise ConfigurationError(f"{field} is yes or no, not {printable(text, 40)}")
    return text == "yes"


def _selection(values: Values) -> Selection:
    return Selection(
        ids=frozenset(_lines(values, "ids")),
        task=values.get("task"),
        reason=values.get("reason"),
        signature=values.get("error"),
        everything=_flag(values, "all"),
    )


def _replay(app: App, values: Values) -> Action[Any]:
    rate = None
    if "rate" in values:
        try:
            rate = float(values["rate"])
        except ValueError:
            raise ConfigurationError("rate is a number of messages a second") from None
    fresh = _flag(values, "fresh")
    return letters.replay(app, _one(values, "queue"), _selection(values), rate=rate, fresh=fresh)


def _purge(app: App, values: Values) -> Action[Any]:
    return letters.purge(app, _one(values, "queue"), _selection(values))


def _edit(app: App, values: Values) -> Action[Any]:
    args, kwargs = _json(values["args"], "args"), _json(values["kwargs"], "kwargs")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ConfigurationError("args is a JSON list, and kwargs a JSON object")
    return letters.edit(app, values["queue"], values["id"], args, kwargs)


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{what} is no JSON: {printable(str(error), 200)}") from None


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _cancel(app: App, values: Values, *, running: bool = False) -> Action[Any]:
    ids = _lines(values, "ids")
    chosen = tasks.Chosen(values.get("task"), _one(values, "queue"), running)
    if bool(ids) == bool(chosen.task or chosen.queues):
        raise ConfigurationError("select tasks by their ids, or else by task and queue")
    if ids:
        return tasks.cancel(app, ids, running=running)
    return tasks.cancel_chosen(app, chosen)


def _stop(app: App, values: Values) -> Action[Any]:
    return _cancel(app, values, running=True)


def _names(values: Values) -> controls.Names:
    found = controls.Names(*(_one(values, field) for field in ("queue", "task", "tenant")))
    if not found.each():
        raise ConfigurationError("name a queue, a task or a tenant")
    return found


def _pause(app: App, values: Values) -> Action[Any]:
    return controls.pause(app, _names(values), checked=bool(app.tasks))


def _resume(app: App, values: Values) -> Action[Any]:
    return controls.resume(app, _names(values))


def _signal(app: App, values: Values) -> Action[Any]:
    value = _json(values.get("value", "null"), "value")
    return steps.signal(app, values["id"], values["name"], value)


def _group(values: Values) -> tuple[str, str, str, str]:
    task, reason, error = (values.get(field, "") for field in ("task", "reason", "error"))
    return values["queue"], task, reason, error


def _mute(app: App, values: Values) -> Action[Any]:
    return mutes.mute(app, *_group(values))


def _unmute(app: App, values: Values) -> Action[Any]:
    return mutes.unmute(app, *_group(values))


def _job_cancel(app: App, values: Values) -> Action[Any]:
    return jobs.cancel(app, values["id"])


def _scale(app: App, values: Values) -> Action[Any]:
    text = values["size"].strip()
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
    if text != "reset" and not 1 <= number <= MOST:
        raise ConfigurationError(f"size is a number from 1 to {MOST:,}, or reset")
    size = None if text == "reset" else number
    return controls.scale(app, size, _one(values, "worker"), _one(values, "queue"))


def _limit(app: App, values: Values) -> Action[Any]:
    numbers = {field: values.get(field, "") for field in ("rate", "burst", "concurrency")}
    if _flag(values, "reset") == any(numbers.values()):
        raise ConfigurationError("give a rate, a burst or a concurrency, or else reset")
    return controls.change_limit(
        app,
        values["name"],
        rate=numbers["rate"] or None,
        burst=_number(numbers["burst"], "burst"),
        concurrency=_number(numbers["concurrency"], "concurrency"),
    )


def _number(text: str, what: str) -> int | None:
    if text and not (text.isascii() and text.isdigit() and len(text) < 12):
        raise ConfigurationError(f"{what} is a whole number above 0")
    return int(text) if text else None


def _schedule_pause(app: App, values: Values) -> Action[Any]:
    return schedules.pause(app, values["name"])


def _schedule_resume(app: App, values: Values) -> Action[Any]:
    return schedules.resume(app, values["name"])


def _schedule_trigger(app: App, values: Values) -> Action[Any]:
    return schedules.trigger(app, values["name"])


def _workflow_resume(app: App, values: Values) -> Action[Any]:
    return workflows.resume(app, values["id"])


def _workflow_cancel(app: App, values: Values) -> Action[Any]:
    return workflows.cancel(app, values["id"])


def _queue_purge(app: App, values: Values) -> Action[Any]:
    return queues.purge(app, values["queue"])


_MAKERS: Final[Mapping[str, Callable[[App, Values], Action[Any]]]] = {
    "replay": _replay,
    "edit": _edit,
    "purge": _purge,
    "cancel": _cancel,
    "stop": _stop,
    "pause": _pause,
    "resume": _resume,
    "schedule-pause": _schedule_pause,
    "schedule-resume": _schedule_resume,
    "schedule-trigger": _schedule_trigger,
    "workflow-resume": _workflow_resume,
    "workflow-cancel": _workflow_cancel,
    "signal": _signal,
    "mute": _mute,
    "unmute": _unmute,
    "job-cancel": _job_cancel,
    "scale": _scale,
    "limit": _limit,
    "queue-purge": _queue_purge,
}
