"""The App: its tasks, its queues, and the broker and result store that it uses.

Rules
1. Making an App does no I/O. Connections open when they are first needed, once per process; a
   forked child opens its own.
2. The App only names what users call. The work is done by the objects that it owns: `queues`,
   `limits`, `schedules`, `workflows`, `leases`, `payloads`, its tasks and its sends.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from datetime import datetime, timedelta
from typing import Any, Concatenate, Final, Never, ParamSpec, TypeVar, Unpack, overload

from aztask.address.addresses import LocalAddress
from aztask.address.owner import Owner
from aztask.app.options import AppOptions, QueueOptionNames
from aztask.app.sending import DeclaredLimits, DeclaredQueues, Sends
from aztask.app.tasks import TaskRegistry, declared_step
from aztask.app.workflows import WorkflowStarter
from aztask.config import (
    Settings,
    environment_options,
    read_environment,
)
from aztask.context import Context
from aztask.errors import AztaskError, ConfigurationError
from aztask.handler import Handler
from aztask.hooks import Hooks, event_sink
from aztask.leaseadvice.advisor import LeaseAdvisor
from aztask.limits.declaration import Limit
from aztask.message.codec import Codec
from aztask.message.encryption import Cipher, WrappedKey
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.message.payload import StoredValue
from aztask.message.rowsignatures import RowSignatures
from aztask.message.signatures import SignatureRules
from aztask.queues.base import Broker, Capabilities, Position, QueueOptions
from aztask.queues.lease.asyncheld import AsyncHeldLease
from aztask.queues.lease.held import HeldLease
from aztask.result import AsyncResult
from aztask.retry import RetryPolicy, check_policy
from aztask.schedules.schedules import Plan, ScheduleOptions, Schedules
from aztask.sending.queueplan import QueuePlan
from aztask.sending.send import Sender
from aztask.sending.sent import InlineMode
from aztask.stores.connections import TEST_BROKER, Connections
from aztask.stores.events.sink import EventSink
from aztask.stores.payloads.opening import payloads_for
from aztask.stores.payloads.payloads import WEEK, Payloads
from aztask.stores.payloads.store import MemoryPayloads
from aztask.stores.records.base import ResultStore
from aztask.support.checks import module_names
from aztask.support.elsewhere import say_ours
from aztask.support.late import late
from aztask.support.settings import overruled_variables
from aztask.task import ContextTask, Invocation, Task
from aztask.taskoptions import (
    SendOptions,
    TaskOptions,
    check_options,
    checked_send_options,
    name_text,
)
from aztask.uniqueness.engine import UniqueEngine
from aztask.workflows.graphs import Graph, calls_of

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M")

VARIABLES: Final = {"broker": "AZTASK_BROKER", "results": "AZTASK_RESULTS"}
_PARAMETERS: Final = ("broker", "results", "events", "retry", "include")


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
    * `tasks`: the registered tasks, by name; `limits`: the declared limits, by name.
    * `settings`: the app's `Settings`, checked and in seconds.
    * `retry`: the `RetryPolicy` of tasks that set none.
    * `include`: the names of the modules that define tasks.
    * `overruled`: warnings about environment variables that this code overrules.
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
        broker: str | Sequence[str] | Broker | None = None,
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
          ConfigurationError. A list of addresses of one kind spreads the queues over them
          (docs/how-to/advanced/addresses.md), as does a text with commas between them.
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
        for_tests = read_environment(TEST_BROKER)
        given = {"broker": broker, "results": results, "events": events, **options}
        self.overruled = [] if for_tests else overruled_variables(Settings, given, VARIABLES)
        cipher = _cipher_from_settings(self.settings)
        not_named = broker is None or broker == ""  # an empty list is refused
        self._connections = places = Connections(
            for_tests or (read_environment(VARIABLES["broker"]) if not_named else broker),
            for_tests or results or read_environment(VARIABLES["results"]),
            poll_ceiling=self.settings.poll_ceiling_seconds,
            app=self.name,
            owner=self.settings.owner,
            signatures=RowSignatures(
                _signing_keys(self.settings),
                old=self.settings.old_signatures,
                environment=self.settings.environment or "",
                cipher=cipher,
            ),
        )
        self._make_parts(places, cipher, options.keys(), testing=for_tests is not None)

    def _make_parts(
        self, places: Connections, cipher: Cipher, given: Collection[str], *, testing: bool
    ) -> None:
        """Make what the App owns, each from those before it.

        * `given`: the names of the settings that the app's own options set.
        * `testing`: payloads lie in the folder beside the queues, whatever the settings name.
        """
        self._registry = TaskRegistry(self.name, self.settings, self.retry)
        self.tasks = self._registry.tasks
        self.limits = DeclaredLimits()
        self.leases = LeaseAdvisor(self.settings, places)
        self.queues = DeclaredQueues(
            self.settings, places, self.leases, self.tasks, self.limits, given=given
        )
        self.payloads = payloads_for(
            self.settings,
            places.broker_target,
            testing=testing,
            owner=places.owner,
            cipher=cipher,
        )
        self.codec = _codec_from_settings(self.settings, self.queues, self.payloads, cipher)
        self.limits.digests = self.codec.digests
        self.hooks = Hooks()
        self.around_send, self.around_run = self.hooks.send, self.hooks.run
        self.around_worker, self.around_process = self.hooks.worker, self.hooks.process
        self.on_event = self.hooks.event
        self.lifespan = self.hooks.lifespan
        sender = Sender(places, self.codec, self.leases, self, self.hooks, self.payloads)
        self.sends = Sends(places, self.codec, self.queues, self.tasks, self.limits, sender)
        self.workflows = WorkflowStarter(
            places, self.codec, self.leases, self.hooks, self.queues, sender, self.tasks
        )
        self.schedules = Schedules(
            self.name,
            places,
            self.sends,
            self.codec,
            self.tasks,
            workflows=self.workflows,
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
            return self._task(function, options, with_context=False)
        return lambda inner: self._task(inner, options, with_context=False)

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
            return self._task(function, options, with_context=True)
        return lambda inner: self._task(inner, options, with_context=True)

    def _task(self, function: Any, options: Any, *, with_context: bool) -> Task[..., Any]:
        return self._registry.add(self, function, options, with_context=with_context)

    @overload
    def step(self, function: Callable[P, R], /) -> Callable[P, R]: ...

    @overload
    def step(
        self,
        /,
        *,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        record_errors: bool = False,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...

    def step(
        self,
        function: Any = None,
        /,
        *,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        record_errors: bool = False,
    ) -> Any:
        """Make a function a step wherever a task calls it; see `Context.step`.

        ::

            @app.step
            def charge(card: str) -> str: ...

            @app.task
            def order(card: str) -> None:
                charge(card)                # recorded once for this task

        Outside of tasks, and inside another step, the function is simply called. An ``async def``
        is awaited as before.

        * `name`: the function's name by default. Do not change it while tasks are under way.
        * `retry`, `record_errors`: as in `Context.step`.
        """
        policy = None if retry is None else check_policy(retry, "step: retry")

        def made(inner: Callable[P, R]) -> Callable[P, R]:
            text = name_text(name or inner.__name__, "step: name")
            return declared_step(inner, text, policy, record_errors=record_errors)

        return made if function is None else made(function)

    def handler(
        self,
        *,
        model: type[M] | None = None,
        unsigned: bool = False,
        **options: Unpack[TaskOptions],
    ) -> Callable[[Callable[[M], R]], Handler[[M], R]]:
        """Register a function for the messages of a queue that neither aztask nor Celery wrote.

        ::

            @app.handler(queue="orders", model=Order)
            def on_order(order: Order) -> None:
                ...

        They run under the same leases, retries and dead letters as tasks. A body that does not fit
        the model becomes a dead letter with the reason, and the original bytes.

        * `model`: the type of the argument: a dataclass, a msgspec Struct, a pydantic model,
          ``dict``, ``list``, ``str`` or ``bytes``. None, the default, passes any JSON value.
        * `unsigned`: True says that you know: other programs sign nothing, so that with
          ``signing_keys`` too any program that may send to the queue decides what the function
          gets. Without it a worker with keys warns at its start, and with ``old_signatures=False``
          it does not start. It makes no difference without keys.
        * `options`: those of tasks, see `TaskOptions`. ``queue`` is the queue; it may also hold
          tasks, which run as usual. By default it is the app's ``default_queue``.

        Raises DuplicateTask if the queue has a handler already, and what `task` raises.
        """
        check_options(options, TaskOptions, "handler")
        if not isinstance(unsigned, bool):
            raise ConfigurationError(f"handler: unsigned is True or False, not {unsigned!r}")
        return lambda function: self._registry.add_handler(
            self, function, options, model, unsigned=unsigned
        )

    def limit(
        self,
        name: str,
        *,
        rate: str | None = None,
        burst: int | None = None,
        concurrency: int | None = None,
        key: Callable[..., object] | None = None,
        cost: Callable[..., float] | None = None,
    ) -> None:
        """Declare a limit that holds for all workers together, for ``@app.task(limits=[name])``.

        ::

            app.limit("api", rate="10/s", burst=20)
            app.limit("tenant", concurrency=5, key=lambda tenant, *_: tenant)
            app.limit("tokens", rate="90000/m", cost=lambda prompt, **_: len(prompt) / 4)

        * `rate`: how many starts in which time: "10/s", "600/m", "5/10s", "1000/h".
        * `burst`: how many may start at once after a quiet time: 1 by default, and with a `cost`
          the whole count of the rate.
        * `concurrency`: how many may run at the same time.
        * `key`: a function of the task's arguments that returns a text or a number; each one has
          the limit for itself, and None means that the limit does not apply. Workers call it
          outside of the pool, so it must be quick. A limit that has only a key limits nothing, but
          its keys can be paused: ``aztask control pause --tenant NAME=KEY``.
        * `cost`: a function of the task's arguments by name that says how much of the rate a start
          uses, a number from 0, rounded up; 0 means that the rate does not apply. It is called at
          the send, which raises CostTooLarge if it is more than `burst`, and by workers. A run
          corrects it with `Context.spent`.

        Needs a result store. Raises ConfigurationError.
        """
        self.limits.declare(
            name, rate=rate, burst=burst, concurrency=concurrency, key=key, cost=cost
        )

    def limits_of(self, task: Task[..., Any]) -> tuple[Limit, ...]:
        """The limits of a task. Raises ConfigurationError for a name that is not declared."""
        return self.limits.of(task)

    def schedule(self, name: str, call: Graph, **options: Unpack[ScheduleOptions]) -> Plan:
        """Send a task at certain times. Every worker of the app takes part, without a leader.

        ::

            app.schedule("nightly", report.s(), cron="0 2 * * *", tz="Europe/Berlin")
            app.schedule("poll", poll.s("eu"), every=30, overlap="skip")
            app.schedule("import", fetch.s() | store.s(), cron="0 4 * * *", overlap="skip")

        * `name`: names the schedule; one without a dot gets the app's name in front.
        * `call`: a call of a task, or a workflow; `Signature.with_options` sets a call's queue,
          expiry or session.
        * `options`: when, and by which rules, see `ScheduleOptions`.

        The first occurrence is after the first start of a worker, never in the past. A schedule
        that no running code declares stops after 10 minutes. Raises ConfigurationError,
        DuplicateTask, and TypeError for arguments that do not match the task. See
        docs/how-to/basics/schedules.md.
        """
        plan = self.schedules.plan(name, call, **options)
        if any(each.options.get("queue") == self.settings.default_queue for each in calls_of(call)):
            self.queues.name_default()
        return self.schedules.declare(plan)

    # -- queues ------------------------------------------------------------------------------

    def queue(self, name: str, **options: Unpack[QueueOptionNames]) -> None:
        """Set options of one queue, for example ``app.queue("slow", lease=300)``.

        With ``priorities={"high": 4, "low": 1}`` the queue has priorities: a queue of its own for
        each one, and the weights by which workers take tasks from them, see
        docs/how-to/advanced/priorities.md. With ``shards=16`` its messages lie in 16 queues of the
        service, see docs/how-to/advanced/shards.md; declare them before the app is used. ``aztask
        queues reshard`` changes the number later.

        `QueueSettings` describes the options. This creates nothing: run ``aztask queues create``.
        Raises ConfigurationError if an option is wrong or contradicts the app's settings.
        """
        self.queues.declare(name, **options)

    def check_queue_name(self, queue: object, where: str) -> None:
        """Raise InvalidQueueName unless the broker allows the name, if the broker is known by now.

        * `queue`: None for no name.
        * `where`: who names it, for the error.
        """
        self.queues.check_name(queue, where)

    def queue_for(self, task: Task[..., Any] | None, options: Mapping[str, Any]) -> str:
        """The queue that an invocation is sent to.

        * `task`: None for a task that another program registers.
        * `options`: those of the send. A queue that they name has only the priority that they name.

        Raises ConfigurationError for a priority that the queue does not have.
        """
        return self.queues.queue_for(task, options)

    def route(self, task: Task[..., Any] | None, options: Mapping[str, Any]) -> str:
        """`queue_for` a send that is about to be made: the limits of the task must be declared."""
        return self.queues.route(task, options)

    def queue_weights(self) -> dict[str, int]:
        """The declared weights of queues: of those with priorities, and of their priorities."""
        return self.queues.weights()

    def priority_queues(self, name: str) -> list[str]:
        """The queues that belong to `name`: the queue itself, and one for each other priority."""
        return self.queues.of_priorities(name)

    def unserved(self, queues: Collection[str]) -> list[str]:
        """Warnings about the priorities of these queues that are not among them.

        * `queues`: those that a worker is told to serve; empty for all.
        """
        return self.queues.unserved(queues)

    def queue_settings(self, name: str) -> Settings:
        """The settings that apply to the queue: its own where it has any, else the app's."""
        return self.queues.settings_of(name)

    def lease_seconds(self, name: str) -> float:
        """The lease duration to request for the queue, in seconds.

        It is the queue's setting, else the app's, else the broker's default.
        """
        return self.queues.lease_seconds(name)

    def lease_now(self, name: str) -> float:
        """The lease duration to request now: the learned one with ``lease_advice``."""
        return self.queues.lease_now(name)

    def queue_plan(self, name: str, can: Capabilities | None = None) -> QueuePlan:
        """What the app requires of a queue: its lease, sessions, duplicate detection and so on.

        * `can`: of another service than the app's broker, for its queue of that name.
        """
        return self.queues.plan(name, can)

    def queue_options(self, name: str) -> QueueOptions:
        """The options to create the queue with.

        Raises ConfigurationError if the service lacks one of them.
        """
        return self.queues.options(name)

    def has_sessions(self, name: str) -> bool:
        """True if the app configured the queue with ``sessions=True``."""
        return self.queues.has_sessions(name)

    def queue_names(self) -> list[str]:
        """The queues that the app's tasks and settings name, sorted.

        The default queue is one of them, unless nothing names it and every task has a queue of its
        own: then it need not exist.
        """
        return self.queues.names()

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
    def broker_target(self) -> object:
        """The broker's address as a value, or the broker itself if the app was given one."""
        return self._connections.broker_target

    @property
    def owner(self) -> Owner:
        """Whose rows in the result store this app makes and acts on: its broker's, and its own."""
        return self._connections.owner()

    @property
    def missing_file(self) -> str | None:
        """The queue file of ``local://`` if it does not exist: the first use creates it."""
        return self._connections.missing_file()

    @property
    def local_files(self) -> list[tuple[str, LocalAddress]]:
        """The files of ``local://`` addresses, each with a name such as "the queue file"."""
        return self._connections.local_files()

    def close(self) -> None:
        """Close connections and files. Using the app again opens them again."""
        self.sends.close()
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
        return self.queues.held(queue, wait, lease, session, deferred)

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
            lambda stop: self.queues.held(queue, wait, lease, session, deferred, stop)
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
        self.queues.check_name(options.get("queue"), "send: queue")
        task = self.tasks.get(name)
        call = Invocation.of(args, kwargs) if task is None else task.named_invocation(args, kwargs)
        return self.sends.send(name, task, (call,), options)[0]

    def send_call(
        self, task: Task[..., Any], calls: Sequence[Invocation], options: SendOptions
    ) -> list[AsyncResult[Any]]:
        """Send all `calls` of `task` as one batch. `Task.delay` and `Task.map` call this."""
        return self.sends.send(task.name, task, calls, options)

    async def asend_call(
        self, task: Task[..., Any], calls: Sequence[Invocation], options: SendOptions
    ) -> list[AsyncResult[Any]]:
        """`send_call` for coroutines: it never blocks the event loop."""
        return await self.sends.asend(task.name, task, calls, options)

    async def asend(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[Any]:
        """`send` for coroutines: it never blocks the event loop, like `Task.adelay`."""
        options = checked_send_options(options, "asend")
        self.queues.check_name(options.get("queue"), "asend: queue")
        task = self.tasks.get(name)
        call = Invocation.of(args, kwargs) if task is None else task.named_invocation(args, kwargs)
        return (await self.sends.asend(name, task, (call,), options))[0]

    def result(self, task_id: str) -> AsyncResult[Any]:
        """The `AsyncResult` of a task id, for example one that you stored. Asks no server."""
        return self.sends.result(task_id)

    def signal_all(
        self, task_ids: Iterable[str], name: str, value: Any = None
    ) -> dict[str, AztaskError]:
        """Send one signal to many tasks, as `AsyncResult.signal` does to one.

        ::

            refused = app.signal_all(waiting, "prices", {"date": "2026-11-28"})

        * `value`: the same for all.

        Returns the tasks that take none, with the error that `AsyncResult.signal` would raise;
        the others have it. Their wake-ups are sent in batches; where queue and results share one
        file, 100 tasks are one transaction. If the process dies, or if it raises BrokerUnavailable,
        the tasks before have the signal, and those behind have none.

        Raises SignalRefused for a name, and EncodeError for a value, that no signal may have.
        """
        return self.sends.signal_all(task_ids, name, value)

    def redirect(
        self, broker: Broker, results: ResultStore, on_sent: Callable[..., None] | None = None
    ) -> Callable[[], None]:
        """Use these instead, until the returned function is called. `aztask.testing` does so.

        * `on_sent`: called after each send with the task's name, the queue, the calls, the task ids
          and the options.

        Raises ConfigurationError if an inline block is open.
        """
        if self.sends.on_sent is not None:
            raise ConfigurationError("the app is inline already; leave the outer block first")
        restore = [self._connections.replace(broker, results)]
        if self.payloads is not None:
            restore.append(self.payloads.replace(MemoryPayloads()))
        self.sends.on_sent = on_sent

        def back() -> None:
            self.sends.on_sent = None
            for each in restore:
                each()

        return back

    def inline(self, *, run: bool = True, now: datetime | None = None) -> InlineMode:
        """Run tasks here, at the moment they are sent: for tests, as a ``with`` block.

        ::

            with app.inline() as inline:
                assert resize.delay("a.png", 200).get() == "small"
                inline.assert_sent(notify, "a.png")

        Broker and result store are replaced by new ones in memory. Retries, rejections, dead
        letters and sessions work as on a worker, and retries do not wait. Time stands still:
        delayed and debounced tasks and schedules come when you call ``inline.advance(seconds)``.
        See `aztask.testing.Inline`.

        * `run`: False only keeps what is sent; ``inline.run()`` then runs it.
        * `now`: the time at the start, a ``datetime`` with a time zone; by default that of this
          machine. With it, a test of a cron expression does not depend on when it runs.
        """
        inline: InlineMode = late("aztask.testing.inline", "Inline")(self, run=run, now=now)
        return inline

    def at(
        self, broker: str | Broker | None = None, results: Any = None, *, name: str | None = None
    ) -> App:
        """This app's settings and keys at other addresses, without its tasks.

        ``aztask move`` reads and writes with it what the app has there. It has connections of its
        own: close it.

        * `broker`, `results`: by default those of this app. `name`: of an app that shares them.
        """
        made = copy(self)
        made.name = name or self.name
        made._connections = places = self._connections.at(broker, results, app=made.name)
        made._make_parts(places, _cipher_from_settings(self.settings), (), testing=False)
        return made

    # -- messages and values -----------------------------------------------------------------

    def message_in(
        self, envelope: Envelope, queue: str, position: Position, *, any_age: bool = False
    ) -> TaskMessage:
        """The message in an envelope, received from `queue`. Workers and dead letters use it.

        A foreign message is one for the queue's handler. Raises CodecError, and what
        `Codec.from_envelope` raises.
        """
        return self._registry.message_in(self.codec, envelope, queue, position, any_age=any_age)

    def put(self, value: Any, *, keep: float | timedelta = WEEK) -> StoredValue:
        """Store `value` once, to pass it to many tasks.

        ::

            model = app.put(weights)
            score.map([(model, row) for row in rows])

        Each task gets the value itself, if you pass what this returns as an argument, or directly
        in a list that is an argument. Each run fetches it. Until its lifetime ends, any number of
        tasks may use it; a task that runs later becomes a dead letter with the reason
        ``payload-missing``.

        * `value`: anything that may be an argument.
        * `keep`: its lifetime, in seconds or as a ``timedelta``; 7 days by default, and rounded up
          to the next hour. ``aztask doctor --collect`` removes it after that.

        Raises ConfigurationError if the app stores no payloads, EncodeError, ContentRefused (more
        than 1 GiB) and BrokerUnavailable.
        """
        if self.payloads is None:
            raise ConfigurationError(
                f"the app {self.name!r} has no store for values; give the App "
                'payloads="blob://ACCOUNT/CONTAINER", or a directory'
            )
        return self.payloads.put(self.codec, value, keep)

    def unique_engine(self, task: str) -> UniqueEngine:
        """The keys of unique tasks. `task`: one of them, for the error without a result store."""
        return self.sends.sender.unique.engine(task)


say_ours(
    App,
    {
        "send_task": ".send(name, args, kwargs, ...)",
        "enqueue": ".send(name, args, kwargs, ...), or task.delay(...)",
        "actor": "@app.task",
        "autodiscover_tasks": "App(..., include=[...]) with the modules",
        "conf": ".settings to read, and options of App(...) to set",
        "worker_main": "aztask -A MODULE:APP worker on the command line",
        "add_periodic_task": ".schedule(name, task.s(...), cron=... or every=...)",
    },
)


VAULT_KEYS: Final = "aztask.azure.vaultkeys"  # it imports an Azure SDK


def _signing_keys(settings: Settings) -> list[bytes]:
    return [key.reveal().encode() for key in settings.signing_keys]


def _cipher_from_settings(settings: Settings) -> Cipher:
    """Raises ConfigurationError for what encryption needs, and for what it does not go with."""
    if settings.encrypt:
        if not settings.signing_keys:
            raise ConfigurationError(
                "encrypt=True needs signing_keys, too: what is encrypted has to be authentic, and"
                " what is not encrypted must not be run (AZTASK_SIGNING_KEYS)"
            )
        if not settings.id_key:
            raise ConfigurationError(
                "encrypt=True needs id_key, too: it hides the keys of unique tasks, limits and"
                " tenants (AZTASK_ID_KEY)"
            )
        if settings.argsrepr:
            raise ConfigurationError(
                "argsrepr=True writes the arguments as text, which nothing encrypts: leave it off"
                " with encrypt=True"
            )
    return Cipher(
        [_encryption_key(key.reveal()) for key in settings.encryption_keys],
        encrypt=settings.encrypt,
        environment=settings.environment or "",
        codec=settings.content_codec,
    )


def _encryption_key(text: str) -> bytes | WrappedKey:
    """The key that a setting has: itself, or one that a vault has wrapped."""
    if not text.startswith("https://"):
        return text.encode()
    key: WrappedKey = importlib.import_module(VAULT_KEYS).VaultKey(text)
    return key


def _codec_from_settings(
    settings: Settings, queues: DeclaredQueues, payloads: Payloads | None, cipher: Cipher
) -> Codec:
    return Codec(
        serializer=settings.serializer,
        accept=settings.accept,
        signing_keys=_signing_keys(settings),
        signatures=SignatureRules(
            old=settings.old_signatures,
            max_age=lambda queue: queues.settings_of(queue).signature_max_age_seconds,
            clock_skew=settings.signature_clock_skew_seconds,
            environment=settings.environment or "",
        ),
        id_key=settings.id_key.reveal().encode() if settings.id_key else None,
        argsrepr=settings.argsrepr,
        load=payloads.load if payloads is not None else None,
        cipher=cipher,
    )
