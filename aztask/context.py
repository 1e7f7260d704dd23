"""What a running task can read about its delivery, and what it can request.

Rules
1. Everything here is local and fast, except `Context.checkpoint`, `TaskLease.extend` and the state
   of a session, which wait for the broker.
2. `TaskLease.ensure` is the fence: call it right before a side effect that must not happen twice.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NoReturn, Protocol, TypeVar

from aztask.errors import LeaseLost
from aztask.message.headers import TIME_LIMIT
from aztask.message.message import TaskMessage
from aztask.retry import RetryPolicy
from aztask.session import MemoryState, Session
from aztask.steps.emitting import Emission, MemoryEmission
from aztask.steps.engine import RunSteps
from aztask.steps.home import MemoryHome
from aztask.steps.stepoptions import StartedTask, StepOptions
from aztask.support.clock import SYSTEM_CLOCK, Clock

T = TypeVar("T")

CONFIRM_SECONDS = 30.0

DEFAULT_QUEUE: Final = "default"

SCHEDULE: Final = "aztask-schedule"
SCHEDULED_AT: Final = "aztask-scheduled-at"
"""Headers of a task that a schedule sends: the schedule's name, and the occurrence's time."""


class TaskLease:
    """The running task's view of its lease, as ``context.lease``.

    The worker renews the lease; your task need not do anything.
    """

    def __init__(
        self,
        deadline: float,
        *,
        ask: Callable[[float], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Called by aztask.

        * `deadline`: when the lease ends, on `clock`.
        * `ask`: asks the worker for an extension, in seconds.
        """
        self._deadline = deadline
        self._ask = ask
        self._clock = clock
        self._lost_reason = ""
        self._changed = threading.Condition()  # reentrant: `ask` may renew at once
        self._renewals = 0

    @classmethod
    def for_testing(cls, seconds: float = 60.0, *, clock: Clock = SYSTEM_CLOCK) -> TaskLease:
        """A lease that is held for `seconds` and grants every extension, for tests."""
        lease: TaskLease = cls(
            clock.monotonic() + seconds,
            ask=lambda more: lease.renewed(max(lease.deadline, clock.monotonic() + more)),
            clock=clock,
        )
        return lease

    @property
    def deadline(self) -> float:
        """When the lease ends unless it is renewed, on the clock of the deadlines."""
        return self._deadline

    @property
    def remaining_seconds(self) -> float:
        """Seconds until the lease ends unless it is renewed; 0.0 once it has ended."""
        return max(0.0, self._deadline - self._clock.monotonic())

    @property
    def lost(self) -> bool:
        """True if the lease has ended, so that another worker may have the message."""
        return bool(self._lost_reason) or self._clock.monotonic() >= self._deadline

    def ensure(self) -> None:
        """Return while the lease is held; raise LeaseLost once it is not.

        ::

            context.lease.ensure()
            charge(card)

        This is a fence in time, not a transaction: if the process stops between this call and the
        side effect, the effect may happen under a lost lease.
        """
        if self.lost:
            raise LeaseLost(self._lost_reason or LeaseLost.__doc__)

    def extend(self, seconds: float | timedelta) -> None:
        """Hold the lease for at least `seconds` from now; returns when the broker has agreed.

        * `seconds`: seconds or a ``timedelta``.

        The worker's ``max_lease`` caps it. Where the queue sets the duration (Service Bus), the
        lease is renewed at once and then as usual. Raises LeaseLost, and ValueError if `seconds` is
        not above 0.
        """
        if isinstance(seconds, timedelta):
            seconds = seconds.total_seconds()
        if not seconds > 0:
            raise ValueError(f"extend takes seconds above 0, not {seconds!r}")
        with self._changed:
            before = self._renewals
            self._ask(seconds)
            self._changed.wait_for(
                lambda: self._renewals > before or self.lost,
                timeout=min(CONFIRM_SECONDS, self.remaining_seconds),
            )
        self.ensure()

    async def aextend(self, seconds: float) -> None:
        """`extend` for coroutines: the event loop continues while the broker answers."""
        await asyncio.to_thread(self.extend, seconds)

    def renewed(self, deadline: float) -> None:
        """Take note that the lease was renewed until `deadline`. The worker calls this."""
        with self._changed:
            self._deadline = deadline
            self._renewals += 1
            self._changed.notify_all()

    def lose(self, reason: str) -> None:
        """Take note that the lease is lost. The worker calls this."""
        with self._changed:
            self._lost_reason = reason
            self._changed.notify_all()


