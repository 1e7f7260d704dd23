"""What may be sent into a session, and what may not: said at the send, before anything is sent.

Rules
1. The queue must be known to have sessions: sent elsewhere, a session's id would order nothing.
2. In an ordered session a message that runs again keeps its place. A clone would be overtaken by
   the session's next message, so ``resubmit`` needs ``ordered=False``.
3. ``defer`` is not for sessions: its pointer and its message would have to be held side by side.
"""

from __future__ import annotations

from typing import Any, Final

from aztask.brokers.base import Capabilities
from aztask.errors import CapabilityError, ConfigurationError
from aztask.task import SendOptions, Task

IN_ORDER: Final = ("hold", "abandon", "lease-timeout")
"""Retry strategies with which a message keeps its place in its session; the default first."""


def strategy_in_session(task: Task[..., Any] | None, default: str, *, ordered: bool) -> str:
    """The retry strategy of a message in a session. default: the app's."""
    wanted = task.retry_strategy if task is not None else default
    if wanted in IN_ORDER:
        return wanted
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
    """(session, ordered) to send with. sessions: whether the queue is known to have them.

    Raises ConfigurationError, CapabilityError.
    """
    session, ordered = options.get("session"), options.get("ordered")
    if session is None:
        if ordered is not None:
            raise ConfigurationError("ordered says something of a session: give session=... too")
        if sessions:
            raise ConfigurationError(
                f"queue {queue!r} has sessions: name one for {name}, for example "
                "with_options(session='customer-7')"
            )
        return None, True
    if not can.sessions:
        raise CapabilityError(
            f"{can.name} has no sessions, so session={session!r} would order nothing; use Service "
            "Bus or local://, or leave it out"
        )
    if not sessions:
        raise ConfigurationError(
            f"this app does not know queue {queue!r} as one with sessions; say "
            f"app.queue({queue!r}, sessions=True), or leave session= out"
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
            f"task {task.name!r}: retry_strategy='defer' is not for sessions; leave it out (then "
            f"it is {IN_ORDER[0]!r}), or give up the order with 'resubmit' and ordered=False"
        )
    if not ordered:
        return
    if strategy is not None and strategy not in IN_ORDER:
        raise ConfigurationError(
            f"task {task.name!r}: with retry_strategy={strategy!r} a retry would be overtaken in "
            f"its session; leave it out (then it is {IN_ORDER[0]!r}), or give up the order with "
            "ordered=False"
        )
    if task.delivery == "at-most-once":
        raise ConfigurationError(
            f"task {task.name!r}: delivery='at-most-once' leaves no lease that keeps the session "
            "while the task runs; leave it out, or give up the order with ordered=False"
        )
