"""Runs the steps of one run of a task, or returns what was recorded of them.

The order of writes, and the crash windows
    the function of a step runs, its value is recorded, the task goes on
    killed in the function, or before the record: the step runs again, with the same `step_key`
    killed after the record: no later run of the task runs the step again

Rules
1. A step is one write, whatever happens; a step that is recorded costs none.
2. The lease is checked before a step, and before its record.
3. If the store cannot be reached, the run ends (`StepsUnavailable`) and goes on later: the function
   must not take the missing record for an error of the step.
4. After a `StepError` the run takes no further step, and fails even if the function returns.
5. A step emits nothing: a run that goes on takes the step's value from its record, and would not
   emit the parts again.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar

from aztask.errors import (
    BrokerUnavailable,
    CodecError,
    EncodeError,
    StepError,
    TaskControl,
    WaitTimeout,
)
from aztask.message.message import TaskMessage
from aztask.retry import RetryPolicy, describe
from aztask.settlement import Resubmit
from aztask.steps.history import (
    SLEEP,
    Branch,
    OpenStep,
    RunHistory,
    WantedEnd,
)
from aztask.steps.recorded import ChildEnd, encoded_error, error_from
from aztask.steps.records import CALL, DONE, FAILED, RETRYING, SIGNAL, StepRecord
from aztask.steps.suspension import StepDelayed, StepsUnavailable, Suspension, combined
from aztask.support.display import safe_str, short_repr

T = TypeVar("T")

NAME_CHARACTERS: Final = 200
TEXT_CHARACTERS: Final = 500


class Fence(Protocol):
    """The lease of the run: `aztask.context.TaskLease`, or one that a test moves."""

    def ensure(self) -> None:
        """Raise LeaseLost unless the lease is held."""
        ...


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The options of a step.

    * `key`: names this call, instead of its number among those of the same name.
    * `retry`: retries the step by itself; None leaves that to the task.
    * `record_errors`: record an error at once, also one that ends the run.
    """

    key: str | None = None
    retry: RetryPolicy | None = None
    record_errors: bool = False


@dataclass(frozen=True, slots=True)
class _Here:
    """Where code runs: in which branch of which run, and in which step."""

    run: RunSteps
    branch: str
    step: OpenStep | None = None


_here: contextvars.ContextVar[_Here | None] = contextvars.ContextVar("aztask-step", default=None)


class Histories(Protocol):
    """Gives the history of a run, see `aztask.steps.home`."""

    def history(self, message: TaskMessage) -> RunHistory:
        """The history that a run of this message continues. Raises StepError."""
        ...


class CallableTask(Protocol):
    """A task that `RunSteps.call` sends: `aztask.Task`, or an invocation with options."""

    @property
    def name(self) -> str:
        """As workers know it, such as ``shop.ship``."""
        ...

    def delay(self, *args: Any, **kwargs: Any) -> Any:
        """Send it; returns an `AsyncResult`."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it here and now, in a direct call without a worker."""
        ...


