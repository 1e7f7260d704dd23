"""One delivery's task in a pool process: reads the call, and turns its end into an answer.

Rules
1. Whatever task code raises, `SystemExit` and `KeyboardInterrupt` included, is a failed attempt.
   The decision of the task's retry policy is the answer.
2. Texts are cleaned here, at their source (`aztask.support.display.storable`), so that every store
   and service can take them.
3. A process that a task forks has a copy of this one's stack. It must neither answer nor take the
   next delivery: when the task's function returns there, the process ends.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Protocol

from aztask.app import App
from aztask.context import Context, TaskLease
from aztask.errors import (
    BrokerUnavailable,
    CodecError,
    ConfigurationError,
    EncodeError,
    KeyMissing,
    LeaseLost,
    Reject,
    Retry,
    TaskControl,
    TaskStopped,
    WorkerStopping,
    did_you_mean,
)
from aztask.hooks import Hook
from aztask.message.message import TaskMessage
from aztask.retry import describe
from aztask.sending.sessionrules import strategy_in_session
from aztask.session import Session, StateCodec
from aztask.settlement import REASON_LIMIT, DeadLetter, Decision, to_record
from aztask.steps.emitting import Emission, drained
from aztask.steps.engine import RunSteps
from aztask.steps.home import StepHome
from aztask.steps.records import is_renewed
from aztask.steps.suspension import Parked, Renewal, StepDelayed, Suspension
from aztask.stores.payloads.store import PayloadKind
from aztask.support.display import hide, mask, safe_str, storable, traceback_of, unhide
from aztask.support.failpoint import hit_in_pool
from aztask.task import Task
from aztask.taskoptions import positive
from aztask.worker.logs import next_step
from aztask.worker.pool.fetching import Fetching, PayloadUnavailable, undecodable
from aztask.worker.pool.packets import Answers
from aztask.workflows.inputs import first_argument

logger = logging.getLogger(__name__)

MACHINERY: Final = ("aztask", "asyncio", "contextlib")
"""Packages whose frames come before the user's first one."""

NAME_CHARACTERS = 200
ERROR_CHARACTERS = 4_000
TRACEBACK_CHARACTERS = 16_000


class _UndecodableError(Exception):
    """The call cannot be read. `cause`: why."""

    def __init__(self, cause: CodecError) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A delivery that was read.

    * `number`: the worker's number of it.
    * `enqueued_at`: UTC epoch seconds.
    * `started`: on the clock of the deadlines.
    * `given`: the input of a task of a workflow that takes a value, else empty.
    """

    number: int
    message: TaskMessage
    delivery_count: int
    enqueued_at: float
    lease: TaskLease
    started: float
    given: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A task that is ready to run, with its context and its arguments."""

    task: Task[..., Any]
    context: Context
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def begin(self) -> Any:
        """Call the function: returns its value, or the coroutine that will return it."""
        value: Any = self.task.call(self.context, self.args, self.kwargs)
        is_generator, is_async = inspect.isgenerator(value), inspect.isasyncgen(value)
        if is_generator:
            return drained(value, self.context.emission)
        return self._drained(value) if is_async else value

    async def _drained(self, values: AsyncGenerator[Any, None]) -> None:
        async for value in values:
            await self.context.aemit(value)


class Outbox(Protocol):
    """Where packets to the worker go: `aztask.worker.pool.packets.Packets`, mostly."""

    def send(self, value: Any, /) -> object:
        """Send one packet to the worker."""


