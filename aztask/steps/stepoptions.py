"""What code gives to steps and waits: options and tasks; and what no step may be called with."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol

from aztask.errors import StepError
from aztask.retry import RetryPolicy
from aztask.support.display import short_repr

NAME_CHARACTERS: Final = 200
NAMES: Final = "\n"
"""Between the names of signals for which a wait waits, in its record."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The options of a step.

    * `key`: names this call, instead of its number among those of the same name.
    * `retry`: retries the step by itself; None leaves that to the task.
    * `record_errors`: record an error at once, also one that ends the run.
    """

    key: str | None = None
    retry: RetryPolicy | None = None
    record_errors: bool = False


@dataclass(frozen=True, slots=True)
class StartedTask:
    """A task that `Context.start` has sent, for `Context.wait_any`.

    * `id`: its task id; ``app.result(id)`` is its result. `name`: such as ``shop.ship``.
    """

    id: str
    name: str


class CallableTask(Protocol):
    """A task that `RunSteps.call` sends: `aztask.Task`, or an invocation with options."""

    @property
    def name(self) -> str:
        """As workers know it, such as ``shop.ship``."""
        ...

    def delay(self, *args: Any, **kwargs: Any) -> Any:
        """Send it; returns an `AsyncResult`."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it here and now, in a direct call without a worker."""
        ...


def check_step(name: object, options: StepOptions) -> None:
    """Raise StepError for a name or a key that no step may have."""
    for what, text in (("name", name), ("key", "" if options.key is None else options.key)):
        if (
            not isinstance(text, str)
            or len(text) > NAME_CHARACTERS
            or (what == "name" and not text)
        ):
            raise StepError(
                f"a step's {what} is a text of at most {NAME_CHARACTERS} characters, not {text!r}"
            )


def check_signal(name: str, options: StepOptions) -> None:
    """As `check_step`, for the name of a signal that a wait asks for."""
    check_step(name, options)
    if NAMES in name:
        raise StepError(f"a signal's name is one line, not {name!r}")


def check_call(name: str, function: object, options: StepOptions) -> None:
    """Refuse what no retry of the task could call, before anything runs. Raises StepError."""
    if not callable(function):
        close(function)
        # Its type, not its value: this may be what the function returned, and it goes to the log.
        raise StepError(
            f"step {name!r} takes a function and its arguments, as in step({name!r}, charge, "
            f"card), not a value of type {type(function).__name__}"
        )
    if options.retry is not None and not isinstance(options.retry, RetryPolicy):
        raise StepError(
            f"step {name!r}: retry takes a RetryPolicy, not {short_repr(options.retry)}"
        )


def close(value: Any) -> None:
    """Close a coroutine that no one will await, so that Python does not warn of it."""
    if isinstance(value, Coroutine):
        value.close()


def line_here() -> object:
    """The thread, and the asyncio task in it, if there is one."""
    try:
        return threading.get_ident(), asyncio.current_task()
    except RuntimeError:
        return threading.get_ident(), None