class Spending(Protocol):
    """Where a run says what it has used of a limit: `aztask.worker.pool.attempt`."""

    def spent(self, limit: str, amount: int) -> None:
        """Note a further amount. Raises ConfigurationError for a limit that does not apply."""
        ...


class Context:
    """The first argument of a task made with ``@app.task_with_context``.

    ::

        @app.task_with_context
        def crawl(context: Context, url: str) -> None:
            page = (context.saved or {"page": 0})["page"]
            ...
            context.checkpoint({"page": page + 1})

    Attributes beside the properties below:

    * `message`: the `TaskMessage`; other headers of the message are in its `extra`.
    * `delivery_count`: how often the broker delivered this message, this time included.
    * `enqueued_at`: when the broker made this message available, UTC epoch seconds; 0.0 if unknown.
    * `lease`: a `TaskLease`.
    * `saved`: the last checkpoint, or None.
    * `session`: a `Session` if the task was sent with a session, else None.
    * `emission`: the worker's view of the stream; use `emit`.
    * `steps`: the worker's view of the recorded steps; use `step`, `gather` and `patched`.
    """

    def __init__(
        self,
        message: TaskMessage,
        *,
        delivery_count: int,
        lease: TaskLease,
        saved: Any = None,
        save: Callable[[Any], None],
        session: Session | None = None,
        enqueued_at: float = 0.0,
        steps: RunSteps | None = None,
        spending: Spending | None = None,
        emission: Emission | None = None,
    ) -> None:
        """Called by aztask. steps: None keeps the steps in memory, for code without a worker.

        spending: None for code without a worker, which no limit holds back.
        """
        self._spending = spending
        self.emission: Emission | MemoryEmission = emission or MemoryEmission()
        self.steps = steps or RunSteps(MemoryHome(), message, lease)
        self.message = message
        self.delivery_count = delivery_count
        self.enqueued_at = enqueued_at
        self.lease = lease
        self.session = session
        self.saved = saved
        self._save = save

    @classmethod
    def for_testing(
        cls,
        *,
        task_id: str = "test",
        task: str = "test",
        queue: str = "default",
        resubmit_count: int = 0,
        delivery_count: int = 1,
        saved: Any = None,
        session: str | None = None,
        lease_seconds: float = 60.0,
        signals: Mapping[str, Iterable[Any]] | None = None,
    ) -> Context:
        """A context to call a task's function with, in a test without a queue and a worker.

        ::

            context = Context.for_testing(saved={"page": 7})
            assert crawl.function(context, "https://example.com") == 8
            assert context.saved == {"page": 9}          # the last checkpoint

        Its lease is held for `lease_seconds`, ``context.lease.lose("...")`` loses it, and an
        extension is granted at once. The state of its session begins as None. Waits get the values
        in `signals`, by name and in order, such as ``{"approved": ["ann"]}``.
        """
        return unsent_context(
            task=task,
            queue=queue,
            task_id=task_id,
            saved=saved,
            resubmit_count=resubmit_count,
            delivery_count=delivery_count,
            session=session,
            lease=lease_seconds,
            signals=signals,
        )

    @property
    def task_id(self) -> str:
        """The id of the invocation, as ``AsyncResult.id`` has it."""
        return self.message.id

    @property
    def task(self) -> str:
        """The registered name of the task."""
        return self.message.task

    @property
    def queue(self) -> str:
        """The queue that the message was received from."""
        return self.message.queue

    @property
    def resubmit_count(self) -> int:
        """How often this invocation failed before; 0 in its first run."""
        return self.message.resubmit_count

    @property
    def schedule(self) -> str | None:
        """The full name of the schedule that sent the task; None if none did."""
        name = self.message.extra.get(SCHEDULE)
        return name if isinstance(name, str) else None

    @property
    def scheduled_at(self) -> datetime | None:
        """The time for which a schedule sent the task, in UTC; None if none did.

        It is the occurrence's own time, however late the task runs, and the same in every retry.
        """
        at = self.message.extra.get(SCHEDULED_AT)
        if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < TIME_LIMIT:
            return None
        return datetime.fromtimestamp(at, UTC)

    @property
    def stopping(self) -> bool:
        """True once the worker is stopping: it waits for this task, up to a time-out.

        ::

            for page in range(first, last):
                if context.stopping:
                    raise Snooze(0)     # another worker goes on from the last checkpoint
                ...
                context.checkpoint({"page": page + 1})

        After ``--shutdown-timeout`` `WorkerStopping` is raised in the task (a coroutine is
        cancelled). Then it has ``--shutdown-grace``, or its `stop_grace`, until its process is
        killed.
        """
        return _stopping.is_set()

    def checkpoint(self, state: Any) -> None:
        """Store `state` in the message: the next delivery finds it as ``context.saved``.

        When this returns, the state is stored and the lease is renewed. If the process dies before
        that, the previous checkpoint stays.

        The checkpoint travels in the message: together with the arguments it must fit into what the
        broker accepts, less 1 KiB (see docs/brokers.md). Raises LeaseLost, EncodeError,
        MessageTooLarge (the previous checkpoint stays), and CapabilityError if neither the broker
        nor a result store can keep it.
        """
        self.lease.ensure()
        self._save(state)
        self.saved = state

    async def acheckpoint(self, state: Any) -> None:
        """`checkpoint` for coroutines: the event loop continues while the broker answers."""
        await asyncio.to_thread(self.checkpoint, state)

    def spent(self, limit: str, amount: float) -> None:
        """Correct what this run uses of a limit with a cost, whose estimate was claimed before.

        ::

            answer = ask_model(prompt)
            context.spent("tokens", answer.usage.total_tokens)

        * `limit`: a limit of the task that has a ``cost=``.
        * `amount`: from 0, rounded up. Calls of one run add up.

        When the run ends, the next claim is credited with what the estimate exceeded, or charged
        with what exceeded it. A run that never calls this has used its estimate. Returns at
        once. In a direct call without a worker it does nothing. Raises ConfigurationError for a
        limit that does not apply to the task, and ValueError.
        """
        if isinstance(amount, bool) or not 0 <= amount < math.inf:
            raise ValueError(f"spent takes a number from 0, not {amount!r}")
        if self._spending is not None:
            self._spending.spent(limit, math.ceil(amount))

    # -- streams -----------------------------------------------------------------------------

    def emit(self, value: Any) -> None:
        """Add a part to the stream of the task, for `AsyncResult.stream` and ``astream``.

        ::

            for token in model.answer(prompt):
                context.emit(token)

        * `value`: plain data, at most 64 KiB when it is encoded. A task emits at most 100,000
          parts.

        It returns at once and is written within about 100 ms, together with what is emitted in that
        time; it waits only while 1 MiB is not written yet. The parts are kept as long as the
        result. A retry begins a new take: readers see a reset. In a direct call without a worker
        the parts are in ``context.emission.values``. A task that is a generator emits what it
        yields.

        Raises EncodeError, and StepError without a result store or inside a step: a later run takes
        the step's value from its record, and would not emit the part again. A task that waits after
        a branch of `gather` has emitted fails with StepError: branches emit in another order in
        each run.
        """
        self.steps.refuse_inside("emit is called", _EMIT_OUTSIDE)
        self.emission.emit(value, branch=self.steps.branch_name)

    async def aemit(self, value: Any) -> None:
        """`emit` for coroutines: it never blocks the event loop."""
        await asyncio.to_thread(self.emit, value)

    # -- steps -------------------------------------------------------------------------------

    def step(
        self,
        name: str,
        function: Callable[..., T],
        /,
        *args: Any,
        key: str | None = None,
        retry: RetryPolicy | None = None,
        record_errors: bool = False,
        **kwargs: Any,
    ) -> T:
        """Call ``function(*args, **kwargs)`` once for this task, and return its value.

        ::

            charge_id = context.step("charge", charge_card, order)
            parcel = await context.step("ship", ship, order)        # an async def

        The value is recorded. When the task runs again, after a failure, a crash or a replay, it
        gets the recorded value, and the function is not called. If the worker dies in the function,
        or before the record, the function is called again: pass `step_key` to services that accept
        an idempotency key.

        * `name`: of the action. Calls of the same name are numbered.
        * `key`: names this call instead of its number, for steps whose order may differ.
        * `retry`: retries this step alone; its delays are spent in the queue.
        * `record_errors`: also record an error that ends the run, so that a retry raises it again.

        An error of the function is raised here. If your task goes on after it, the error is
        recorded, and later runs go on in the same way. Raises StepError if a later run could not
        repeat the step, EncodeError for a value that cannot be written, and LeaseLost. Needs a
        result store. See docs/how-to/advanced/steps.md.
        """
        options = StepOptions(key, retry, record_errors)
        value: T = self.steps.step(name, function, options, args, kwargs)
        return value

    @property
    def step_key(self) -> str | None:
        """The idempotency key of the step whose function runs; None outside of steps.

        32 hexadecimal digits, the same in every run of this step of this task.
        """
        step = self.steps.current
        return None if step is None else step.step_key

    def gather(self, *calls: Any) -> Any:
        """Run several branches side by side, each with steps of its own; returns their values.

        ::

            stock, price = context.gather(
                lambda: context.step("stock", check_stock, item),
                lambda: context.step("price", ask_price, item),
            )
            stock, price = await context.gather(check(context, item), ask(context, item))

        * `calls`: functions without arguments, which run in threads, or coroutines.

        All branches run to their ends; then the first error is raised. Steps in a plain
        `asyncio.gather` need a ``key=``.
        """
        return self.steps.gather(calls)

    def sleep(self, seconds: float | timedelta, *, key: str | None = None) -> None:
        """Wait without a slot, a lease or a process: for minutes or months.

        ::

            context.step("remind", send_reminder, order)
            context.sleep(timedelta(days=3))
            context.step("close", close_order, order)

        * `seconds`: seconds or a ``timedelta``, at most the setting `max_wait` (90 days).
        * `key`: names this wait instead of its number, as for a step.

        The run ends here: its message waits in the queue. Later the task runs again from its first
        line, and gets what its steps recorded. The time counts from the first call, and no restart
        or failure changes that. ``finally`` blocks run when the run ends. A task that waits is in
        the state "waiting"; cancelling it ends it at once.

        In a direct call without a worker it returns at once. Raises StepError if the task cannot
        wait: inside a step, in a session, without a result store, or at most once. See
        docs/how-to/advanced/steps.md.
        """
        self.steps.sleep(_seconds(seconds) or 0.0, key)

    def wait_for(
        self, name: str, *, timeout: float | timedelta | None = None, key: str | None = None
    ) -> Any:
        """Wait for a signal without a slot, a lease or a process, and return its value.

        ::

            try:
                approval = context.wait_for("approved", timeout=timedelta(days=3))
            except WaitTimeout:
                context.step("refund", refund, charge)

            app.result(task_id).signal("approved", {"by": "ann"})       # in another program

        * `name`: of the signal. Each wait takes the oldest one that no wait has taken.
        * `timeout`: seconds or a ``timedelta`` from the first call on, at most `max_wait` (90
          days), which is the default.
        * `key`: names this wait instead of its number, as for a step.

        The run ends here, as in `sleep`, and the task runs again from its first line when the
        signal comes. What the wait gave is recorded. Raises WaitTimeout if no signal came in time:
        in every later run, too. In a direct call without a worker it takes the signals of
        `for_testing`, and times out at once without one. Raises StepError where `sleep` does.
        """
        return self.steps.wait_for(name, _seconds(timeout), key)

    def wait_any(
        self,
        *wanted: str | StartedTask,
        timeout: float | timedelta | None = None,
        key: str | None = None,
    ) -> tuple[Any, Any]:
        """Wait for the first of several signals and tasks; returns which one, and its value.

        ::

            name, value = context.wait_any("approved", "rejected", timeout=86_400)

            check = context.start(check_credit, order)
            found, value = context.wait_any("approved", check)
            if found is check: ...

        * `wanted`: names of signals, and tasks that `start` has sent.

        If several are there, a signal comes before a task, and a task before those that you name
        behind it. If the task has failed, its error is raised, as in `call`. The others run on; a
        later `wait_any` may wait for them. Everything else is as in `wait_for`.
        """
        return self.steps.wait_any(wanted, _seconds(timeout), key)

    def start(self, task: Any, /, *args: Any, key: str | None = None, **kwargs: Any) -> StartedTask:
        """Start another task, and go on; `wait_any` waits for its end.

        ::

            parcel = context.start(ship, order)
            found, value = context.wait_any("cancelled", parcel, timeout=timedelta(days=3))

        The parameters are those of `call`. Its id derives from the call, so no run of this task
        starts it twice. In a direct call without a worker, its function is called.
        """
        return self.steps.start("start", task, args, kwargs, key)

    def continue_with(self, *args: Any, **kwargs: Any) -> NoReturn:
        """End this run, and go on with other arguments, under the same task id.

        ::

            @app.task_with_context
            def poll(context: Context, mailbox: str, seen: int) -> None:
                seen += context.step("read", read_new, mailbox, seen)
                context.sleep(3600)
                context.continue_with(mailbox, seen)

        For flows without an end: a new history of steps begins, and the former one is removed. So
        neither `max_steps` nor the time that a replay takes limits them. The task is neither ended
        nor failed: who waits for its result waits on, signals stay, and it gets all its retries
        again. Its stream begins anew.

        It does not return, and ``finally`` blocks run. Raises TypeError if the arguments do not
        match the signature, EncodeError, and StepError where `sleep` does, in a branch of `gather`,
        and in a direct call without a worker.

        Crash window: if the worker dies before the new arguments are recorded, the task runs again
        from its first line, in the same history, and comes here again. Once they are recorded, they
        stand: a run that comes here again with others goes on with those.
        """
        self.steps.continue_with(args, kwargs)

    def call(self, task: Any, /, *args: Any, key: str | None = None, **kwargs: Any) -> Any:
        """Run another task, wait for its end without a slot, and return its value.

        ::

            parcel = context.call(ship, order)
            parcel = context.call(ship.with_options(queue="slow"), order)

        * `task`: a task of the app, or one with options.
        * `key`: names this call instead of its number, as for a step.

        Its id derives from the call, so no run of this task starts it twice. If it fails,
        TaskFailed is raised here; it may also raise TaskCancelled, TaskExpired, and WaitTimeout
        after `max_wait`. All are recorded. Raises StepError where `sleep` does. In a direct call
        without a worker, its function is called.
        """
        return self.steps.call(task, args, kwargs, key)

    def patched(self, name: str) -> bool:
        """True if this run may take the new way of a flow that you changed.

        ::

            if context.patched("tax-first"):
                context.step("tax", add_tax, order)

        It is False for tasks that have recorded steps past this point: they were begun by the
        former code. Otherwise it is True, which is recorded.
        """
        return self.steps.patched(name)