class RunReader:
    """Reads calls and makes answers, for all slots of a pool process."""

    def __init__(self, app: App, outbox: Outbox, answers: Answers, worker: int) -> None:
        """worker: the process id of the worker."""
        self._app = app
        self._outbox = outbox
        self._answers = answers
        self._worker = worker
        self._pid = os.getpid()
        self.fetching = Fetching(app, worker)
        self._steps = StepHome(app, worker)

    def open(self, delivery: OpenRun) -> PreparedCall:
        """Read the call of a message, and ask for the lease that it needs."""
        number, message, lease = delivery.number, delivery.message, delivery.lease
        task = self._app.tasks.get(message.task)
        try:
            if task is None:
                raise EncodeError(f"the pool process has not registered the task {message.task!r}")
            args, kwargs = self.fetching.arguments(task, message)
            if delivery.given and not is_renewed(message):
                args = (first_argument(self._app.codec, *delivery.given[0]), *args)
            hide(message.id, task.conversion.secret_texts(args, kwargs))
            args, kwargs = task.conversion.read(args, kwargs)
            saved = self._app.codec.decode_value(message.saved) if message.saved else None
        except CodecError as error:
            raise _UndecodableError(error) from None
        except BrokerUnavailable as error:
            raise PayloadUnavailable(str(error)) from None
        context = Context(
            message,
            delivery_count=delivery.delivery_count,
            enqueued_at=delivery.enqueued_at,
            lease=lease,
            saved=saved,
            save=self._saving(number, message, lease),
            session=self._session(number, message, lease) if message.session else None,
            steps=RunSteps(self._steps, message, lease),
            spending=TaskSpending(self, number, task),
            emission=self.emission(message, delivery.delivery_count, lease),
        )
        if task.lease_of is not None:
            lease_seconds = positive(task.lease_of(*args, **kwargs), f"{task.name}: lease")
            self.send(["extend", number, lease_seconds])
        return PreparedCall(task, context, args, kwargs)

    def emission(self, message: TaskMessage, delivery_count: int, lease: TaskLease) -> Emission:
        """Where a run emits its parts; a simulation has one without a thread."""
        return Emission(self._app, message, delivery_count, lease)

    def hooks(self, context: Context) -> AbstractContextManager[object]:
        """The app's hooks around a run, and what its steps leave to do at its end."""
        hook = self._app.hooks.run
        return _hooked(hook, context) if hook else _run(context)

    def value(self, value: Any, call: PreparedCall) -> list[Any]:
        """The answer for a task that returned `value`. Raises EncodeError, BrokerUnavailable."""
        return self.done(self.encoded(value, call), call.context.task_id)

    def encoded(self, value: Any, call: PreparedCall) -> bytes:
        """The value that a task returned, encoded. Raises EncodeError."""
        hit_in_pool("ran", self._worker)
        value = call.task.conversion.written_result(value)
        return self._app.codec.encode_value(value, large=self.fetching.large)

    def done(self, data: bytes, task_id: str) -> list[Any]:
        """The answer for the task that returned this encoded value. Raises BrokerUnavailable.

        Crash window: if the process dies after a large value is stored and before the outcome is
        recorded, the value is stored without a record that names it.
        """
        if len(data) > self.fetching.result_bytes:
            data = self.fetching.stored(PayloadKind.RESULT, data, task_id)
        unhide(task_id)
        return ["done", data]

    def error(self, error: BaseException, message: TaskMessage) -> list[Any]:
        """The answer for a run that ended with an error, of whatever kind."""
        try:
            return self._ended(error, message)
        finally:
            unhide(message.id)

    def _ended(self, error: BaseException, message: TaskMessage) -> list[Any]:
        if isinstance(error, LeaseLost):
            return ["lost"]
        if isinstance(error, WorkerStopping):
            return ["stopped"]
        if isinstance(error, Suspension):
            return self._suspended(error, message)
        if isinstance(error, _UndecodableError):
            dead = undecodable(error.cause)
            if self._app.codec.encrypts and not isinstance(error.cause, KeyMissing):
                dead = replace(dead, description=self._shown(error.cause, message, 0))
            return ["failed", to_record(dead), *_described(error.cause)]
        return self._failed(self._app.tasks.get(message.task), error, message)

    def _suspended(self, error: Suspension, message: TaskMessage) -> list[Any]:
        """The answer for a run that goes on later; see `aztask.steps.suspension`."""
        self.check_fork(message)
        if isinstance(error, Parked):
            return ["parked", error.delay, str(error), error.since, list(error.waits)]
        if isinstance(error, Renewal):
            return ["renewed", str(error)]
        settlement = error.settlement(self._app.settings.unknown_task_grace_seconds)
        dead = isinstance(settlement, DeadLetter)
        text, follows = safe_str(error, ERROR_CHARACTERS), "dead-lettered" if dead else "continued"
        shown = text
        if isinstance(error, StepDelayed) and self._app.codec.encrypts:
            shown = "a step has failed, and is retried"  # the text has that of the step's error
        line = "task %s %s has stopped, to be %s: %s"
        logger.log(
            logging.WARNING if dead else logging.INFO,
            line,
            message.task,
            message.id,
            follows,
            shown,
        )
        return ["failed", to_record(settlement), error.kind, storable(mask(text)), ""]

    def check_fork(self, message: TaskMessage) -> None:
        """End this process if a task forked it (rule 3)."""
        if os.getpid() != self._pid:
            _end_forked(message, None)

    def _failed(
        self, task: Task[..., Any] | None, error: BaseException, message: TaskMessage
    ) -> list[Any]:
        if os.getpid() != self._pid:
            _end_forked(message, error)
        trim_traceback(error)
        # A returned value is encoded after the task's code has ended: no frame would help.
        traced = not isinstance(error, EncodeError) or shows_user_code(error)
        policy = task.retry if task is not None else self._app.retry
        if isinstance(error, PayloadUnavailable):
            verdict: Any = policy.decide(error.put_off(message), message)
        elif isinstance(error, EncodeError):
            # Another run would most likely return the same value, so it is not retried.
            verdict = DeadLetter("unserialisable-result", safe_str(error, REASON_LIMIT))
        else:
            verdict = policy.decide(error, message)
        private = self._app.codec.encrypts
        if private and isinstance(verdict, DeadLetter):
            verdict = replace(verdict, description=self._shown(error, message, 0))
        if not isinstance(error, TaskControl | TaskStopped | PayloadUnavailable):
            logger.warning(
                "task %s %s failed, %s: %s",
                message.task, message.id, self._next_step(task, verdict, message),
                self._shown(error, message, ERROR_CHARACTERS),
                exc_info=error if traced and not private else None,
            )  # fmt: skip
        elif isinstance(error, Retry | Reject | PayloadUnavailable) or isinstance(
            verdict, DeadLetter
        ):
            logger.warning(
                "task %s %s raised %s, %s",
                message.task, message.id, self._shown(error, message, 500),
                self._next_step(task, verdict, message),
            )  # fmt: skip
        kind, text, trace = _described(error)
        return ["failed", to_record(verdict), kind, text, trace if traced else ""]

    def _shown(self, error: BaseException, message: TaskMessage, characters: int) -> str:
        """An error for logs and dead letters: its type and text, and with encryption its place.

        The text may quote an argument. It is in the result, encrypted.
        """
        name = type(error).__name__
        if not self._app.codec.encrypts:
            return describe(name, safe_str(error, characters))
        return f"{name}{_place(error)}; its text is encrypted: aztask result {message.id}"

    def _next_step(
        self, task: Task[..., Any] | None, verdict: Decision, message: TaskMessage
    ) -> str:
        """What the worker will do now, for the log."""
        strategy: str = self._app.settings.retry_strategy
        if message.session:
            strategy = strategy_in_session(
                task, self._app.settings.retry_strategy, ordered=message.ordered
            )
        elif task is not None:
            strategy = task.retry_strategy
        return next_step(
            verdict,
            message,
            max_retries=(task.retry if task is not None else self._app.retry).max_retries,
            strategy=strategy,
            now=time.time(),
            settled=task is not None and task.delivery == "at-most-once",
        )

    def _saving(self, number: int, message: TaskMessage, lease: TaskLease) -> Callable[[Any], None]:
        """The function that stores the checkpoints of a delivery."""
        fetching = self.fetching
        last: bytes | None = None

        def save(state: Any) -> None:
            nonlocal last
            data = self._app.codec.encode_value(state, large=fetching.large)
            if len(data) > fetching.checkpoint_bytes:
                data = fetching.stored(PayloadKind.CHECKPOINT, data, message.id)
            self.send(["save", number, data])
            try:
                self._answers.wait(number, lease)
            except CodecError:  # the previous checkpoint stays
                fetching.discard(data, message.id)
                raise
            # One that the message had may be needed by its dead letter: it stays until the end.
            fetching.discard(last, message.id)
            last = data

        return save

    def spent(self, number: int, task: Task[..., Any], limit: str, amount: int) -> None:
        """Tell the worker what a run has used of a limit. Raises ConfigurationError."""
        found = {each.name for each in self._app.limits_of(task) if each.cost is not None}
        if limit not in found:
            raise ConfigurationError(
                f"task {task.name!r} has no limit {limit!r} with a cost; name it in "
                f"limits=[...] of the task, and give it cost=.{did_you_mean(limit, tuple(found))}"
            )
        self.send(["spent", number, limit, amount])

    def _session(self, number: int, message: TaskMessage, lease: TaskLease) -> Session:
        name = message.session or ""
        codec = StateCodec(self._app.codec, message.queue, name)
        return Session(name, _WorkersState(self, number, lease, codec))

    def state_of(self, number: int, lease: TaskLease) -> bytes | None:
        """Ask the worker for the state of a run's session. Raises LeaseLost and what it answers."""
        self.send(["state", number])
        state: bytes | None = self._answers.wait(number, lease)
        return state

    def set_state(self, number: int, state: bytes | None, lease: TaskLease) -> None:
        """Have the worker store the state of a run's session. Raises as `state_of` does."""
        self.send(["set-state", number, state])
        self._answers.wait(number, lease)

    def send(self, packet: list[Any]) -> None:
        """Send a packet to the worker. Raises RuntimeError in a process that a task forked."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "a process that a task forked cannot use the task's context; "
                "return the value to the task and store it there"
            )
        self._outbox.send(packet)


@dataclass(frozen=True, slots=True)
class _WorkersState:
    """The state of a run's session, which its worker reads and writes."""

    reader: RunReader
    number: int
    lease: TaskLease
    codec: StateCodec

    def load(self) -> Any:
        self.lease.ensure()
        return self.codec.decode(self.reader.state_of(self.number, self.lease))

    def store(self, value: Any) -> None:
        self.lease.ensure()
        self.reader.set_state(self.number, self.codec.encode(value), self.lease)


