"""The result of an invocation that runs, or ran, on a worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from aztask.context import blocks_its_worker
from aztask.errors import (
    CodecError,
    ConfigurationError,
    KeyMissing,
    ResultDamaged,
    ResultTimeout,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
)
from aztask.message.codec import Codec
from aztask.steps.parts import parts_of
from aztask.steps.stream import Listener, StreamPart, stream_of
from aztask.stores.records.base import ResultStore, RunningTask, RunRecord, State, WorkerRecord
from aztask.stores.records.watcher import watcher_of
from aztask.support import clock
from aztask.support.elsewhere import say_ours
from aztask.typed.conversion import Conversion

logger = logging.getLogger(__name__)

R_co = TypeVar("R_co", covariant=True)


class TypedTask(Protocol):
    """The part of a `Task` that its result needs."""

    @property
    def conversion(self) -> Conversion:
        """Reads its results as its return annotation says."""
        ...


class Signaller(Protocol):
    """Reaches tasks that wait: `aztask.app.sending.Sends`."""

    def signal(self, task_id: str, name: str, value: Any) -> None:
        """Send a signal to a task."""
        ...

    def wake(self, task_id: str) -> None:
        """Wake a task that waits, if it does."""
        ...


class AsyncResult(Generic[R_co]):
    """A handle to one invocation: it keeps the task id and asks the result store for the rest.

    ::

        result = resize.delay("a.png", 200)
        result.get(timeout=30)

    `id` is the task id. Every method raises ConfigurationError if the app has no result store,
    BrokerUnavailable if the store is unreachable, and ForeignId if another app on the same result
    store uses the id.
    """

    __slots__ = ("_codec", "_decode", "_signals", "_store", "_tasks", "id")

    def __init__(
        self,
        task_id: str,
        store: Callable[[], ResultStore | None],
        decode: Callable[[bytes], Any],
        tasks: Mapping[str, TypedTask] = MappingProxyType({}),
        codec: Codec | None = None,
        signals: Signaller | None = None,
    ) -> None:
        """Called by aztask.

        * `tasks`: those whose results are read by their return annotations, by their names.
        * `codec`: reads the stream.
        * `signals`: sends signals; None for a task that cannot get one.
        """
        self._codec = codec
        self._signals = signals
        self.id = task_id
        self._store = store
        self._decode = decode
        self._tasks = tasks

    def __repr__(self) -> str:
        return f"<AsyncResult {self.id}>"

    @property
    def state(self) -> str:
        """The state as text: one of these, see docs/glossary.md.

        "pending", "started", "retrying", "snoozed", "waiting" (inside the task, for a time, a
        signal or another task), "succeeded", "failed", "cancelled", "expired", or "unreadable" if
        the stored row is damaged, which nothing repairs by itself.
        """
        record = self._record()
        return record.shown_state if record else State.PENDING.value

    def exists(self) -> bool:
        """True if the result store knows the task; an unknown id is "pending" as well.

        The store knows a task from its send on if you gave it a `task_id`, else from its first
        start on, and until it is purged (``result_retention``, 7 days by default). So a page that
        answers 404 for unknown ids sends its tasks with ids of its own::

            task_id = str(uuid4())
            resize.with_options(task_id=task_id).delay("a.png")
            ...
            if not app.result(task_id).exists():
                raise HTTPException(404)
        """
        return self._record() is not None

    def ready(self) -> bool:
        """True if the task has ended: succeeded, failed, cancelled or expired."""
        record = self._record()
        return record is not None and record.state.final

    def successful(self) -> bool:
        """True if the task has succeeded."""
        return self.state == State.SUCCEEDED

    def failed(self) -> bool:
        """True if the task has failed and will not be retried."""
        return self.state == State.FAILED

    @property
    def error(self) -> TaskFailed | None:
        """The last failure, also while the task is being retried; None if there is none."""
        store = self._results()
        for record in reversed(store.history(self.id)):
            if record.state is State.SUCCEEDED:
                return None
            if record.outcome is not None and record.outcome.parked:
                continue
            has_error = record.outcome is not None and record.outcome.error_type
            if has_error or (record.state is State.FAILED and record.damage):
                return _failure(record)
        return None

    @property
    def progress(self) -> Any:
        """The last checkpoint of the running task, as its worker reported it; else None.

        Workers report a new checkpoint within a second, if it has at most 500 bytes, for at most
        the 100 tasks that have run longest. It is None before the first checkpoint and once the
        task has ended. This reads the heartbeats of all workers: do not ask in a tight loop.
        """
        store = self._results()
        record = store.get(self.id)
        if record is not None and record.state.final:
            return None
        running = running_task(store.workers(), self.id)
        if running is None or running.progress is None:
            return None
        try:
            return self._decode(running.progress)
        except CodecError:
            return None  # written by a newer release; the task itself reads it

    def get(self, timeout: float | timedelta | None = None) -> R_co:
        """Wait for the task to end and return its value.

        The value is of the type that the task's return annotation names, if this app has registered
        the task; otherwise it is plain data, see docs/reference/arguments.md.

        * `timeout`: how long to wait, in seconds or as a ``timedelta``. None, the default, waits
          without limit; 0 only looks once.

        Raises TaskFailed, TaskCancelled or TaskExpired if the task ended that way, ResultTimeout if
        it did not end in time, KeyMissing if it is encrypted with a key that this program does not
        have, and ResultDamaged if the stored result cannot be read.
        """
        store = self._results()
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        give_up_at = None if timeout is None else clock.monotonic() + timeout
        version = 0
        while True:
            record = store.get(self.id)
            if record is not None and record.state.final:
                return self._value(record)
            remaining = 1.0 if give_up_at is None else give_up_at - clock.monotonic()
            if version == 0 and blocks_its_worker():
                logger.warning(
                    "a task waits for task %s, but its worker runs one task at a time: only "
                    "another worker can run it; raise -c, or do not wait inside a task",
                    self.id,
                )
            if remaining <= 0:
                raise self._late(record, timeout)
            version = store.wait_changed(version, min(remaining, 1.0))

    async def aget(self, timeout: float | timedelta | None = None) -> R_co:
        """`get` for coroutines: waits without blocking the event loop, and without a thread.

        Any number of coroutines may wait; they share one thread for each result store. Raises what
        `get` raises.
        """
        store = self._results()
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        record = await asyncio.to_thread(store.get, self.id) if timeout == 0 else None
        if record is None or not record.state.final:
            try:
                async with asyncio.timeout(timeout):
                    record = await watcher_of(store).ended(self.id)
            except TimeoutError:
                raise self._late(await asyncio.to_thread(store.get, self.id), timeout) from None
        return self._value(record)

    def stream(
        self, after: int | str = 0, timeout: float | timedelta | None = None
    ) -> Iterator[StreamPart]:
        """Yield what the task emits, part by part, until it has ended.

        ::

            for part in result.stream():
                if part.reset:                       # the task was retried, and began anew
                    words.clear()
                else:
                    words.append(part.value)

        * `after`: go on behind this part, by its `number` or its `id`. With an id, a reset in
          between is told.
        * `timeout`: for all of it, in seconds or as a ``timedelta``; None waits without limit.

        Raises at the end what `get` raises for a task that did not succeed; ResultTimeout,
        ResultDamaged for a row that cannot be read, and ValueError for a wrong `after`.
        """
        listener, give_up_at = self._listen(after, timeout)
        while True:
            record = listener.stream.record
            yield from listener.new()
            if record is not None:
                self._value(record)
                return
            left = listener.stream.due()
            if left:
                clock.current().sleep(self._left(left, give_up_at, timeout))
            else:
                listener.stream.look()

    async def astream(
        self, after: int | str = 0, timeout: float | timedelta | None = None
    ) -> AsyncIterator[StreamPart]:
        """`stream` for coroutines, as ``async for``: it never blocks the event loop.

        Any number of coroutines may listen: each stream is read once for all of this process.
        """
        listener, give_up_at = await asyncio.to_thread(self._listen, after, timeout)
        while True:
            record = listener.stream.record
            for part in listener.new():
                yield part
            if record is not None:
                self._value(record)
                return
            left = listener.stream.due()
            if left:
                await asyncio.sleep(self._left(left, give_up_at, timeout))
            else:
                await asyncio.to_thread(listener.stream.look)

    def _listen(
        self, after: int | str, timeout: float | timedelta | None
    ) -> tuple[Listener, float | None]:
        if self._codec is None:
            raise ConfigurationError("this result has no stream; use app.result(task_id)")
        store = self._results()
        stream = stream_of(store, parts_of(store, self._codec), self.id)
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        give_up_at = None if timeout is None else clock.monotonic() + timeout
        return Listener(stream, after, self._codec), give_up_at

    def _left(
        self, seconds: float, give_up_at: float | None, timeout: float | timedelta | None
    ) -> float:
        """How long to wait now. Raises ResultTimeout."""
        if give_up_at is None:
            return seconds
        left = give_up_at - clock.monotonic()
        if left <= 0:
            if isinstance(timeout, timedelta):
                timeout = timeout.total_seconds()
            raise self._late(self._record(), timeout)
        return min(seconds, left)

    def cancel(self, *, running: bool = False) -> bool:
        """Cancel the task before it starts. Returns False if it has already ended.

        * `running`: also stop a run that has started. Its worker raises `aztask.TaskStopped` in the
          task within about five seconds. False by default: a started run finishes.

        The result store keeps a cancellation as long as results (``result_retention``, 7 days by
        default). A task that waits for longer after it was cancelled, such as one with a `delay` of
        8 days, runs. A task that waits inside its code (`Context.wait_for`) ends at once.
        """
        marked = self._results().cancel(self.id, clock.wall(), running=running)
        if marked and self._signals is not None:
            self._signals.wake(self.id)
        return marked

    def signal(self, name: str, value: Any = None) -> None:
        """Send a signal to the task: its ``context.wait_for(name)`` returns `value`.

        ::

            app.result("order-7").signal("approved", {"by": "ann"})

        * `value`: anything that a task may return, at most 16 kB encoded.

        When this returns, the signal is stored. A task that waits goes on at once, or within five
        seconds if this program may not send to its queue. Signals that no wait has asked for yet
        are kept, at most 1,000 of one name; each wait takes the oldest.

        Raises NotFound if the result store does not know the task, SignalRefused if it has ended,
        ForeignId if another app uses its id, and EncodeError.
        """
        if self._signals is None:
            raise ConfigurationError(f"task {self.id} is not one of this app: it takes no signal")
        self._results()
        self._signals.signal(self.id, name, value)

    def forget(self) -> bool:
        """Delete all that the result store keeps of the task. Returns False if it kept nothing."""
        store = self._results()
        streams = None if self._codec is None else parts_of(store, self._codec)
        parts = 0 if streams is None else streams.forget(self.id)
        return store.forget(self.id) or parts > 0

    def _record(self) -> RunRecord | None:
        return self._results().get(self.id)

    def _results(self) -> ResultStore:
        store = self._store()
        if store is None:
            raise ConfigurationError(
                'no result store is configured; give the App results="local://" or another'
            )
        return store

    def _late(self, record: RunRecord | None, timeout: float | None) -> ResultTimeout:
        """The error of a wait that has ended before the task."""
        if record is None or record.state is State.PENDING:
            why = "no worker has started it; check that one runs, with aztask workers"
            why += ", and that the id is right" if record is None else ""
        elif record.state is State.STARTED:
            why = "it is running; ask again"
        else:
            why = f"it is {record.state.value} and will run again; ask again"
            if record.outcome is not None and record.outcome.parked:
                why = f"it waits: {record.outcome.error}"
        return ResultTimeout(f"task {self.id} did not end within {timeout or 0.0:g} s: {why}")

    def _value(self, record: RunRecord) -> R_co:
        if record.state is State.CANCELLED:
            raise TaskCancelled(f"task {self.id} was cancelled before it ran")
        if record.state is State.EXPIRED:
            raise TaskExpired(f"task {self.id} was not run: it had expired")
        if record.state is State.FAILED:
            raise _failure(record)
        if record.state is State.UNREADABLE:
            raise ResultDamaged(
                f"the row of task {self.id} in the result store is damaged ({record.damage}); "
                f"look for its message with aztask dlq show {self.id} and replay that, or send the "
                "task again with force=True"
            )
        if record.damage:
            raise self._damaged(record.damage)
        outcome = record.outcome
        if outcome is None or not outcome.value:
            return None  # type: ignore[return-value]
        try:
            value: R_co = self._decode(outcome.value)
        except KeyMissing:  # it is no damage, and a second run would not help
            raise
        except CodecError as error:
            raise self._damaged(str(error)) from None
        task = self._tasks.get(record.task)
        return value if task is None else task.conversion.result(value)

    def _damaged(self, reason: str) -> ResultDamaged:
        return ResultDamaged(
            f"the value of task {self.id} is damaged ({reason}); the task has ended, send it again "
            "with force=True to get its value"
        )


say_ours(
    AsyncResult,
    {
        "status": ".state",
        "result": ".get(timeout=...)",
        "wait": ".get(timeout=...)",
        "wait_result": "await .aget(timeout=...)",
        "info": ".progress, or .error",
        "traceback": ".error, whose traceback is a text",
        "revoke": ".cancel()",
        "collect": "aztask.as_completed(results)",
    },
)


def running_task(workers: Iterable[WorkerRecord], task_id: str) -> RunningTask | None:
    """The run of this task in the newest heartbeat that reports one; None if there is none."""
    for worker in sorted(workers, key=lambda each: each.seen_at, reverse=True):
        for task in worker.tasks:
            if task.task_id == task_id:
                return task
    return None


async def as_completed(
    results: Iterable[AsyncResult[R_co]], timeout: float | timedelta | None = None
) -> AsyncIterator[AsyncResult[R_co]]:
    """Yield results as their tasks end, the first one first; `AsyncResult.aget` then does not wait.

    ::

        async for result in as_completed(resize.map(images)):
            print(await result.aget())

    * `timeout`: for all of them together, in seconds or as a ``timedelta``; None, the default,
      waits without limit.

    Raises ResultTimeout if some have not ended in time. A task that failed is yielded like others.
    """
    waiting = {
        asyncio.ensure_future(watcher_of(result._results()).ended(result.id)): result
        for result in results
    }
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    give_up_at = None if timeout is None else time.monotonic() + timeout
    try:
        while waiting:
            left = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
            ended, _ = await asyncio.wait(
                waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended:
                raise ResultTimeout(
                    f"{len(waiting)} tasks did not end within {timeout:g} s; they go on, ask again"
                )
            for task in ended:
                task.result()
                yield waiting.pop(task)
    finally:
        for task in waiting:
            task.cancel()


def _failure(record: RunRecord) -> TaskFailed:
    outcome = record.outcome
    if outcome is None:
        return TaskFailed("Unknown", "the result store holds no outcome")
    if record.damage:
        return TaskFailed("Unknown", f"the error is damaged: {record.damage}")
    return TaskFailed(outcome.error_type, outcome.error, outcome.traceback)
