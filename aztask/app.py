"""The App: its tasks, its queues, and the broker and result store that it uses.

Rules
1. Making an App does no I/O. Connections open when they are first needed, once per process; a
   forked child opens its own.
2. Sending is the work of `aztask.sending.send`; the App only passes calls on to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Concatenate, Final, Never, ParamSpec, TypeVar, Unpack, cast, overload

from aztask.adaptive.advisor import LeaseAdvisor
from aztask.apphandlers import AppHandlers
from aztask.applimits import AppLimits
from aztask.appoptions import AppOptions
from aztask.apppayloads import AppPayloads
from aztask.appqueues import AppQueues
from aztask.appschedules import AppSchedules
from aztask.brokers.base import Broker, Position
from aztask.config import Settings, environment_options, read_environment
from aztask.connections import TEST_BROKER, Connections
from aztask.context import Context
from aztask.errors import ConfigurationError
from aztask.events.sink import EventSink
from aztask.hooks import Hooks, event_sink
from aztask.lease.asyncheld import AsyncHeldLease
from aztask.lease.held import HeldLease
from aztask.payloads.memory import MemoryPayloads
from aztask.receiving import held_lease
from aztask.result import AsyncResult
from aztask.results.base import ResultStore
from aztask.retry import RetryPolicy, check_policy
from aztask.sending.asyncsend import AsyncSender
from aztask.sending.graphs import GraphSender
from aztask.sending.send import Sender
from aztask.sending.sent import InlineMode
from aztask.support.checks import module_names
from aztask.support.late import late
from aztask.task import ContextTask, Invocation, Task
from aztask.taskname import refuse_second, task_name
from aztask.taskoptions import (
    SendOptions,
    TaskOptions,
    check_options,
    checked_send_options,
    name_text,
)

P = ParamSpec("P")
R = TypeVar("R")

_PARAMETERS: Final = ("broker", "results", "events", "retry", "include")


class App(AppQueues, AppHandlers, AppLimits, AppPayloads, AppSchedules):
    """An application: its tasks, its queues, its settings and its connections.

    ::

        app = App("shop", broker="servicebus://shop-prod", results="tables://shopstore")

        @app.task(queue="images", time_limit=60)
        def resize(path: str, width: int) -> str:
            ...

        result = resize.delay("a.png", 200)

    Useful attributes:

    * `name`: the first argument; task names begin with it by default.
    * `tasks`: the registered tasks, by name; `limits`: the declared limits, by name.
    * `settings`: the app's `Settings`, checked and in seconds.
    * `retry`: the `RetryPolicy` of tasks that set none.
    * `include`: the names of the modules that define tasks.
    * `schedules`: the `Schedules` of the app, to make, pause or trigger some at run time.
    * `workflows`: ``app.workflows.result(id)`` is the `WorkflowResult` of a workflow's id.
    * `around_send`, `around_run`, `around_worker`, `around_process`, `on_event`: decorators that
      register hooks, see docs/how-to/advanced/hooks.md.
    * `lifespan`: a decorator for a function that opens and closes clients once per process, see
      docs/how-to/basics/async.md.
    """

    def __init__(
        self,
        name: str,
        *unexpected: Never,
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
        check_options(options, AppOptions, f"App {name!r}", _PARAMETERS, unexpected)
        self.name = name_text(name, "App: the name")
        self.retry = check_policy(retry, f"App {name!r}: retry")
        self.include = module_names("include", include)
        self.settings = Settings.from_options(
            {**environment_options(), **options, **({"events": events} if events else {})}
        )
        self._handlers, self.limits = {}, {}
        super().__init__(self.settings, given=options.keys())
        for_tests = read_environment(TEST_BROKER)
        self._connections = Connections(
            for_tests or broker or read_environment("AZTASK_BROKER"),
            for_tests or results or read_environment("AZTASK_RESULTS"),
            poll_ceiling=self.settings.poll_ceiling_seconds,
        )
        self.payloads = self._new_payloads(testing=for_tests is not None)
        self.codec = self._new_codec(self.payloads)
        self.leases = LeaseAdvisor(self.settings, self._connections.broker_text)
        self.hooks = Hooks()
        self.around_send = self.hooks.send
        self.around_run = self.hooks.run
        self.around_worker = self.hooks.worker
        self.around_process = self.hooks.process
        self.on_event = self.hooks.event
        self.lifespan = self.hooks.lifespan
        self._on_sent: Callable[..., None] | None = None
        self._sender = Sender(
            self._connections, self.codec, self.leases, self.open_events, self.hooks, self.payloads
        )
        self._async_sender = AsyncSender(self._sender)
        self.workflows = self._new_graph_sender()

    def _new_graph_sender(self) -> GraphSender:
        return GraphSender(
            self._connections,
            self.codec,
            self.leases,
            self.hooks,
            queue_for=self.queue_for,
            has_sessions=self.has_sessions,
            enqueued=self._sender.enqueued,
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
    ) -> ContextTask[P, R]: ...

    @overload
    def task_with_context(
        self, /, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[Concatenate[Context, P], R]], ContextTask[P, R]]: ...

    def task_with_context(self, function: Any = None, /, **options: Any) -> Any:
        """Register a function that takes the `Context` of its run as its first argument.

        ::

            @app.task_with_context(queue="slow")
            def crawl(context: Context, url: str) -> int:
                ...

            crawl.delay("https://example.com")      # you do not pass the context
            crawl("https://example.com")            # nor here, see `ContextTask`

        Options and errors are those of `task`.
        """
        if function is not None:
            return self._register(function, cast("TaskOptions", options), with_context=True)
        return lambda inner: self._register(inner, cast("TaskOptions", options), with_context=True)

    def _register(
        self, function: Callable[..., Any], options: TaskOptions, *, with_context: bool
    ) -> Task[..., Any]:
        name = task_name(self.name, function, options.get("name"))
        if name in self.tasks:
            refuse_second(self.name, name, self.tasks[name].function, function)
        asked = options.get("retry_strategy")
        options = {"retry": self.retry, "retry_strategy": self.settings.retry_strategy, **options}
        kind = ContextTask if with_context else Task
        task: Task[..., Any] = kind(self, function, name, options, with_context=with_context)
        task.strategy_asked = asked
        self.tasks[name] = task
        return task

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

    @property
    def missing_file(self) -> str | None:
        """The queue file of ``local://`` if it does not exist: the first use creates it."""
        return self._connections.missing_file()

    def close(self) -> None:
        """Close connections and files. Using the app again opens them again."""
        self._async_sender.close()
        self._sender.close()
        self._connections.close()
        self.leases.close()
        if self.payloads is not None:
            self.payloads.close()

    def open_events(self, writer: str) -> EventSink:
        """Open the sink for events of `writer` (a worker's name). The caller closes it."""
        return event_sink(self.settings, writer, self.hooks)

    def receive(
        self,
        queue: str,
        *,
        wait: float | timedelta = 10.0,
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
        * `wait`: how long to wait for a message, in seconds or as a ``timedelta``; 10 seconds by
          default. Entering the block raises LookupError if none came.
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
        wait: float | timedelta = 10.0,
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
        options = checked_send_options(options, "send")
        call = Invocation.of(args, kwargs)
        return self._send(name, self.tasks.get(name), (call,), options)[0]

    def send_call(
        self, task: Task[..., Any], calls: Sequence[Invocation], options: SendOptions
    ) -> list[AsyncResult[Any]]:
        """Send all `calls` of `task` as one batch. `Task.delay` and `Task.map` call this."""
        return self._send(task.name, task, calls, options)

    async def asend_call(
        self, task: Task[..., Any], calls: Sequence[Invocation], options: SendOptions
    ) -> list[AsyncResult[Any]]:
        """`send_call` for coroutines: it never blocks the event loop."""
        return await self._asend(task.name, task, calls, options)

    async def asend(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[Any]:
        """`send` for coroutines: it never blocks the event loop, like `Task.adelay`."""
        options = checked_send_options(options, "asend")
        call = Invocation.of(args, kwargs)
        return (await self._asend(name, self.tasks.get(name), (call,), options))[0]

    def result(self, task_id: str) -> AsyncResult[Any]:
        """The `AsyncResult` of a task id, for example one that you stored. Asks no server."""
        return AsyncResult(task_id, self._connections.results, self.codec.decode_value)

    def redirect(
        self, broker: Broker, results: ResultStore, on_sent: Callable[..., None] | None = None
    ) -> Callable[[], None]:
        """Use these instead, until the returned function is called. `aztask.testing` does so.

        * `on_sent`: called after each send with the task's name, the queue, the calls, the task ids
          and the options.

        Raises ConfigurationError if an inline block is open.
        """
        if self._on_sent is not None:
            raise ConfigurationError("the app is inline already; leave the outer block first")
        restore = [self._connections.replace(broker, results)]
        if self.payloads is not None:
            restore.append(self.payloads.replace(MemoryPayloads()))
        self._on_sent = on_sent

        def back() -> None:
            self._on_sent = None
            for each in restore:
                each()

        return back

    def inline(self, *, run: bool = True) -> InlineMode:
        """Run tasks here, at the moment they are sent: for tests, as a ``with`` block.

        ::

            with app.inline() as inline:
                assert resize.delay("a.png", 200).get() == "small"
                inline.assert_sent(notify, "a.png")

        Broker and result store are replaced by new ones in memory. Retries, rejections, dead
        letters and sessions work as on a worker, and retries do not wait. Delayed tasks run when
        you call ``inline.advance(seconds)``. See `aztask.testing.Inline`.

        * `run`: False only keeps what is sent; ``inline.run()`` then runs it.
        """
        inline: InlineMode = late("aztask.testing.inline", "Inline")(self, run=run)
        return inline

    def _send(
        self,
        name: str,
        task: Task[..., Any] | None,
        calls: Sequence[Invocation],
        options: SendOptions,
    ) -> list[AsyncResult[Any]]:
        queue = self.queue_for(task, options)
        sessions = self.has_sessions(queue)
        ids = self._sender.send(name, task, queue, calls, options, sessions)
        if self._on_sent is not None:
            self._on_sent(name, queue, calls, ids, options)
        return self._results_of(ids)

    async def _asend(
        self,
        name: str,
        task: Task[..., Any] | None,
        calls: Sequence[Invocation],
        options: SendOptions,
    ) -> list[AsyncResult[Any]]:
        if self._on_sent is not None:  # inline: the tasks run where they are sent
            return await asyncio.to_thread(self._send, name, task, calls, options)
        queue = self.queue_for(task, options)
        sessions = self.has_sessions(queue)
        steps = self._sender.steps(name, task, queue, calls, options, sessions)
        return self._results_of(await self._async_sender.send(queue, steps))

    def _results_of(self, ids: Sequence[str]) -> list[AsyncResult[Any]]:
        results, decode = self._connections.results, self.codec.decode_value
        return [AsyncResult(task_id, results, decode) for task_id in ids]