@dataclass(frozen=True, slots=True)
class TaskSpending:
    """Tells the worker what one run has used, for its `Context`."""

    reader: RunReader
    number: int
    task: Task[..., Any]

    def spent(self, limit: str, amount: int) -> None:
        """Note a further amount. Raises ConfigurationError for a limit that does not apply."""
        self.reader.spent(self.number, self.task, limit, amount)


@contextmanager
def _hooked(hook: Hook[Context], context: Context) -> Iterator[None]:
    """The hooks outside, so that they see what the end of the steps raises."""
    with hook.around(context), _run(context):
        yield


@contextmanager
def _run(context: Context) -> Iterator[None]:
    """What the run emits is written before its end is told, in whatever way it ends."""
    with context.emission, context.steps:
        yield


def _end_forked(message: TaskMessage, error: BaseException | None) -> NoReturn:
    """End a process that the task forked, as if its program had ended (rule 3)."""
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        logger.warning(
            "task %s %s: a process that it forked ended with an error; the task continues",
            message.task, message.id, exc_info=error,
        )  # fmt: skip
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status & 0xFF)


def _described(error: BaseException) -> tuple[str, str, str]:
    """(type, text, traceback) of an error, for a record: cut, cleaned, secrets masked."""
    try:
        text = str(error)
    except BaseException as broken:  # noqa: BLE001  # a user's __str__ may fail or exit as well
        text = f"(its text cannot be read: {type(broken).__name__})"
    return (
        storable(type(error).__name__, NAME_CHARACTERS),
        storable(mask(text[: 2 * ERROR_CHARACTERS]), ERROR_CHARACTERS),
        storable(
            mask(traceback_of(error)[-2 * TRACEBACK_CHARACTERS :])[-TRACEBACK_CHARACTERS:],
            TRACEBACK_CHARACTERS,
        ),
    )


def _place(error: BaseException) -> str:
    """Where an error was raised, `` at FILE:LINE`` without the file's folder; "" if unknown."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"


def trim_traceback(error: BaseException) -> None:
    """Remove the frames before the first one of the user's code.

    A traceback without any such frame stays whole: the error came from the machinery itself.
    """
    trace = error.__traceback__
    while trace is not None and _machinery(trace):
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace


def shows_user_code(error: BaseException) -> bool:
    """Whether a frame of the traceback is the user's."""
    trace = error.__traceback__
    while trace is not None and _machinery(trace):
        trace = trace.tb_next
    return trace is not None


def _machinery(trace: TracebackType) -> bool:
    module = str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] in MACHINERY
