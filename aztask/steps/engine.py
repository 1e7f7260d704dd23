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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, NoReturn, Protocol, TypeVar

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
from aztask.steps.records import ANY, CALL, DONE, FAILED, RETRYING, SIGNAL, StepRecord
from aztask.steps.stepoptions import (
    NAME_CHARACTERS,
    CallableTask,
    StartedTask,
    StepOptions,
    check_call,
    check_signal,
    check_step,
    close,
    line_here,
)
from aztask.steps.suspension import (
    BranchEnd,
    StepDelayed,
    StepsUnavailable,
    Suspension,
    values_of,
)
from aztask.support.display import safe_str

T = TypeVar("T")

TEXT_CHARACTERS: Final = 500


class Fence(Protocol):
    """The lease of the run: `aztask.context.TaskLease`, or one that a test moves."""

    def ensure(self) -> None:
        """Raise LeaseLost unless the lease is held."""
        ...


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


class RunSteps:
    """The steps of one run, as its `Context` asks for them. A context manager around the run."""

    __slots__ = ("_broken", "_direct", "_fence", "_home", "_known", "_message", "_suspended")

    def __init__(self, home: Histories, message: TaskMessage, fence: Fence) -> None:
        self._home = home
        self._message = message
        self._fence = fence
        self._known: RunHistory | None = None
        self._broken: StepError | None = None
        self._suspended: dict[str, Suspension] = {}
        self._direct: dict[str, Any] = {}

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
    def branch_name(self) -> str:
        """The branch of `gather` in which the caller runs; "" for the main line."""
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
        check_step(name, options)
        check_call(name, function, options)
        if inspect.iscoroutinefunction(function):
            return self._coroutine(name, function, options, args, kwargs)
        found = self._begin(name, options, line_here())
        if isinstance(found, StepRecord):
            return self._recorded(found)
        try:
            with self._inside(found):
                value = function(*args, **kwargs)
                if inspect.isawaitable(value):
                    close(value)
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
        found = await self._apart(self._begin, name, options, line_here())
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
        with self._reaching(self.branch_name):
            branch = self._branch(name, options, line)
            found = self._history.begin(branch, name, options.key)
        if isinstance(found, OpenStep):
            self._fence.ensure()
            if options.key is None:
                branch.running = found.record.label
        return found

    def _branch(self, name: str, options: StepOptions, line: object) -> Branch:
        branch = self._history.branch(self.branch_name)
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
            self._suspended[self.branch_name] = unreachable = StepsUnavailable(str(error))
            raise unreachable from None
        except Suspension as suspension:
            self._suspended[self.branch_name] = suspension
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
        check_step(SLEEP, options)
        self._may_wait("sleep")
        with self._reaching(self.branch_name):
            branch = self._branch(SLEEP, options, line_here())
            most = self._history.longest
            if not 0 <= seconds <= most:
                raise StepError(
                    f"a task sleeps for 0 to {most:g} seconds (max_wait), not {seconds!r}"
                )
            self._fence.ensure()
            self._history.sleep(branch, seconds, key)

    def wait_for(self, name: str, seconds: float | None, key: str | None) -> Any:
        """Return the value of the first signal of a name; see `Context.wait_for`."""
        return self._wait_any("wait_for", (name,), seconds, key)[1]

    def wait_any(
        self, wanted: tuple[str | StartedTask, ...], seconds: float | None, key: str | None
    ) -> tuple[str | StartedTask, Any]:
        """Return what came first, and its value; see `Context.wait_any`."""
        if not wanted:
            raise StepError("wait_any takes names of signals, and tasks of context.start")
        return self._wait_any("wait_any", wanted, seconds, key)

    def _wait_any(
        self,
        what: str,
        wanted: tuple[str | StartedTask, ...],
        seconds: float | None,
        key: str | None,
    ) -> tuple[str | StartedTask, Any]:
        started = {each.id: each for each in wanted if isinstance(each, StartedTask)}
        names = tuple(each for each in wanted if not isinstance(each, StartedTask))
        for each in names:
            check_signal(each, StepOptions(key))
        texts = [f"no signal {' or '.join(names)} came"] if names else []
        texts += [f"task {each.name} {each.id} did not end" for each in started.values()]
        late = WaitTimeout(f"{', and '.join(texts)} {_within(seconds)}")
        text = "|".join([*names, *(each.name for each in started.values())])[:NAME_CHARACTERS]
        kind = ANY if started else SIGNAL
        end = WantedEnd(kind, text, names, tuple(started), ChildEnd())
        direct = next((each for each in started.values() if each.id in self._direct), None)
        try:
            found, value = self._wait(what, end, seconds, late, key)
        except WaitTimeout:
            if direct is None:
                raise
            return direct, self._direct[direct.id]
        return started.get(found, found), value

    def _wait(
        self, what: str, wanted: WantedEnd, seconds: float | None, late: Exception, key: str | None
    ) -> Any:
        self._may_wait(what)
        with self._reaching(self.branch_name):
            branch = self._branch(wanted.name, StepOptions(key), line_here())
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
        self._may_wait("call")
        child = self.start("call", task, args, kwargs, key)
        if child.id in self._direct:
            return self._direct[child.id]
        late = WaitTimeout(f"task {child.name} {child.id} did not end {_within(None)}")
        wanted = WantedEnd(CALL, child.name, (), (child.id,), ChildEnd())
        return self._wait("call", wanted, None, late, key)

    def start(
        self,
        what: str,
        task: CallableTask,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: str | None,
    ) -> StartedTask:
        """Send a task under an id of this step; see `Context.start`. what: the caller's name."""
        if not isinstance(getattr(task, "name", None), str) or not hasattr(task, "delay"):
            raise StepError(
                f"{what} takes a task of the app and its arguments, not {type(task).__name__}"
            )
        with self._reaching(self.branch_name):
            parks = self._history.keeper.parks
        if not parks:
            value = self.step(task.name, task, StepOptions(key), args, kwargs)
            child = f"direct-{len(self._direct) + 1}"
            self._direct[child] = value
            return StartedTask(child, task.name)

        def start() -> str:
            step = self.current
            assert step is not None  # noqa: S101  # it runs inside the step
            step.calls = True
            return str(task.delay(*args, **kwargs).id)

        child = self.step(f"start {task.name}"[:NAME_CHARACTERS], start, StepOptions(key), (), {})
        return StartedTask(child, task.name)

    def continue_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        """End the run, and go on with other arguments; see `Context.continue_with`."""
        self._may_wait("continue_with")
        if self.branch_name:
            raise self._refused("continue_with is called in a branch of gather; call it behind it")
        with self._reaching(""):
            branch = self._branch("continue_with", StepOptions(), line_here())
            self._fence.ensure()
            self._history.renew(branch, args, kwargs)
        raise AssertionError("it has raised Renewal")

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
        check_step(name, StepOptions())
        with self._reaching(self.branch_name):
            branch = self._branch(name, StepOptions(), line_here())
            return self._history.patched(branch, name)

    # -- branches ----------------------------------------------------------------------------

    def gather(self, calls: Sequence[Any]) -> Any:
        """Run branches side by side; see `Context.gather`."""
        if calls and all(inspect.isawaitable(call) for call in calls):
            return self._gather_awaitables(calls)
        if not all(callable(call) for call in calls):
            for call in calls:
                close(call)
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
            ends = [BranchEnd.of(future.result) for future in futures]
        return values_of(ends)

    async def _gather_awaitables(self, calls: Sequence[Awaitable[Any]]) -> list[Any]:
        names = await self._apart(self._names, len(calls), line_here())

        async def run(name: str, call: Awaitable[Any]) -> BranchEnd:
            _here.set(_Here(self, name))
            try:
                return BranchEnd(await call)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001  # raised once all have ended
                return BranchEnd(None, error)

        tasks = [run(name, call) for name, call in zip(names, calls, strict=True)]
        return values_of(await asyncio.gather(*tasks))

    def _names(self, count: int, line: object = None) -> list[str]:
        """Names for the branches of a `gather`: the same in every run."""
        with self._reaching(self.branch_name):
            branch = self._branch("gather", StepOptions(), line or line_here())
            self._history.flush(branch)
            branch.gathers += 1
            return [f"{branch.name}{branch.gathers}.{index + 1}/" for index in range(count)]


def _within(seconds: float | None) -> str:
    return "within max_wait" if seconds is None else f"within {seconds:g} s"
