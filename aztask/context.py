"""What a running task knows of its delivery, and what it may ask for.

Rules
1. Everything here is local and fast but `checkpoint`, `Lease.extend` and a session's state, which
   wait for the broker.
2. `lease.ensure` is the fence: call it right before a side effect that must not happen twice.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

from aztask.errors import LeaseLost
from aztask.message.message import TaskMessage
from aztask.session import Session
from aztask.support.clock import SYSTEM_CLOCK, Clock

CONFIRM_SECONDS = 30.0


class TaskLease:
    """The running task's view of its lease. The worker renews it; nothing has to be done here."""

    def __init__(
        self,
        deadline: float,
        *,
        ask: Callable[[float], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """deadline: on `clock`. ask: how to ask the worker for an extension, in seconds."""
        self._deadline = deadline
        self._ask = ask
        self._clock = clock
        self._lost_reason = ""
        self._changed = threading.Condition()
        self._renewals = 0

    @property
    def remaining_seconds(self) -> float:
        """Seconds until the lease ends unless it is renewed; 0.0 when it has ended."""
        return max(0.0, self._deadline - self._clock.monotonic())

    @property
    def lost(self) -> bool:
        """Whether somebody else may have the message by now."""
        return bool(self._lost_reason) or self._clock.monotonic() >= self._deadline

    def ensure(self) -> None:
        """Return while the lease is held; raise LeaseLost when it is not.

        It is a fence in time, not a transaction: if the process stops between this call and the
        side effect, the effect may happen under a lost lease.
        """
        if self.lost:
            raise LeaseLost(self._lost_reason or LeaseLost.__doc__)

    def extend(self, seconds: float) -> None:
        """Hold the lease for at least `seconds` from now; returns once the broker has agreed.

        The worker's ``max_lease`` caps it. Where the queue sets the duration (Service Bus) the
        lease is renewed at once, and again and again as always. Raises LeaseLost.
        """
        if not seconds > 0:
            raise ValueError(f"extend takes seconds above 0, not {seconds!r}")
        with self._changed:
            seen = self._renewals
            self._ask(seconds)
            self._changed.wait_for(
                lambda: self._renewals > seen or self.lost,
                timeout=min(CONFIRM_SECONDS, self.remaining_seconds),
            )
        self.ensure()

    def renewed(self, deadline: float) -> None:
        """The worker says: renewed until then."""
        with self._changed:
            self._deadline = deadline
            self._renewals += 1
            self._changed.notify_all()

    def lose(self, reason: str) -> None:
        """The worker says: it is over."""
        with self._changed:
            self._lost_reason = reason
            self._changed.notify_all()


class Context:
    """The first argument of a task made with ``@app.task_with_context``."""

    def __init__(
        self,
        message: TaskMessage,
        *,
        delivery_count: int,
        lease: TaskLease,
        saved: Any = None,
        save: Callable[[Any], None],
        session: Session | None = None,
    ) -> None:
        self.message = message
        self.delivery_count = delivery_count
        self.lease = lease
        self.session = session
        self.saved = saved
        self._save = save

    @property
    def task_id(self) -> str:
        """The id that `.delay()` returned."""
        return self.message.id

    @property
    def task(self) -> str:
        """The task's registered name."""
        return self.message.task

    @property
    def queue(self) -> str:
        """The queue that the message came from."""
        return self.message.queue

    @property
    def resubmit_count(self) -> int:
        """How often this invocation failed before."""
        return self.message.resubmit_count

    def checkpoint(self, state: Any) -> None:
        """Store `state` in the message: the next delivery finds it as ``context.saved``.

        On return it is stored, and the lease is renewed. If the process dies before that, the
        former checkpoint stands. A checkpoint travels in the message: together with the arguments
        it must fit into what the broker takes, less 1 KiB (see docs/brokers.md). Raises LeaseLost,
        EncodeError, MessageTooLarge (the former checkpoint stands), and CapabilityError where
        neither the broker nor a result store can hold it.
        """
        self.lease.ensure()
        self._save(state)
        self.saved = state


_current: contextvars.ContextVar[Context | None] = contextvars.ContextVar("aztask", default=None)


def current_context() -> Context | None:
    """The context of the task that this code runs in; None outside of tasks."""
    return _current.get()


def set_current_context(context: Context | None) -> None:
    """Say which task runs in this thread from now on."""
    _current.set(context)