class RunSteps:
    """The steps of one run, as its `Context` asks for them. A context manager around the run."""

    __slots__ = ("_broken", "_fence", "_home", "_known", "_message", "_suspended")

    def __init__(self, home: Histories, message: TaskMessage, fence: Fence) -> None:
        self._home = home
        self._message = message
        self._fence = fence
        self._known: RunHistory | None = None
        self._broken: StepError | None = None
        self._suspended: dict[str, Suspension] = {}

    # -- the run -----------------------------------------------------------------------------

    def __enter__(self) -> RunSteps:
        """The function is about to be called."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The function has ended: if it returned, record the errors after which it went on."""
        if error is not None:
            return
        if self._broken is not None:
            raise self._broken
        for suspension in self._suspended.values():
            raise StepError(
                f"the task caught the end of its run ({suspension}) and returned; let "
                "BaseException pass, or catch Exception instead"
            ) from suspension
        if self._known is not None:
            with self._reaching(""):
                self._known.flush()

    @property
    def current(self) -> OpenStep | None:
        """The step whose function runs here; None outside of steps."""
        here = _here.get()
        return here.step if here is not None and here.run is self else None

    @property
    def _branch_name(self) -> str:
        here = _here.get()
        return here.branch if here is not None and here.run is self else ""

    @property
    def _history(self) -> RunHistory:
        if self._known is None:
            self._known = self._home.history(self._message)
        return self._known

    # -- steps -------------------------------------------------------------------------------

    def step(
        self,
        name: str,
        function: Callable[..., Any],
        options: StepOptions,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a step, or return what was recorded. For a coroutine function: awaitable."""
        _check(name, options)
        _check_call(name, function, options)
        if inspect.iscoroutinefunction(function):
            return self._coroutine(name, function, options, args, kwargs)
        found = self._begin(name, options, _line())
        if isinstance(found, StepRecord):
            return self._recorded(found)
        try:
            with self._inside(found):
                value = function(*args, **kwargs)
                if inspect.isawaitable(value):
                    _close(value)
                    raise StepError(f"step {name!r} gave an awaitable: pass its async def itself")
        except BaseException as error:
            self._failed(found, error, options)
            raise
        return self._done(found, value)

    async def _coroutine(
        self,
        name: str,
        function: Callable[..., Any],
        options: StepOptions,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        found = await self._apart(self._begin, name, options, _line())
        if isinstance(found, StepRecord):
            return await self._apart(self._recorded, found)
        try:
            with self._inside(found):
                value = await function(*args, **kwargs)
        except BaseException as error:
            await self._apart(self._failed, found, error, options)
            raise
        return await self._apart(self._done, found, value)

    async def _apart(self, function: Callable[..., T], *args: Any) -> T:
        """Call what may wait for the store: on a thread if that is a network."""
        with self._reaching(None):
            remote = self._history.keeper.remote
        return await asyncio.to_thread(function, *args) if remote else function(*args)

    def _begin(self, name: str, options: StepOptions, line: object) -> StepRecord | OpenStep:
        instead = "call the function itself there, or end the outer step first"
        self.refuse_inside(f"step {name!r} is asked for", instead)
        with self._reaching(self._branch_name):
            branch = self._branch(name, options, line)
            found = self._history.begin(branch, name, options.key)
        if isinstance(found, OpenStep):
            self._fence.ensure()
            if options.key is None:
                branch.running = found.record.label
        return found

    def _branch(self, name: str, options: StepOptions, line: object) -> Branch:
        branch = self._history.branch(self._branch_name)
        if options.key is not None:
            return branch
        branch.line = branch.line or line
        if branch.line != line or branch.running:
            raise self._refused(
                f"step {name!r} runs beside other steps, so its place in their order is not the "
                "same in every run: use context.gather, or give it a key= of its own"
            )
        return branch

    def refuse_inside(self, what: str, instead: str) -> None:
        """Raise StepError if a step's function asks for this; see rule 5."""
        if self.current is not None:
            raise self._refused(f"{what} inside step {self.current.record.label!r}; {instead}")

    def _refused(self, text: str) -> StepError:
        self._broken = self._broken or StepError(text)
        return self._broken

    @contextmanager
    def _reaching(self, branch: str | None) -> Iterator[None]:
        """What asks the store; see rules 3 and 4.

        * `branch`: None for a record, which is written even if another branch has ended the run.
        """
        if self._broken is not None:
            raise self._broken
        for name, suspension in self._suspended.items():
            if branch is not None and name.startswith(branch):
                raise suspension
        try:
            yield
        except BrokerUnavailable as error:
            self._suspended[self._branch_name] = unreachable = StepsUnavailable(str(error))
            raise unreachable from None
        except Suspension as suspension:
            self._suspended[self._branch_name] = suspension
            raise
        except StepError as broken:
            self._broken = self._broken or broken
            raise

    @contextmanager
    def _inside(self, step: OpenStep) -> Iterator[None]:
        """The function of a step runs in the block."""
        before = _here.set(_Here(self, step.branch.name, step))
        try:
            yield
        finally:
            _here.reset(before)
            if not step.record.keyed:
                step.branch.running = ""

    def _recorded(self, record: StepRecord) -> Any:
        """What the recorded step gave: its value is returned, its error is raised again."""
        with self._reaching(None):
            value = self._history.replayed(record)
        if record.state == FAILED:
            raise error_from(value)
        return value

    def _done(self, step: OpenStep, value: Any) -> Any:
        """Record the value of a step, and return it as every later run will."""
        try:
            data = self._history.keeper.encode(value)
        except EncodeError as error:
            raise EncodeError(f"the value of step {step.record.label}: {error}") from None
        with self._reaching(None):
            self._fence.ensure()
            made = self._history.end(step, DONE, data)
            if made.state != DONE or made.value != data:
                self._fence.ensure()  # another delivery may have recorded it
        return self._decoded(data, value) if made.value == data else self._recorded(made)

    def _decoded(self, data: bytes, value: Any) -> Any:
        """A tuple is a list in every later run, so it is one in the first."""
        try:
            return self._history.keeper.decode(data)
        except CodecError:  # a long value, which is stored apart
            return value

    def _failed(self, step: OpenStep, error: BaseException, options: StepOptions) -> None:
        """Note that a step raised, as its options say. Raises StepDelayed to retry it."""
        if not isinstance(error, Exception):
            return
        if isinstance(error, StepError):
            self._broken = self._broken or error
            return
        if options.retry is not None and not isinstance(error, TaskControl):
            self._retry(step, error, options.retry)
        data = encoded_error(self._history.keeper, error)
        if not options.record_errors:
            self._history.leave_open(step, data)
            return
        with self._reaching(None):
            self._fence.ensure()
            self._history.end(step, FAILED, data)

    def _retry(self, step: OpenStep, error: Exception, policy: RetryPolicy) -> None:
        """Raise StepDelayed if the step's own policy retries it.

        The time of the retry is in the row: a redelivery that comes earlier waits for it.
        """
        attempts = step.record.attempts
        counted = replace(self._message, resubmit_count=attempts, snooze_count=0)
        decided = policy.decide(error, counted)
        if not isinstance(decided, Resubmit):
            return
        why = describe(type(error).__name__, safe_str(error, TEXT_CHARACTERS))
        with self._reaching(None):
            self._fence.ensure()
            now = self._history.keeper.now()
            due = now + decided.delay
            self._history.end(step, RETRYING, b"", due=due, attempts=attempts + 1)
            raise StepDelayed(step.record.label, due, now, why)

    # -- waits -------------------------------------------------------------------------------

    def sleep(self, seconds: float, key: str | None) -> None:
        """Return once this time has passed since the first call; see `Context.sleep`."""
        options = StepOptions(key)
        _check(SLEEP, options)
        self._may_wait("sleep")
        with self._reaching(self._branch_name):
            branch = self._branch(SLEEP, options, _line())
            most = self._history.longest
            if not 0 <= seconds <= most:
                raise StepError(
                    f"a task sleeps for 0 to {most:g} seconds (max_wait), not {seconds!r}"
                )
            self._fence.ensure()
            self._history.sleep(branch, seconds, key)

    def wait_for(
        self, names: tuple[str, ...], seconds: float | None, key: str | None
    ) -> tuple[str, Any]:
        """Return the name and the value of the first signal; see `Context.wait_any`."""
        what = "wait_for" if len(names) == 1 else "wait_any"
        if not names:
            raise StepError("wait_any takes the names of signals")
        for each in names:
            _check(each, StepOptions(key))
        late = WaitTimeout(f"no signal {' or '.join(names)} came {_within(seconds)}")
        wanted = WantedEnd(SIGNAL, "|".join(names), names, 0.0, b"")
        name, value = self._wait(what, wanted, seconds, late, key)
        return name, value

    def _wait(
        self, what: str, wanted: WantedEnd, seconds: float | None, late: Exception, key: str | None
    ) -> Any:
        self._may_wait(what)
        with self._reaching(self._branch_name):
            branch = self._branch(wanted.name, StepOptions(key), _line())
            most = self._history.longest
            if seconds is not None and not 0 <= seconds <= most:
                raise StepError(
                    f"a task waits for 0 to {most:g} seconds (max_wait), not {seconds!r}"
                )
            self._fence.ensure()
            data = encoded_error(self._history.keeper, late)
            limited = replace(wanted, seconds=most if seconds is None else seconds, late=data)
            found = self._history.wait(branch, limited, key)
        return self._recorded(found)

    def call(
        self, task: CallableTask, args: tuple[Any, ...], kwargs: dict[str, Any], key: str | None
    ) -> Any:
        """Send a task under an id of this step, and return its value; see `Context.call`."""
        if not isinstance(getattr(task, "name", None), str) or not hasattr(task, "delay"):
            raise StepError(
                f"call takes a task of the app and its arguments, not {type(task).__name__}"
            )
        self._may_wait("call")
        with self._reaching(self._branch_name):
            parks = self._history.keeper.parks
        if not parks:
            return self.step(task.name, task, StepOptions(key), args, kwargs)

        def start() -> str:
            step = self.current
            assert step is not None  # noqa: S101  # it runs inside the step
            step.calls = True
            return str(task.delay(*args, **kwargs).id)

        child = self.step(f"start {task.name}"[:NAME_CHARACTERS], start, StepOptions(key), (), {})
        late = WaitTimeout(f"task {task.name} {child} did not end {_within(None)}")
        wanted = WantedEnd(CALL, task.name, (child,), 0.0, b"", ChildEnd())
        return self._wait("call", wanted, None, late, key)

    def _may_wait(self, what: str) -> None:
        if self.current is not None:
            raise self._refused(
                f"{what} is called inside step {self.current.record.label!r}; wait in the task "
                "itself, between its steps"
            )
        if self._message.session is not None:
            raise self._refused(
                f"{what} is called in a task of session {self._message.session!r}: those behind it "
                "would overtake it; send the task without a session"
            )

    def patched(self, name: str) -> bool:
        """True if this run takes the new way of a changed flow; see `Context.patched`."""
        _check(name, StepOptions())
        with self._reaching(self._branch_name):
            branch = self._branch(name, StepOptions(), _line())
            return self._history.patched(branch, name)

    # -- branches ----------------------------------------------------------------------------

    def gather(self, calls: Sequence[Any]) -> Any:
        """Run branches side by side; see `Context.gather`."""
        if calls and all(inspect.isawaitable(call) for call in calls):
            return self._gather_awaitables(calls)
        if not all(callable(call) for call in calls):
            for call in calls:
                _close(call)
            raise TypeError("gather takes functions without arguments, or coroutines; not both")
        names = self._names(len(calls))

        def run(name: str, call: Callable[[], Any]) -> Any:
            _here.set(_Here(self, name))
            return call()

        with ThreadPoolExecutor(max(1, len(calls)), "aztask-branch") as threads:
            futures = [
                threads.submit(contextvars.copy_context().run, run, name, call)
                for name, call in zip(names, calls, strict=True)
            ]
            ends = [_End.of(future.result) for future in futures]
        return _values(ends)

    async def _gather_awaitables(self, calls: Sequence[Awaitable[Any]]) -> list[Any]:
        names = await self._apart(self._names, len(calls), _line())

        async def run(name: str, call: Awaitable[Any]) -> _End:
            _here.set(_Here(self, name))
            try:
                return _End(await call)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001  # raised once all have ended
                return _End(None, error)

        tasks = [run(name, call) for name, call in zip(names, calls, strict=True)]
        return _values(await asyncio.gather(*tasks))

    def _names(self, count: int, line: object = None) -> list[str]:
        """Names for the branches of a `gather`: the same in every run."""
        with self._reaching(self._branch_name):
            branch = self._branch("gather", StepOptions(), line or _line())
            self._history.flush(branch)
            branch.gathers += 1
            return [f"{branch.name}{branch.gathers}.{index + 1}/" for index in range(count)]


def _check(name: object, options: StepOptions) -> None:
    for what, text in (("name", name), ("key", "" if options.key is None else options.key)):
        if (
            not isinstance(text, str)
            or len(text) > NAME_CHARACTERS
            or (what == "name" and not text)
        ):
            raise StepError(
                f"a step's {what} is a text of at most {NAME_CHARACTERS} characters, not {text!r}"
            )


def _check_call(name: str, function: object, options: StepOptions) -> None:
    """Refuse what no retry of the task could call, before anything runs. Raises StepError."""
    if not callable(function):
        _close(function)
        # Its type, not its value: this may be what the function returned, and it goes to the log.
        raise StepError(
            f"step {name!r} takes a function and its arguments, as in step({name!r}, charge, "
            f"card), not a value of type {type(function).__name__}"
        )
    if options.retry is not None and not isinstance(options.retry, RetryPolicy):
        raise StepError(
            f"step {name!r}: retry takes a RetryPolicy, not {short_repr(options.retry)}"
        )


def _within(seconds: float | None) -> str:
    return "within max_wait" if seconds is None else f"within {seconds:g} s"


def _line() -> object:
    """The thread, and the asyncio task in it, if there is one."""
    try:
        return threading.get_ident(), asyncio.current_task()
    except RuntimeError:
        return threading.get_ident(), None


def _close(value: Any) -> None:
    if isinstance(value, Coroutine):
        value.close()


@dataclass(frozen=True, slots=True)
class _End:
    """How a branch ended: with a value, or with an error that `gather` raises later."""

    value: Any
    error: BaseException | None = None

    @classmethod
    def of(cls, result: Callable[[], Any]) -> _End:
        """The end that this call reports."""
        try:
            return cls(result())
        except BaseException as error:  # noqa: BLE001  # raised once all have ended
            return cls(None, error)


def _values(ends: Sequence[_End]) -> list[Any]:
    """The values; raises what ends the run, if anything does, else the first error."""
    errors = [each.error for each in ends if each.error is not None]
    suspended = [error for error in errors if isinstance(error, Suspension)]
    for error in sorted(errors, key=lambda each: isinstance(each, Exception)):
        raise combined(suspended) if isinstance(error, Suspension) else error
    return [each.value for each in ends]