def _seconds(given: float | timedelta | None) -> float | None:
    return given.total_seconds() if isinstance(given, timedelta) else given


def unsent_context(
    *,
    task: str,
    queue: str | None = None,
    task_id: str | None = None,
    saved: Any = None,
    resubmit_count: int = 0,
    delivery_count: int = 1,
    session: str | None = None,
    lease: float = math.inf,
    signals: Mapping[str, Iterable[Any]] | None = None,
) -> Context:
    """A context without a delivery, for a direct call and for tests.

    It has the parameters' values, a made-up id by default, and a lease of `lease` seconds.
    Checkpoints and the session's state stay in the context; an extension is always granted.
    """
    message = TaskMessage(
        id=task_id or str(uuid.uuid4()),
        task=task,
        queue=queue or DEFAULT_QUEUE,
        body=b"",
        session=session,
        resubmit_count=resubmit_count,
    )
    clock = SYSTEM_CLOCK
    held = TaskLease(
        clock.monotonic() + lease,
        ask=lambda seconds: held.renewed(clock.monotonic() + max(lease, seconds)),
        clock=clock,
    )
    return Context(
        message,
        delivery_count=delivery_count,
        lease=held,
        saved=saved,
        save=lambda _: None,
        session=None if session is None else Session(session, MemoryState()),
        steps=RunSteps(MemoryHome(signals), message, held),
    )


