"""The App: tasks, queues and where they live.

Rules
1. Making an App does no I/O: connections open when they are first needed, once per process. A
   forked child opens its own.
2. What is sent, `aztask.sending.send` sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack, cast, overload

from aztask.adaptive.advisor import LeaseAdvisor
from aztask.appoptions import AppOptions, QueueOptionNames
from aztask.brokers.base import ANY_SESSION, Broker, QueueOptions
from aztask.config import QueueSettings, Settings, environment_options, read_environment
from aztask.connections import Connections
from aztask.context import Context
from aztask.errors import DuplicateTask, EncodeError
from aztask.events.sink import EventSink, FileEventSink, NullEventSink
from aztask.hooks import HookedSink, Hooks
from aztask.lease.held import HeldLease
from aztask.message.codec import Codec
from aztask.result import AsyncResult
from aztask.results.base import ResultStore
from aztask.retry import RetryPolicy
from aztask.sending.queueplan import QueuePlan, plan_of
from aztask.sending.send import Sender
from aztask.task import Invocation, SendOptions, Task, TaskOptions, check_options

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_BROKER = "local://"


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
            {**environment_options(), **options, **({"events": events} if events else {})}
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
        self.leases = LeaseAdvisor(self.settings, self._connections.broker_text)
        self.hooks = Hooks()
        self.around_send = self.hooks.send
        self.around_run = self.hooks.run
        self.around_worker = self.hooks.worker
        self.around_process = self.hooks.process
        self.on_event = self.hooks.event
        self._sender = Sender(
            self._connections, self.codec, self.leases, self.open_events, self.hooks
        )

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
        asked = options.get("retry_strategy")
        options = {"retry": self.retry, "retry_strategy": self.settings.retry_strategy, **options}
        task: Task[..., Any] = Task(self, function, name, options, with_context=with_context)
        task.strategy_asked = asked
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
        if self._lease_asked(name):
            return settings.lease_seconds
        return min(self.broker.capabilities.default_lease_seconds, settings.max_lease_seconds / 2)

    def lease_now(self, name: str) -> float:
        """The lease to ask for now: `lease_seconds`, or what was learned (`lease_advice`)."""
        if not self.leases.enabled:
            return self.lease_seconds(name)
        settings, capabilities = self.queue_settings(name), self.broker.capabilities
        return self.leases.lease_now(name, self.lease_seconds(name), settings, capabilities)

    def _lease_asked(self, name: str) -> bool:
        own = self._queues.get(name)
        return self._lease_given or (own is not None and own.lease_seconds is not None)

    def queue_plan(self, name: str) -> QueuePlan:
        """What the app needs of a queue."""
        return plan_of(
            name,
            self._queues.get(name),
            self.queue_settings(name),
            self.tasks.values(),
            lease=self.lease_seconds(name),
            lease_asked=self._lease_asked(name),
        )

    def queue_options(self, name: str) -> QueueOptions:
        """What to ask of the service when the queue is created. Raises ConfigurationError."""
        return self.queue_plan(name).options(self.broker.capabilities)

    def has_sessions(self, name: str) -> bool:
        """Whether the app knows the queue as one with sessions."""
        own = self._queues.get(name)
        return bool(own and own.sessions)

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
        self._sender.close()
        self._connections.close()
        self.leases.close()

    def open_events(self, writer: str) -> EventSink:
        """Where `writer` writes lifecycle events; the caller closes it."""
        directory = self.settings.events
        inner = NullEventSink() if directory is None else FileEventSink(directory, writer)
        return HookedSink(inner, self.hooks.event)

    def receive(self, queue: str, *, wait: float = 10.0, session: str | None = None) -> HeldLease:
        """``with app.receive("orders") as lease``: one message under a renewed lease, no task.

        wait: seconds to wait for a message; LookupError when none came. session: of which session,
        where the queue has them; of any without it.
        """
        settings = self.queue_settings(queue)
        return HeldLease(
            self.broker,
            queue,
            lease=self.lease_now(queue),
            max_lease=settings.max_lease_seconds,
            renew_at=settings.renew_at,
            wait=wait,
            session=session or (ANY_SESSION if self.has_sessions(queue) else None),
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
        call = Invocation(tuple(args), kwargs if kwargs is not None else {})
        return self._send(name, self.tasks.get(name), (call,), options)[0]

    def send_call(
        self, task: Task[..., Any], calls: Sequence[Invocation], options: SendOptions
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
        calls: Sequence[Invocation],
        options: SendOptions,
    ) -> list[AsyncResult[Any]]:
        queue = options.get("queue") or (task.queue if task else None)
        queue = queue or self.settings.default_queue
        sessions = self.has_sessions(queue)
        return list(
            map(self.result, self._sender.send(name, task, queue, calls, options, sessions))
        )
