"""Hooks of an app: your code around sends, runs, workers and pool processes.

Telemetry, error reporters and web frameworks register here; aztask calls none of them by name. See
docs/how-to/advanced/hooks.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aztask.config import Settings
from aztask.context import Context
from aztask.message.message import TaskMessage
from aztask.queues.delivery import Delivery, Lost, Settled, Unknown
from aztask.settlement import Decision
from aztask.stores.events.event import Event
from aztask.stores.events.sink import EventSink, FileEventSink, NullEventSink
from aztask.support.hooks import Hook, Lifespans, Listeners


@dataclass(slots=True)
class Sending:
    """One send, the argument of an ``app.around_send`` hook.

    * `task`: the task's name.
    * `queue`: the queue that it is sent to.
    * `ids`: the task ids, in order: one for `.delay`, up to 500 for each batch of `.map`.
    * `headers`: what you put here travels with every message of the send: text, numbers, bytes, or
      lists and maps of those. The task reads them in ``context.message.extra``.
    * `each`: None, or a map for each id, in their order: further headers of that message alone.
    * `workflow`: the workflow's id if a graph is started. Then `ids` are those of all its tasks, of
      those that follow later too, and `task` and `queue` are those of the first.
    * `note`: None, or up to 60 KiB that the result store keeps until it purges the task. Only for a
      `task_id` of your own. Read it in ``app.results.history(task_id)[0].note``.
    """

    task: str
    queue: str
    ids: Sequence[str]
    headers: dict[str, Any] = field(default_factory=dict)
    each: Sequence[dict[str, Any]] | None = None
    workflow: str | None = None
    note: bytes | None = None


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker or one of its pool processes, the argument of worker and process hooks.

    * `name`: the worker's name, the same in its pool processes.
    * `queues`: the queues that it serves.
    """

    name: str
    queues: tuple[str, ...] = ()


@dataclass(slots=True)
class Receiving:
    """Messages that a worker received in one batch, the argument of ``app.hooks.receive``.

    * `queue`: the queue that they came from.
    * `messages`, `deliveries`: those that could be read, in the same order.
    * `received`: how many messages came, damaged ones included.
    * `asked_at`, `received_at`: when the request began and ended, UTC epoch seconds.
    * `traceparents`: empty; the trace contexts that you put here, by index, become those of
      messages, and their retries carry them on.
    """

    queue: str
    messages: Sequence[TaskMessage]
    deliveries: Sequence[Delivery]
    received: int
    asked_at: float
    received_at: float
    traceparents: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class Settling:
    """Settlements that a worker carries out in one batch, the argument of ``app.hooks.settle``.

    * `queue`: the queue that the messages came from.
    * `messages`: None for one that could not be read.
    * `deliveries`, `settlements`: in the same order as the messages.
    * `answers`: the broker's answers, in that order; empty before the ``yield``.
    """

    queue: str
    messages: Sequence[TaskMessage | None]
    deliveries: Sequence[Delivery]
    settlements: Sequence[Decision]
    answers: Sequence[Settled | Lost | Unknown] = ()


@dataclass(frozen=True, slots=True)
class KilledRun:
    """A run that its pool process could not report, the argument of ``app.hooks.killed``.

    * `message`, `delivery`: the message of the run, and its delivery.
    * `started_at`, `ended_at`: UTC epoch seconds.
    * `error_type`, `error`: why the process ended.
    """

    message: TaskMessage
    delivery: Delivery
    started_at: float
    ended_at: float
    error_type: str
    error: str


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's state at one moment, the argument of ``app.hooks.status``.

    * `at`: seconds of `time.monotonic`.
    * `capacity`: how many tasks can run at the same time; `ready`: pool processes that take tasks.
    * `running`: how long each running task has run, in seconds.
    * `held`: deliveries under a lease, waiting ones included.
    * `draining`: the worker no longer receives, and ends when its tasks have ended.
    """

    at: float
    capacity: int
    ready: int
    running: tuple[float, ...]
    held: int
    draining: bool


class Hooks:
    """All hooks of one app. You register with the attributes of the `App`, as decorators::

    @app.around_run
    def timed(context: Context) -> Iterator[None]:
        started = time.monotonic()
        yield
        print(context.task, time.monotonic() - started)

    Further hooks are for telemetry and have no attribute of the app: `receive`, `settle`, `killed`
    and `status`, which is called at least once a second. They run in the worker, not in its pool
    processes. An error in them is logged, and the worker goes on.
    """

    def __init__(self) -> None:
        self.send: Hook[Sending] = Hook("around_send")
        self.run: Hook[Context] = Hook("around_run")
        self.worker: Hook[WorkerInfo] = Hook("around_worker")
        self.process: Hook[WorkerInfo] = Hook("around_process")
        self.event: Listeners[Event] = Listeners("on_event")
        self.receive: Listeners[Receiving] = Listeners("receive")
        self.settle: Hook[Settling] = Hook("settle", harmless=True)
        self.killed: Listeners[KilledRun] = Listeners("killed")
        self.status: Listeners[WorkerStatus] = Listeners("status")
        self.lifespan = Lifespans()


class HookedSink:
    """An event sink that also passes every event to the app's ``on_event`` listeners."""

    def __init__(self, inner: EventSink, listeners: Listeners[Event]) -> None:
        self._inner = inner
        self._listeners = listeners

    @property
    def idle(self) -> bool:
        """True if no file and no listener takes the events."""
        return self._inner.idle and not self._listeners

    def emit(self, event: Event) -> None:
        """Pass one event to the sink and to the listeners."""
        self._inner.emit(event)
        self._listeners.notify(event)

    def flush(self) -> None:
        """Have the sink write its buffered events."""
        self._inner.flush()

    def close(self) -> None:
        """Close the sink; the listeners stay registered."""
        self._inner.close()


class PrivateSink(HookedSink):
    """An event sink that leaves out the texts of errors, which may quote arguments.

    Their types stay. The texts are in the result store, encrypted.
    """

    def emit(self, event: Event) -> None:
        """Pass one event on, without the text of its error."""
        super().emit(event if event.error is None else event._replace(error=None))


def event_sink(settings: Settings, writer: str, hooks: Hooks) -> EventSink:
    """The sink for events of `writer`: the app's directory, if it has one, and its listeners.

    Files that are uploaded are not deleted by age here: the workers that upload them do that.
    """
    inner: EventSink = NullEventSink()
    if settings.events is not None:
        kept = settings.events_container is not None
        retention = None if kept else settings.events_retention_seconds
        inner = FileEventSink(settings.events, writer, retention=retention)
    made = PrivateSink if settings.encrypt else HookedSink
    return made(inner, hooks.event)
