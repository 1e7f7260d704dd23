"""The options of tasks and of sends: their names, their types and their checks.

Rules
1. A wrong option raises a ConfigurationError at the line that gives it, so mostly at import.
2. A name that another framework uses for an option is answered with ours.
3. A duration is seconds or a ``timedelta``, a time is a ``datetime`` with a time zone. Both are
   checked here and are seconds, or UTC epoch seconds, from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NoReturn, TypedDict, TypeGuard, cast

from aztask.breaker import CircuitBreaker
from aztask.errors import ConfigurationError, DuplicateTask, did_you_mean
from aztask.message.headers import TASK_LIMIT
from aztask.message.message import CONTINUE, RENEWED
from aztask.retry import RetryPolicy, RetryStrategy
from aztask.support.checks import shown
from aztask.support.durations import to_epoch_seconds

DELIVERIES: Final = ("at-least-once", "at-most-once")

MOST_LIMITS: Final = 8
TASK_ID_CHARACTERS: Final = 1024
SESSION_CHARACTERS: Final = 128
TOO_LONG: Final = 1e10
"""Seconds, about 300 years: a longer duration is a mistake, and later dates overflow."""


class TaskOptions(TypedDict, total=False):
    """The options of ``@app.task(...)`` and ``@app.task_with_context(...)``. All are optional.

    Durations are seconds or a ``timedelta``.

    * `name`: the registered name; "APP.FUNCTION" by default.
    * `queue`: the queue that invocations are sent to; the app's ``default_queue`` by default.
    * `priority`: one of the queue's priorities, see `App.queue`; "normal" by default.
    * `retry`: a `RetryPolicy`; the app's by default.
    * `time_limit`: the time after which the process that runs the task is killed; no limit by
      default.
    * `soft_time_limit`: the time after which `TimeLimitExceeded` is raised in the task; no limit by
      default.
    * `stop_grace`: how long it may clean up once its worker stops and raised `WorkerStopping` in
      it; the worker's ``--shutdown-grace`` by default.
    * `lease`: a duration, or a callable that takes the task's arguments and returns one; the
      queue's lease by default.
    * `max_lease`: how long one run may hold its message, renewals included; the queue's limit
      by default.
    * `retry_strategy`: how the message waits for its retry: "resubmit", "abandon", "lease-timeout",
      "hold" or "defer"; the app's by default, see docs/discussions/strategies.
    * `expires`: the time from the send after which the task no longer starts; never by default.
    * `delivery`: "at-least-once" (default), or "at-most-once", which removes the message before the
      task runs.
    * `ordered`: True (default): in a session, a message that is retried runs before the session's
      next message.
    * `strict`: True refuses an argument that is not of its annotated type: at the send, and in a
      worker, which dead-letters the message; the app's ``strict`` by default, which is False.
    * `limits`: the names of the limits that apply to it, at most 8, see `App.limit`.
    * `breaker`: a `CircuitBreaker`, which pauses the task for all workers while most of its runs
      fail; none by default. Needs a result store.
    * `unique`: of calls with one key, one task waits or runs at a time. "arguments", or a function
      that takes the arguments and returns the key. Needs a result store.
    * `until`: how long a task holds its key: until it is "started" or "finished" (default), or for
      a time after the send.
    * `on_conflict`: what a call does while another task holds the key: "return" (default) its
      result, "drop" the call, whose result is cancelled, "raise" NotUnique, or "replace" a task
      that waits.
    * `unique_life`: the time after which a key is free, whatever happened; a day by default.
    * `throttle`: sends one task for each key in this time, and drops the calls after it.
    * `debounce`: sends only the last call of each key, when no other came for this time. Needs
      `unique`, and a worker that runs.
    """

    name: str
    queue: str
    priority: str
    retry: RetryPolicy
    unique: Literal["arguments"] | Callable[..., object]
    until: Literal["started", "finished"] | float | timedelta
    on_conflict: Literal["return", "drop", "raise", "replace"]
    unique_life: float | timedelta
    throttle: float | timedelta
    debounce: float | timedelta
    time_limit: float | timedelta
    soft_time_limit: float | timedelta
    stop_grace: float | timedelta
    lease: float | timedelta | Callable[..., float | timedelta]
    max_lease: float | timedelta
    retry_strategy: RetryStrategy
    expires: float | timedelta
    delivery: str
    ordered: bool
    strict: bool
    limits: Sequence[str]
    breaker: CircuitBreaker | None


class SendOptions(TypedDict, total=False):
    """The options of ``task.with_options(...)`` and `App.send`. All are optional.

    * `delay`: the time until the task may start, in seconds or as a ``timedelta``; 0 by default.
    * `eta`: the time at which it may start, a ``datetime`` with a time zone, instead of `delay`.
    * `queue`: the queue to send to; the task's by default.
    * `priority`: one of the queue's priorities, see `App.queue`; the task's by default, and
      "normal" in a queue that you name here.
    * `task_id`: an id of your own, 1 to 1,024 printable characters; a new UUID by default. If the
      result store already knows the id, the task does not run again and you get the existing
      result.
    * `expires`: after which the task no longer starts: seconds or a ``timedelta`` from the send, or
      a ``datetime`` with a time zone; the task's by default.
    * `force`: True runs a known task id again, as a new generation; False by default.
    * `session`: the name of a session. Tasks of one session run one at a time, in the order in
      which they were sent, across all workers. The queue must have sessions.
    * `ordered`: as in `TaskOptions`, for this invocation.
    """

    delay: float | timedelta
    eta: datetime
    queue: str
    priority: str
    task_id: str
    expires: float | timedelta | datetime
    force: bool
    session: str
    ordered: bool


class NodeOptions(TypedDict, total=False):
    """The send options of one signature, see `SendOptions`. A workflow names its tasks itself.

    A duration is checked, and is seconds from then on.
    """

    delay: float | timedelta
    queue: str
    priority: str
    expires: float | timedelta
    session: str
    ordered: bool


_RETRY: Final = "retry=RetryPolicy(max_retries=...)"
_WITH_OPTIONS: Final = "delay= when you send it: with_options(delay=...)"
_INSTEAD: Final[Mapping[str, Mapping[str, str]]] = {
    "TaskOptions": {
        "max_retries": _RETRY,
        "retries": _RETRY,
        "default_retry_delay": "retry=RetryPolicy(delay=...)",
        "retry_backoff": "retry=RetryPolicy(backoff=...)",
        "autoretry_for": "retry=RetryPolicy(retry_on=(...))",
        "bind": "@app.task_with_context",
        "timeout": "time_limit=",
        "rate_limit": 'limits=["NAME"], with app.limit("NAME", rate="10/s")',
        "countdown": _WITH_OPTIONS,
        "delay": _WITH_OPTIONS,
        "eta": "eta= when you send it: with_options(eta=...)",
    },
    "SendOptions": {
        "countdown": "delay=",
        "id": "task_id=",
        "max_retries": f"{_RETRY} in @app.task(...)",
        "retry": f"{_RETRY} in @app.task(...)",
        "time_limit": "time_limit= in @app.task(...)",
        "timeout": "time_limit= in @app.task(...)",
    },
    "AppOptions": {
        "max_retries": _RETRY,
        "retries": _RETRY,
        "backend": "results=",
        "broker_url": "broker=",
        "result_backend": "results=",
    },
}
"""What to write for the names that other frameworks give their options."""


def check_options(
    given: Iterable[str],
    known: type[Any],
    where: str,
    others: Sequence[str] = (),
    unnamed: Sequence[object] = (),
) -> None:
    """Raise ConfigurationError for an option that is not in `known`, a TypedDict.

    * `others`: further names that the caller accepts, for the suggestion.
    * `unnamed`: arguments without a name where only names are accepted.
    """
    names = [*others, *known.__annotations__]
    if unnamed:
        raise ConfigurationError(
            f"{where} takes its options by name. Write {names[0]}={shown(unnamed[0])}."
        )
    for name in given:
        if name not in names:
            instead = _INSTEAD.get(known.__name__, {}).get(name)
            hint = f" Write {instead}." if instead else did_you_mean(name, names)
            raise ConfigurationError(
                f"{where} has no option {name!r}.{hint} It has: {', '.join(names)}."
            )


def positive(value: object, what: str) -> float:
    """Return a duration in seconds, above 0. Raises ConfigurationError, which names `what`."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not _is_number(seconds) or not 0 < seconds < TOO_LONG:
        raise ConfigurationError(f"{what} takes seconds above 0 or a timedelta, not {shown(value)}")
    return float(seconds)


