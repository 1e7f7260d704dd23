"""The App: tasks, queues and where they live.

Rules
1. Making an App does no I/O: connections open when they are first needed, once per process. A
   forked child opens its own.
2. A known task id is sent once: sending it again returns the existing result, unless forced.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar, Unpack, cast, overload

from aztask.asyncresult import AsyncResult
from aztask.brokers.base import Broker, QueueOptions
from aztask.codec import Codec
from aztask.config import QueueSettings, Secret, Settings, read_environment
from aztask.connections import Connections
from aztask.context import Context, current_context
from aztask.display import short_repr
from aztask.errors import DuplicateTask, EncodeError
from aztask.events import Event, EventSink, FileEventSink, NullEventSink
from aztask.frozen import build
from aztask.heldlease import HeldLease
from aztask.message import MESSAGE_DEFAULTS, TaskMessage
from aztask.publisher import Publisher
from aztask.results.base import ResultStore, RunKey, RunRecord, State
from aztask.retry import RetryPolicy
from aztask.task import Call, SendOptions, Task, TaskOptions, check_options

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_BROKER = "local://"
BATCH = 500
"""Messages that `map` sends at once: one transaction, and little memory for millions of calls."""


class AppOptions(TypedDict, total=False):
    """What ``App(...)`` takes beside its name and addresses; see `aztask.config.Settings`."""

    lease: float
    max_lease: float
    renew_at: float
    max_deliveries: int
    unknown_task_grace: float
    result_retention: float
    serializer: str
    accept: Sequence[str]
    signing_keys: Sequence[str | Secret]
    poll_ceiling: float
    default_queue: str


class QueueOptionNames(TypedDict, total=False):
    """What ``app.queue(name, ...)`` takes; see `aztask.config.QueueSettings`."""

    lease: float
    max_lease: float
    max_deliveries: int
    duplicate_window: float
    time_to_live: float


class App:
    """Holds tasks and settings, and sends invocations."""

    def __init__(
        self,
        name: str,
        *,
        broker: str | Broker | None = None,
        results: str | ResultStore | None = None,
        events: str | None = None,
        retry: RetryPolicy = RetryPolicy(),
        **options: Unpack[AppOptions],
    ) -> None:
        """broker, results: URLs or connection strings (docs/reference/urls.md), or objects.

        Without them AZTASK_BROKER and AZTASK_RESULTS count, then ``local://`` and no results.
        events: a directory for lifecycle events (AZTASK_EVENTS). Raises ConfigurationError.
        """
        check_options(options, AppOptions, f"App {name!r}")
        self.name = name
        self.retry = retry
        self.settings = Settings.from_options(
            {**options, "events": events or read_environment("AZTASK_EVENTS")}
        )
        self._lease_given = "lease" in options
        self.tasks: dict[str, Task[..., Any]] = {}
        self._queues: dict[str, QueueSettings] = {}
        self.codec = Codec(
            serializer=self.settings.serializer,
            accept=self.settings.accept,
            signing_keys=[key.reveal().encode() for key in self.settings.signing_keys],
        )
        self._connections = Connections(
            broker or read_environment("AZTASK_BROKER") or DEFAULT_BROKER,
            results or read_environment("AZTASK_RESULTS"),
            poll_ceiling=self.settings.poll_ceiling_seconds,
        )
        self._lock = threading.Lock()
        self._publisher: tuple[Broker, Publisher] | None = None
        self._sink: tuple[int, EventSink] | None = None
        self._origin = f"{os.getpid()}@{socket.gethostname()}"

    def __repr__(self) -> str:
        return f"<App {self.name}: {len(self.tasks)} tasks>"

    # -- tasks -------------------------------------------------------------------------------

    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...

    @overload
    def task(self, /, **options: Unpack[TaskOptions]) -> Callable[[Callable[P, R]], Task[P, R]]: ...

    def task(self, function: Any = None, /, **options: Any) -> Any:
        """Register a function as a task: ``@app.task`` or ``@app.task(queue=..., ...)``.

        Raises DuplicateTask, ConfigurationError.
        """
        if function is not None:
            return self._register(function, cast("TaskOptions", options), with_context=False)
        return lambda inner: self._register(inner, cast("TaskOptions", options), with_context=False)

    @overload
    def task_with_context(
        self, function: Callable[Concatenate[Context, P], R], /
    ) -> Task[P, R]: ...

    @overload
    def task_with_context(
        self, /, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[Concatenate[Context, P], R]], Task[P, R]]: ...

    def task_with_context(self, function: Any = None, /, **options: Any) -> Any:
        """Like `task`, for a function whose first argument is the `Context` of its run."""
        if function is not None:
            return self._register(function, cast("TaskOptions", options), with_context=True)
        return lambda inner: self._register(inner, cast("TaskOptions", options), with_context=True)

    def _register(
        self, function: Callable[..., Any], options: TaskOptions, *, with_context: bool
    ) -> Task[..., Any]:
        name = options.get("name") or f"{self.name}.{function.__name__}"
        if name in self.tasks:
            raise DuplicateTask(
                f"two functions are registered as {name!r}: {function.__module__}."
                f"{function.__qualname__} and an earlier one; give one of them name=..."
            )
        task: Task[..., Any] = Task(
            self, function, name, options, retry=self.retry, with_context=with_context
        )
        self.tasks[name] = task
        return task

    # -- queues ------------------------------------------------------------------------------

    def queue(self, name: str, **options: Unpack[QueueOptionNames]) -> None:
        """Say what holds for one queue. Nothing is created: see ``aztask queues create``."""
        check_options(options, QueueOptionNames, f"queue {name!r}")
        settings = QueueSettings.from_options(name, options)
        settings.over(self.settings)
        self._queues[name] = settings

    def queue_settings(self, name: str) -> Settings:
        """The app's settings, with those of the queue in their place."""
        own = self._queues.get(name)
        return own.over(self.settings) if own else self.settings

    def lease_seconds(self, name: str) -> float:
        """The lease to ask for: what the queue or the app says, else what suits the service."""
        settings = self.queue_settings(name)
        own = self._queues.get(name)
        if self._lease_given or (own is not None and own.lease_seconds is not None):
            return settings.lease_seconds
        return min(self.broker.capabilities.default_lease_seconds, settings.max_lease_seconds / 2)

    def queue_options(self, name: str) -> QueueOptions:
        """What to ask of the service when the queue is created."""
        own = self._queues.get(name) or QueueSettings(name)
        return QueueOptions(
            lease=own.lease_seconds,
            duplicate_window=own.duplicate_window_seconds,
            time_to_live=own.time_to_live_seconds,
            sessions=own.sessions,
        )

    def queue_names(self) -> list[str]:
        """The queues that the app's own code speaks of."""
        names = {task.queue for task in self.tasks.values() if task.queue}
        return sorted(names | set(self._queues) | {self.settings.default_queue})

    # -- connections -------------------------------------------------------------------------

    @property
    def broker(self) -> Broker:
        """The broker, opened now if need be. Raises ConfigurationError, BrokerUnavailable."""
        return self._connections.broker()

    @property
    def results(self) -> ResultStore | None:
        """The result store, None when none is configured."""
        return self._connections.results()

    @property
    def remote(self) -> bool:
        """Whether the broker or the result store is across a network."""
        results = self.results
        return self.broker.capabilities.remote or (results is not None and results.remote)

    @property
    def address(self) -> str:
        """The broker as a person may see it, secrets masked."""
        return self._connections.shown()

    def close(self) -> None:
        """Let go of connections and files; they open again when needed."""
        with self._lock:
            if self._sink is not None and self._sink[0] == os.getpid():
                self._sink[1].close()
            self._sink = self._publisher = None
        self._connections.close()

    def open_events(self, writer: str) -> EventSink:
        """Where `writer` writes lifecycle events; the caller closes it."""
        if self.settings.events is None:
            return NullEventSink()
        return FileEventSink(self.settings.events, writer)

    def receive(self, queue: str, *, wait: float = 10.0) -> HeldLease:
        """``with app.receive("orders") as lease``: one message under a renewed lease, no task.

        wait: seconds to wait for a message; LookupError when none came.
        """
        settings = self.queue_settings(queue)
        return HeldLease(
            self.broker,
            queue,
            lease=self.lease_seconds(queue),
            max_lease=settings.max_lease_seconds,
            renew_at=settings.renew_at,
            wait=wait,
        )

    # -- sending -----------------------------------------------------------------------------

    def send(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[Any]:
        """Send an invocation of the task called `name`, which need not be known here."""
        check_options(options, SendOptions, "send")
        if not isinstance(args, list | tuple):
            raise EncodeError(f"args must be a list or a tuple, not {type(args).__name__}")
        call = Call(tuple(args), kwargs if kwargs is not None else {})
        return self._send(name, self.tasks.get(name), (call,), options)[0]

    def send_call(
        self, task: Task[..., Any], calls: Sequence[Call], options: SendOptions
    ) -> list[AsyncResult[Any]]:
        """What `Task.delay` and `Task.map` call."""
        return self._send(task.name, task, calls, options)

    def result(self, task_id: str) -> AsyncResult[Any]:
        """A handle for a task id."""
        return AsyncResult(task_id, self._connections.results, self.codec.decode_value)

    def _send(
        self,
        name: str,
        task: Task[..., Any] | None,
        calls: Sequence[Call],
        options: SendOptions,
    ) -> list[AsyncResult[Any]]:
        queue = options.get("queue") or (task.queue if task else None)
        queue = queue or self.settings.default_queue
        own_id = options.get("task_id")
        generation = self._generation(own_id, force=options.get("force", False)) if own_id else 0
        if generation is None:
            return [self.result(str(own_id))]
        expires = options.get("expires") or (task.expires if task else None)
        expires_at = None if expires is None else time.time() + expires
        delay = options.get("delay", 0.0)
        parent = current_context()
        ids: list[str] = []
        for first in range(0, len(calls), BATCH):
            messages = [
                self._message(name, queue, call, own_id or new_id(), generation, expires_at, parent)
                for call in calls[first : first + BATCH]
            ]
            self._publish(queue, messages, delay)
            ids += [message.id for message in messages]
            if own_id:
                self._expect(messages)
            if self.settings.events is not None:
                self._tell_enqueued(messages)
        return list(map(self.result, ids))

    def _publish(self, queue: str, messages: Sequence[TaskMessage], delay: float) -> None:
        publisher = self._open_publisher()
        if len(messages) == 1:
            publisher.publish(queue, messages[0], delay=delay)
        else:
            publisher.publish_many(queue, messages, delay=delay)

    def _generation(self, task_id: str, *, force: bool) -> int | None:
        """The generation to send under; None when the task id is known and not forced.

        Nothing is reserved: two senders at the same time may both send, under the same message id.
        Then one run is recorded and the other copy is dropped by the worker.
        """
        results = self.results
        known = results.get(task_id) if results else None
        if known is None:
            return 0
        return known.key.generation + 1 if force else None

    def _expect(self, messages: Sequence[TaskMessage]) -> None:
        """Note the sent task ids, so that sending them again finds them.

        If the process dies before this, a second send under the id is stored as well; the worker
        then drops one of the two.
        """
        if self.results is not None:
            self.results.expect(
                RunRecord(RunKey(*message.key), message.task, message.queue, State.PENDING)
                for message in messages
            )

    def _message(
        self,
        name: str,
        queue: str,
        call: Call,
        task_id: str,
        generation: int,
        expires_at: float | None,
        parent: Context | None,
    ) -> TaskMessage:
        body, content_type, content_encoding = self.codec.encode_arguments(call.args, call.kwargs)
        values = {
            **MESSAGE_DEFAULTS,
            "id": task_id,
            "task": name,
            "queue": queue,
            "body": body,
            "content_type": content_type,
            "content_encoding": content_encoding,
            "root_id": (parent.message.root_id or parent.task_id) if parent else task_id,
            "parent_id": parent.task_id if parent else None,
            "expires": expires_at,
            "argsrepr": short_repr(call.args, len(body)),
            "kwargsrepr": short_repr(call.kwargs, len(body)) if call.kwargs else "{}",
            "origin": self._origin,
            "generation": generation,
        }
        return build(TaskMessage, values)

    def _open_publisher(self) -> Publisher:
        """The publisher of the current broker (a forked child has another)."""
        broker = self.broker
        known = self._publisher
        if known is None or known[0] is not broker:
            known = self._publisher = (broker, Publisher(broker, self.codec))
        return known[1]

    def _tell_enqueued(self, messages: Sequence[TaskMessage]) -> None:
        with self._lock:
            if self._sink is None or self._sink[0] != os.getpid():
                writer = f"sender-{socket.gethostname()}-{os.getpid()}"
                self._sink = (os.getpid(), self.open_events(writer))
            sink = self._sink[1]
            now = time.time()
            for message in messages:
                sink.emit(Event("enqueued", message.id, message.task, message.queue, ts=now))
            sink.flush()


def new_id() -> str:
    """A random UUID (RFC 9562, version 4) as text; several times faster than `uuid.uuid4`."""
    digits = os.urandom(16).hex()
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
