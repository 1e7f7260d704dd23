"""What one run emits: collected, and written by a thread in batches.

Rules
1. `emit` asks no server: it waits only while `MOST_BYTES` are not written yet.
2. One batch in 100 ms, so a task costs at most 10 requests a second, whatever it emits.
3. The end of the run waits until all of it is written, at once. If the store cannot be reached for
   `END_SECONDS`, the run ends as if it had been killed, and starts again later. A coroutine waits
   for it on a thread, so that others go on.
4. A run whose lease is lost writes nothing more.
5. A run that waits leaves a mark, after how many parts. The run that goes on counts from the newest
   mark: what an attempt that failed in between has emitted is not part of the stream.
6. Branches of a `gather` emit in another order in each run, so no run could go on counting behind
   them: a run that waits after one of them has emitted fails.
7. A delivery of a run that was delivered before may emit nothing, where the one before did. So it
   looks for such a take at its end, and begins an empty one. A run that is given back does the
   same at once, because some services then count the next delivery under the same number.
8. A run that continues with other arguments takes the mark back: what the new history emits is a
   stream of its own, and has its own numbers. So does a run that was delivered before, if it ends
   without a mark of its own: the delivery before may have left one for a wait that was never
   recorded, and the next run would go on behind parts that only that delivery has emitted.

Crash window: a worker that is killed leaves a take without its last parts. The next start of the
task begins another take, which readers see as a reset.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Protocol

from aztask.errors import BrokerUnavailable, EncodeError, ResultDamaged, StepError, WorkerStopping
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.steps.parts import PartStore, Take, parts_of, place_of, take_of
from aztask.steps.suspension import Parked, Renewal, StepsUnavailable
from aztask.support import clock
from aztask.support.parts import Part

logger = logging.getLogger(__name__)

BATCH_SECONDS: Final = 0.1
RETRY_SECONDS: Final = 0.5
END_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 0.5
"""How soon a wait for the store notices that the lease is lost."""

PART_BYTES: Final = 64 * 1024
BATCH_BYTES: Final = 256 * 1024
MOST_BYTES: Final = 1024 * 1024
MOST_PARTS: Final = 100_000


class Held(Protocol):
    """The lease of the run."""

    @property
    def lost(self) -> bool:
        """True if it has ended."""
        ...


class PartApp(Protocol):
    """What emitting needs of an app."""

    codec: Codec

    @property
    def results(self) -> object:
        """The result store; None if there is none."""
        ...


def part_data(codec: Codec, value: Any) -> bytes:
    """The part, encoded. Raises EncodeError if it cannot be encoded, or is too large."""
    data = codec.encode_value(value)
    if len(data) > PART_BYTES:
        raise EncodeError(
            f"a part has {len(data):,} bytes, and may have {PART_BYTES:,}; store the data "
            "elsewhere and emit a reference"
        )
    return data


class Emission:
    """The stream of one run. A context manager around the run.

    Its thread is `start`, `write` and `wait` alone: a simulation takes the steps of these itself.
    `begun`: whether a part of its take is known to be stored.
    """

    def __init__(
        self, app: PartApp, message: TaskMessage, delivery_count: int, lease: Held
    ) -> None:
        self._app = app
        self._message = message
        self._delivery = delivery_count
        self._take = Take(take_of(message, delivery_count))
        self._lease = lease
        self._store: PartStore | None = None
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._count = 0
        self._closed = self._ending = self._parked = self._renewed = False
        self.begun = self._branched = False
        self._continues = message.continued
        self._again = delivery_count > 1
        self._part: Part | None = None

    def emit(self, value: Any, branch: str = "") -> None:
        """Add a part to the stream. Raises EncodeError, and StepError without a result store.

        * `branch`: of `gather`, in which it is emitted; "" for the main line.
        """
        data = part_data(self._app.codec, value)
        if self._count >= MOST_PARTS:
            raise EncodeError(f"a task emits at most {MOST_PARTS:,} parts; emit larger ones")
        with self._changed:
            if self._part is None and not self._closed:
                self._open()
            # In turns: what ends a lease does not know who waits here.
            while not self.wait(self._has_room, LOOK_SECONDS):
                pass
            if self._closed:  # a thread of the task's own outlives it
                raise StepError("the run has ended, so it emits no further part")
            self._branched = self._branched or bool(branch)
            self._count += 1
            self._waiting.append((self._count, data))
            self._bytes += len(data)
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._bytes < MOST_BYTES or self._lease.lost or self._closed

    def _open(self) -> None:
        self._store = parts_of(self._app.results, self._app.codec)
        if self._store is None:
            raise StepError('emit needs a result store; give the App results="local://"')
        self._part = Part("stream")
        self.start(self._part)

    def _is_written(self) -> bool:
        return not (self._waiting or self._parked) or self._lease.lost

    # -- the thread --------------------------------------------------------------------------

    def start(self, part: Part) -> None:
        """Let the parts be written from now on. part: for the thread that does."""
        part.thread(self._write, "aztask-stream").start()

    def wait(self, done: Callable[[], bool], seconds: float) -> bool:
        """Wait until this is true, at most so long, while parts are written; whether it is."""
        return self._changed.wait_for(done, seconds)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._parked or self._ending)
            began, first = clock.monotonic(), not self.begun
            if not self.write():
                return
            with self._changed:
                # The first write asks for the clock and a mark before it makes its own request.
                since = clock.monotonic() if first else began
                pause = since + BATCH_SECONDS - clock.monotonic()
                self._changed.wait_for(lambda: self._closed, max(0.0, pause))

    def write(self) -> bool:
        """Write one batch, or the mark of a run that waits; False if no other one may follow."""
        with self._changed:
            if self._ending or self._lease.lost:
                return False
            batch = self._batch()
        try:
            self.append(batch)
        except BrokerUnavailable:
            if not self._ending:
                clock.current().sleep(RETRY_SECONDS)
            return not self._ending
        with self._changed:
            if self._ending:
                return False
            for _ in batch:
                self._bytes -= len(self._waiting.popleft()[1])
            self._parked = self._parked and bool(batch)
            self._changed.notify_all()
        return True

    # -- the end of the run ------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until all parts are written. Raises StepsUnavailable (rule 3)."""
        give_up_at = clock.monotonic() + END_SECONDS
        with self._changed:
            while not self.wait(self._is_written, LOOK_SECONDS):
                if clock.monotonic() >= give_up_at:
                    raise StepsUnavailable("the parts that the task emitted cannot be written")

    def __enter__(self) -> Emission:
        """The function is about to be called."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The function has ended, in whatever way: what it emitted is written."""
        self.end(error)

    @property
    def open(self) -> bool:
        """Whether `end` has something to do."""
        return (self._part is not None or self._again) and not self._closed

    def end(self, error: BaseException | None) -> None:
        """Write all parts, and the mark of a run that waits. Raises StepsUnavailable (rule 3).

        * `error`: with which the function ended. Only the first call does something.
        """
        if not self.open:
            return
        if self._part is None:
            self._closed = True
            if error is None:
                self._begin_empty()
            else:
                self._take_back()
            return
        waits = isinstance(error, Parked)
        with self._changed:
            self._renewed = isinstance(error, Renewal) and self._message.continued
            self._closed, self._parked = True, (waits and not self._branched) or self._renewed
            self._changed.notify_all()
        try:
            self.flush()
        finally:
            with self._changed:
                self._ending = True
                self._waiting.clear()  # what could not be written: the thread ends
                self._changed.notify_all()
        if isinstance(error, WorkerStopping):
            with suppress(StepsUnavailable):
                self._begin_empty()
        elif error is not None and (self._branched or not (waits or self._renewed)):
            self._take_back()
        if waits and self._branched:
            raise StepError(
                f"the task waits ({error}), and branches of gather have emitted parts: in each run "
                "they do so in another order, so the next one could not go on behind them; emit "
                "after the gather"
            )

    def _begin_empty(self) -> None:
        """Begin a take without parts, if an earlier delivery of this run has one (rule 7).

        One request, and another two if there is such a take. Raises StepsUnavailable.
        """
        store = parts_of(self._app.results, self._app.codec)
        if store is None or self._lease.lost:
            return
        try:
            begun = store.last_take(self._message.id)
            take = Take(take_of(self._message, self._delivery))
            if not begun.startswith(place_of(self._message.generation, self._message.hop)):
                return
            store.begin(self._message.id, self._continued(store, take))
        except BrokerUnavailable as error:
            raise StepsUnavailable(f"its stream cannot be read: {error}") from None

    def _take_back(self) -> None:
        """Take back the mark of an earlier delivery of this run, if there is one (rule 8).

        One request, and only for a run that was delivered before. Raises StepsUnavailable.
        """
        store = parts_of(self._app.results, self._app.codec) if self._again else None
        if store is None or self._lease.lost:
            return
        try:
            base, _ = store.marked(self._message.id)
            if base.startswith(place_of(self._message.generation, self._message.hop)):
                store.mark(self._message.id, "", 0)
        except ResultDamaged as error:  # the next run begins anew
            logger.warning("task %s: %s", self._message.id, error)
        except BrokerUnavailable as error:
            raise StepsUnavailable(f"its stream cannot be read: {error}") from None

    def _batch(self) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        size = 0
        for number, data in self._waiting:
            size += len(data)
            if found and size > BATCH_BYTES:
                break
            found.append((number, data))
        return found

    def append(self, batch: list[tuple[int, bytes]]) -> None:
        """Store these parts, each with its number; none: the mark. Raises BrokerUnavailable."""
        assert self._store is not None  # noqa: S101  # the thread starts with it
        task_id = self._message.id
        if self._continues:
            self._take = self._continued(self._store, self._take)
            self._continues = False
        if not batch:
            whole = self._take.name if self.begun else self._take.base
            mark = ("", 0) if self._renewed else (whole, max(self._count, self._take.kept))
            self._store.mark(task_id, *mark)
            return
        new = [(number, data) for number, data in batch if number > self._take.kept]
        if new:
            parts = [data for _, data in new]
            self._store.append(task_id, self._take, new[0][0], parts, new=not self.begun)
            self.begun = True

    def _continued(self, store: PartStore, take: Take) -> Take:
        """The take with the one that it continues: that of the run which ended in the wait."""
        try:
            base, kept = store.marked(self._message.id)
        except ResultDamaged as error:
            logger.warning("task %s begins its stream anew: %s", self._message.id, error)
            return take
        place = place_of(self._message.generation, self._message.hop)
        # A mark of this hop is from a delivery that died before its wait was recorded.
        return Take(take.name, base, kept) if base < place else take


class MemoryEmission:
    """For functions that are called without a worker: the parts stay in a list."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    @property
    def open(self) -> bool:
        """Whether `end` has something to do: never."""
        return False

    def emit(self, value: Any, branch: str = "") -> None:
        """Keep the value as the next part."""
        self.values.append(value)

    def flush(self) -> None:
        """Nothing waits to be written."""

    def end(self, error: BaseException | None) -> None:
        """Nothing waits to be written."""

    def __enter__(self) -> MemoryEmission:
        """The function is about to be called."""
        return self

    def __exit__(self, *error: object) -> None:
        """The function has ended; its parts stay."""


class Emits(Protocol):
    """Where a run's parts go."""

    def emit(self, value: Any, branch: str = "") -> None:
        """Add a part to the stream."""
        ...


def drained(generator: Generator[Any, None, Any], emission: Emits) -> Any:
    """Emit what a generator yields; returns what it returns."""
    while True:
        try:
            value = next(generator)
        except StopIteration as end:
            return end.value
        emission.emit(value)