def check_time_limits(soft: float | None, hard: float | None, what: str) -> None:
    """Raise ConfigurationError unless the soft time limit, in seconds, comes first."""
    if soft is not None and hard is not None and soft >= hard:
        raise ConfigurationError(
            f"{what}: soft_time_limit ({soft:g} s) must be shorter than time_limit ({hard:g} s), "
            "which kills the process"
        )


def choice(value: object, known: Sequence[str], what: str) -> str:
    """Return `value` if it is one of `known`. Raises ConfigurationError."""
    if value not in known:
        raise ConfigurationError(
            f"{what} takes {' or '.join(map(repr, known))}, not {value!r}."
            f"{did_you_mean(str(value), known)}"
        )
    return str(value)


def flag(value: object, what: str) -> bool:
    """Return `value` if it is True or False. Raises ConfigurationError."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{what} is True or False, not {value!r}")
    return value


def name_text(value: object, what: str) -> str:
    """Return `value` if it is a text that is not empty. Raises ConfigurationError."""
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{what} takes a text, not {shown(value)}")
    return value


def limit_names(value: object, what: str) -> tuple[str, ...]:
    """Return `value` if it is a list of up to 8 names. Raises ConfigurationError."""
    wrong = not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value)
    if wrong or len(names := tuple(dict.fromkeys(cast("Sequence[str]", value)))) > MOST_LIMITS:
        raise ConfigurationError(
            f"{what} takes a list of at most {MOST_LIMITS} names, not {shown(value)}"
        )
    return names


def checked_send_options(options: SendOptions, where: str) -> SendOptions:
    """The options of a send with every duration in seconds. Raises ConfigurationError.

    * `where`: who takes them, for the errors.
    """
    check_options(options, SendOptions, where)
    checked = _in_seconds(options)
    if isinstance(options.get("expires"), datetime):
        to_epoch_seconds(options["expires"], "expires")
    elif "expires" in options:
        checked["expires"] = positive(options["expires"], "expires")
    if options.get("task_id") is not None:
        task_id = name_text(options.get("task_id"), "task_id")
        if len(task_id) > TASK_ID_CHARACTERS or not task_id.isprintable():
            raise ConfigurationError(
                f"task_id takes 1 to {TASK_ID_CHARACTERS:,} printable characters, not "
                f"{shown(task_id)}"
            )
    if "force" in options:
        flag(options["force"], "force")
    return checked


def checked_node_options(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options of a signature with every duration in seconds. Raises ConfigurationError.

    They are those of a send without its id and without fixed times: a workflow names its tasks
    itself, and sends them when their turn comes.
    """
    names = tuple(NodeOptions.__annotations__)
    for name in options:
        if name not in names:
            raise ConfigurationError(
                f"{where} has no option {name!r}.{did_you_mean(name, names)} "
                f"It has: {', '.join(names)}."
            )
    checked = _in_seconds(cast("SendOptions", options))
    if isinstance(options.get("expires"), datetime):
        raise ConfigurationError(
            f"expires of {where} takes seconds or a timedelta, from when its message is sent, not "
            f"{shown(options['expires'])}"
        )
    if options.get("expires") is not None:
        checked["expires"] = positive(options["expires"], "expires")
    return cast("dict[str, Any]", checked)


