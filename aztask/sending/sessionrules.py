"""Rules of sessions, checked at the send, before any message leaves.

Rules
1. The app must know that the queue has sessions: on another queue, a session's id would order
   nothing.
2. In an ordered session a message that is retried keeps its place. The session's next message would
   overtake a clone, so ``resubmit`` needs ``ordered=False``.
3. ``defer`` cannot be used in sessions: it would have to hold its pointer and its message at the
   same time.
"""

from __future__ import annotations

from typing import Any, Final

from aztask.errors import CapabilityError, ConfigurationError
from aztask.queues.base import Capabilities
from aztask.task import Task
from aztask.taskoptions import SendOptions

IN_ORDER: Final = ("hold", "abandon", "lease-timeout")
"""The retry strategies that keep a message's place in its session; the default comes first."""


def strategy_in_session(task: Task[..., Any] | None, default: str, *, ordered: bool) -> str:
    """The retry strategy of a message in a session. `default` is the app's."""
    strategy = task.retry_strategy if task is not None else default
    if strategy in IN_ORDER:
        return strategy
    return IN_ORDER[0] if ordered else "resubmit"


def check_session(
    name: str,
    task: Task[..., Any] | None,
    queue: str,
    options: SendOptions,
    *,
    sessions: bool,
    can: Capabilities,
) -> tuple[str | None, bool]:
    """(session, ordered) for the send. Raises ConfigurationError, CapabilityError.

    * `sessions`: True if the app knows that the queue has sessions.
    """
    session, ordered = options.get("session"), options.get("ordered")
    if session is None:
        if ordered is not None:
            raise ConfigurationError("ordered= applies to a session: give session=... too")
        if sessions:
            raise ConfigurationError(
                f"queue {queue!r} has sessions: name one for {name}, for example "
                "with_options(session='customer-7')"
            )
        return None, True
    if not can.sessions:
        raise CapabilityError(
            f"{can.name} has no sessions, so session={session!r} would order nothing; use Service "
            "Bus or local://, or remove it"
        )
    if not sessions:
        raise ConfigurationError(
            f"queue {queue!r} is not configured with sessions; write "
            f"app.queue({queue!r}, sessions=True), or remove session="
        )
    if ordered is None:
        ordered = task.ordered if task is not None else True
    if task is not None:
        _check_task(task, ordered)
    return session, ordered


def _check_task(task: Task[..., Any], ordered: bool) -> None:
    strategy = task.strategy_asked
    if strategy == "defer":
        raise ConfigurationError(
            f"task {task.name!r}: retry_strategy='defer' does not work in sessions; remove it (the "
            f"default is {IN_ORDER[0]!r}), or give up the order with 'resubmit' and ordered=False"
        )
    if not ordered:
        return
    if strategy is not None and strategy not in IN_ORDER:
        raise ConfigurationError(
            f"task {task.name!r}: with retry_strategy={strategy!r} a retry would be overtaken in "
            f"its session; remove it (the default is {IN_ORDER[0]!r}), or give up the order with "
            "ordered=False"
        )
    if task.delivery == "at-most-once":
        raise ConfigurationError(
            f"task {task.name!r}: with delivery='at-most-once' no lease keeps the session while "
            "the task runs; remove it, or give up the order with ordered=False"
        )