_EMIT_OUTSIDE: Final = (
    "a run that goes on does not call the step again, so the part would be missing: emit before or "
    "after the step"
)
_stopping: Final = threading.Event()
_only_slot: contextvars.ContextVar[bool] = contextvars.ContextVar("aztask-slot", default=False)
_current: contextvars.ContextVar[Context | None] = contextvars.ContextVar("aztask", default=None)


def current_context() -> Context | None:
    """The `Context` of the task that runs this code; None outside of tasks.

    It works in any function that a task calls, and for tasks without a context argument.
    """
    return _current.get()


def context_in(variables: contextvars.Context) -> Context | None:
    """The `Context` of the task to which these context variables belong; None if to none."""
    return variables.get(_current)


def set_current_context(context: Context | None) -> None:
    """Set the task that runs in this thread from now on; None for none. Workers call this."""
    _current.set(context)


def note_stopping() -> None:
    """Note that the worker is stopping, for all tasks of this process. Pool processes call this."""
    _stopping.set()


def set_only_slot(alone: bool) -> None:
    """Note whether the worker runs only one task at a time. Pool processes call this."""
    _only_slot.set(alone)  # such a process runs its tasks in the thread that sets this


def blocks_its_worker() -> bool:
    """True in a task whose worker runs one task at a time."""
    return _only_slot.get() and _current.get() is not None