def _in_seconds(options: SendOptions) -> SendOptions:
    """A copy with `delay` in seconds, and what sends and signatures have in common checked."""
    checked = SendOptions(**options)
    if "delay" in options:
        checked["delay"] = _delay(options["delay"])
    if "eta" in options:
        if "delay" in options:
            raise ConfigurationError("delay and eta both say when the task may start; give one")
        to_epoch_seconds(options["eta"], "eta")
    for name in ("queue", "priority", "session"):
        if options.get(name) is not None:
            name_text(options.get(name), name)
    session = options.get("session")
    if session is not None and (len(session) > SESSION_CHARACTERS or not session.isprintable()):
        raise ConfigurationError(
            f"session takes 1 to {SESSION_CHARACTERS} printable characters, not {shown(session)}"
        )
    if "ordered" in options:
        flag(options["ordered"], "ordered")
    return checked


def delay_seconds(options: SendOptions, now: float) -> float:
    """Seconds from `now`, UTC epoch seconds, until the task may start.

    * `options`: checked ones. An `eta` in the past gives 0.
    """
    if "eta" in options:
        return max(0.0, to_epoch_seconds(options["eta"], "eta") - now)
    return _delay(options.get("delay", 0.0))


def expiry(options: SendOptions, of_task: float | None, now: float) -> float | None:
    """When the task expires, in UTC epoch seconds; None for never.

    * `options`: checked ones.
    * `of_task`: the task's own `expires`, in seconds from `now`.
    """
    expires = options.get("expires", of_task)
    if isinstance(expires, datetime):
        return to_epoch_seconds(expires, "expires")
    return None if expires is None else now + positive(expires, "expires")


