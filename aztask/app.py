"""The App: its tasks, its queues, and the broker and result store that it uses.

Rules
1. Making an App does no I/O. Connections open when they are first needed, once per process; a
   forked child opens its own.
2. Sending is the work of `aztask.sending.send`; the App only passes calls on to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack, cast, overload

from aztask.adaptive.advisor import LeaseAdvisor
from aztask.appoptions import AppOptions, QueueOptionNames
from aztask.brokers.base import Broker, Position, QueueOptions
from aztask.config import QueueSettings, Settings, environment_options, read_environment
from aztask.connections import Connections
from aztask.context import Context
from aztask.errors import DuplicateTask, EncodeError
from aztask.events.sink import EventSink
from aztask.hooks import Hooks, event_sink
from aztask.lease.asyncheld import AsyncHeldLease
from aztask.lease.held import HeldLease
from aztask.receiving import held_lease
from aztask.result import AsyncResult
from aztask.results.base import ResultStore
from aztask.retry import RetryPolicy
from aztask.sending.appcodec import codec_of
from aztask.sending.queueplan import QueuePlan, plan_of
from aztask.sending.send import Sender
from aztask.support.checks import module_names
from aztask.task import Invocation, SendOptions, Task, TaskOptions, check_options

P = ParamSpec("P")
R = TypeVar("R")


class App:
    """An application: its tasks, its queues, its settings and its connections.

    ::

        app = App("shop", broker="servicebus://shop-prod", results="tables://shopstore")

        @app.task(queue="images", time_limit=60)
        def resize(path: str, width: int) -> str:
            ...

        result = resize.delay("a.png", 200)

    Useful attributes:

    * `name`: the first argument; task names begin with it by default.
    * `tasks`: the registered tasks, by name.
    * `settings`: the app's `Settings`, checked and in seconds.
    * `retry`: the `RetryPolicy` of tasks that set none.
    * `include`: the names of the modules that define tasks.
    * `around_send`, `around_run`, `around_worker`, `around_process`, `on_event`: decorators that
      register hooks, see docs/how-to/advanced/hooks.md.
    """

    def __init__(
        self,
        name: str,
        *,
        broker: str | Broker | None = None,
        results: str | ResultStore | None = None,
        events: str | None = None,
        retry: RetryPolicy = RetryPolicy(),
        include: Sequence[str] = (),
        **options: Unpack[AppOptions],
    ) -> None:
        """Make an app. Nothing connects yet.

        * `name`: a short text, such as "shop".
        * `broker`: a URL, a connection string (docs/reference/urls.md) or a `Broker`. Default:
          AZTASK_BROKER. Without either, the first send and a starting worker raise
          ConfigurationError.
        * `results`: a URL, a connection string or a `ResultStore`. Default: AZTASK_RESULTS, else no
          results are kept.
        * `events`: a directory for lifecycle events. Default: AZTASK_EVENTS, else none are written.
        * `retry`: the policy of tasks that set none of their own.
        * `include`: modules that define tasks, such as ``["shop.images"]``. Workers and commands
          import them after the app's own module.
        * `options`: any setting of `Settings`; a duration leaves out ``_seconds`` and takes seconds
          or a ``timedelta``, for example ``lease=30``.

        Raises ConfigurationError if a setting, a URL or a connection string is wrong.
        """
        check_options(options, AppOptions, f"App {name!r}")
        self.name = name
        self.retry = retry
        self.include = module_names("include", include)
        self.settings = Settings.from_options(
            {**environment_options(), **options, **({"events": events} if events else {})}
        )
        self._lease_given = "lease" in options
        self.tasks: dict[str, Task[..., Any]] = {}
        self._queues: dict[str, QueueSettings] = {}
        self.codec = codec_of(
            self.settings, lambda queue: self.queue_settings(queue).signature_max_age_seconds
        )
        self._connections = Connections(
            broker or read_environment("AZTASK_BROKER"),
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

        `TaskOptions` lists the options. The decorated name becomes a `Task`; calling it still calls
        the function. Raises DuplicateTask if the name is taken, ConfigurationError if an option is
        wrong.
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
        """Register a function that takes the `Context` of its run as its first argument.

        ::

            @app.task_with_context(queue="slow")
            def crawl(context: Context, url: str) -> int:
                ...

            crawl.delay("https://example.com")      # you do not pass the context

        Options and errors are those of `task`.
        """
        if function is not None:
            return self._register(function, cast("TaskOptions", options), with_context=True)
        return lambda inner: self._register(inner, cast("TaskOptions", options), with_context=True)

    def _register(
        self, function: Callable[..., Any], options: TaskOptions, *, with_context: bool
    ) -> Task[..., Any]:
        name = options.get("name") or f"{self.name}.{function.__name__}"
        if name in self.tasks:
            earlier = self.tasks[name].function
            proposal = f"{self.name}.{function.__module__}.{function.__name__}"
            raise DuplicateTask(
                f"two functions are registered as {name!r}: {earlier.__module__}."
                f"{earlier.__qualname__} and {function.__module__}.{function.__qualname__}; give "
                f"one of them a name, for example @app.task(name={proposal!r})"
            )
        asked = options.get("retry_strategy")
        options = {"retry": self.retry, "retry_strategy": self.settings.retry_strategy, **options}
        task: Task[..., Any] = Task(self, function, name, options, with_context=with_context)
        task.strategy_asked = asked
        self.tasks[name] = task
        return task

    # -- queues ------------------------------------------------------------------------------

    def queue(self, name: str, **options: Unpack[QueueOptionNames]) -> None:
        """Set options of one queue, for example ``app.queue("slow", lease=300)``.

        `QueueSettings` describes the options. This creates nothing: run ``aztask queues create``.
        Raises ConfigurationError if an option is wrong or contradicts the app's settings.
        """
        check_options(options, QueueOptionNames, f"queue {name!r}")
        settings = QueueSettings.from_options(name, options)
        settings.over(self.settings)
        self._queues[name] = settings

    def queue_settings(self, name: str) -> Settings:
        """The settings that apply to the queue: its own where it has any, else the app's."""
        own = self._queues.get(name)
        return own.over(self.settings) if own else self.settings

    def lease_seconds(self, name: str) -> float:
        """The lease duration to request for the queue, in seconds.

        It is the queue's setting, else the app's, else the broker's default.
        """
        settings = self.queue_settings(name)
        if self._lease_asked(name):
            return settings.lease_seconds
        return min(self.broker.capabilities.default_lease_seconds, settings.max_lease_seconds / 2)

    def lease_now(self, name: str) -> float:
        """The lease duration to request now, in seconds.

        With ``lease_advice`` it is the learned one, otherwise `lease_seconds`.
        """
        if not self.leases.enabled:
            return self.lease_seconds(name)
        settings, capabilities = self.queue_settings(name), self.broker.capabilities
        return self.leases.lease_now(name, self.lease_seconds(name), settings, capabilities)

    def _lease_asked(self, name: str) -> bool:
        own = self._queues.get(name)
        return self._lease_given or (own is not None and own.lease_seconds is not None)

    def queue_plan(self, name: str) -> QueuePlan:
        """What the app requires of a queue: its lease, sessions, duplicate detection and so on."""
        return plan_of(
            name,
            self._queues.get(name),
            self.queue_settings(name),
            self.tasks.values(),
            lease=self.lease_seconds(name),
            lease_asked=self._lease_asked(name),
        )

    def queue_options(self, name: str) -> QueueOptions:
        """The options to create the queue with.

        Raises ConfigurationError if the service lacks one of them.
        """
        return self.queue_plan(name).options(self.broker.capabilities)

    def has_sessions(self, name: str) -> bool:
        """True if the app configured the queue with ``sessions=True``."""
        own = self._queues.get(name)
        return bool(own and own.sessions)

    def queue_names(self) -> list[str]:
        """The queues that the app's tasks and settings name, sorted, with the default queue."""
        names = {task.queue for task in self.tasks.values() if task.queue}
        return sorted(names | set(self._queues) | {self.settings.default_queue})

    # -- connections -------------------------------------------------------------------------

    @property
    def broker(self) -> Broker:
        """The broker, connected at the first use. Raises ConfigurationError, BrokerUnavailable."""
        return self._connections.broker()

    @property
    def results(self) -> ResultStore | None:
        """The result store, opened at the first use; None if none is configured."""
        return self._connections.results()

    @property
    def remote(self) -> bool:
        """True if the broker or the result store is reached over a network."""
        results = self.results
        return self.broker.capabilities.remote or (results is not None and results.remote)

    @property
    def address(self) -> str:
        """The broker's address for display, with its secrets masked."""
        return self._connections.shown()

    def close(self) -> None:
        """Close connections and files. Using the app again opens them again."""
        self._sender.close()
        self._connections.close()
        self.leases.close()

    def open_events(self, writer: str) -> EventSink:
        """Open the sink for events of `writer` (a worker's name). The caller closes it."""
        return event_sink(self.settings, writer, self.hooks)

    def receive(
        self,
        queue: str,
        *,
        wait: float = 10.0,
        lease: float | timedelta | None = None,
        session: str | None = None,
        deferred: Position | None = None,
    ) -> HeldLease:
        """Receive one message under an auto-renewed lease, without a task and without a worker.

        ::

            with app.receive("orders", wait=30) as lease:
                handle(lease.body)
                lease.complete()

        * `queue`: the queue's name.
        * `wait`: seconds to wait for a message, 10 by default. Entering the block raises
          LookupError if none came.
        * `lease`: how long a lease lasts until it is renewed, in seconds or as a ``timedelta``. By
          default the queue's. Service Bus accepts only the queue's lock duration.
        * `session`: the session to receive from, on a queue with sessions. By default the next free
          one.
        * `deferred`: the position that `HeldLease.defer` returned: receives that message, at once.

        See `HeldLease` for what you can do in the block. Entering it raises ConfigurationError for
        a lease that the settings or the queue do not allow, CapabilityError, BrokerUnavailable and
        QueueNotFound.
        """
        return held_lease(self, queue, wait, lease, session, deferred)

    def areceive(
        self,
        queue: str,
        *,
        wait: float = 10.0,
        lease: float | timedelta | None = None,
        session: str | None = None,
        deferred: Position | None = None,
    ) -> AsyncHeldLease:
        """`receive` for coroutines: nothing blocks the event loop or stops the renewals.

        ::

            async with app.areceive("orders", wait=30) as lease:
                await handle(lease.body)
                await lease.complete()

        Options and errors are those of `receive`; see `AsyncHeldLease`.
        """
        return AsyncHeldLease(
            lambda stop: held_lease(self, queue, wait, lease, session, deferred, stop)
        )

    # -- sending -----------------------------------------------------------------------------

    def send(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[Any]:
        """Send an invocation of a task by its name; the task may be registered in another program.

        ::

            app.send("shop.resize", ["a.png", 200], {"quality": 80}, delay=60)

        * `name`: the task's registered name.
        * `args`, `kwargs`: its arguments: a list or a tuple, and a dict.
        * `options`: see `SendOptions`.

        Raises what `Task.delay` raises, but only a task that is registered here has its arguments
        checked.
        """
        check_options(options, SendOptions, "send")
        if not isinstance(args, list | tuple):
            raise EncodeError(f"args must be a list or a tuple, not {type(args).__name__}")
        call = Invocation(tuple(args), kwargs if kwargs is not None else {})
        return self._send(name, self.tasks.get(name), (call,), options)[0]

    def send_call(
        self, task: Task[..., Any], calls: Sequence[Invocation], options: SendOptions
    ) -> list[AsyncResult[Any]]:
        """Send all `calls` of `task` as one batch. `Task.delay` and `Task.map` call this."""
        return self._send(task.name, task, calls, options)

    def result(self, task_id: str) -> AsyncResult[Any]:
        """The `AsyncResult` of a task id, for example one that you stored. Asks no server."""
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