def _delay(value: object) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not _is_number(seconds) or not 0 <= seconds < TOO_LONG:
        hint = "; write eta= for a time" if isinstance(value, datetime) else ""
        raise ConfigurationError(
            f"delay takes seconds of 0 or more, or a timedelta, not {shown(value)}{hint}"
        )
    return float(seconds)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- the names under which an app registers its tasks --------------------------------------
#
# Rules
# 1. A task is named "APP.FUNCTION", or as ``name=`` says. Nothing else plays a part: messages carry
#    the name, and every program that sends or runs the task must arrive at the same one.
# 2. So a second function of the same name is an error. If aztask added the module to the second
#    name, the names would depend on the order of imports; and a program that imports only one of
#    the two modules would still use the short name, for a task that workers know under another.


def task_name(app: str, function: object, given: str | None) -> str:
    """The name of a task. Raises ConfigurationError if `function` is none, or has no name, and for
    a name that no message can carry.

    * `given`: the option ``name``, or None.
    """
    if not callable(function):
        hint = ""
        if isinstance(function, str):
            hint = f"; options need their names, for example @app.task(name={function!r})"
        raise ConfigurationError(f"a task is a function, not {shown(function)}{hint}")
    own = getattr(function, "__name__", None)
    if given is None and own is None:
        raise ConfigurationError(
            f"{shown(function)} has no name of its own; write app.task(name=...)"
        )
    name: object = f"{app}.{own}" if given is None else given
    if not isinstance(name, str) or not 0 < len(name) <= TASK_LIMIT or not name.isprintable():
        raise ConfigurationError(
            f"the name of a task is a text of 1 to {TASK_LIMIT} printable characters, not "
            f"{shown(name)}"
        )
    if name.endswith((CONTINUE, RENEWED)):
        raise ConfigurationError(
            f"task {name!r}: a name that ends in {CONTINUE} or {RENEWED} stands for a task that "
            "goes on; choose another one"
        )
    return name


def raise_duplicate(
    app: str, name: str, earlier: Callable[..., Any], function: Callable[..., Any]
) -> NoReturn:
    """Raise DuplicateTask: both functions would be registered as `name`."""
    first, second = _module(earlier), _module(function)
    if _place(function) is not None and _place(function) == _place(earlier) and first != second:
        raise DuplicateTask(
            f"task {name!r} is registered twice, because its file is imported twice: as module "
            f"{first} and as {second}; import it under one name, and start programs from a file "
            "that defines no tasks"
        )
    proposal = f"{app}.{second}.{getattr(function, '__name__', name)}"
    raise DuplicateTask(
        f"two functions are registered as {name!r}: {_full_name(earlier)} and "
        f"{_full_name(function)}; give one of them a name, for example "
        f"@app.task(name={proposal!r})"
    )


def _module(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__module__", None) or "?")


def _full_name(function: Callable[..., Any]) -> str:
    return f"{_module(function)}.{getattr(function, '__qualname__', repr(function))}"


def _place(function: Callable[..., Any]) -> tuple[str, int] | None:
    """The file and line of the function's source; None if it was not written in Python."""
    code = getattr(function, "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)
