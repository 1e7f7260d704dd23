"""Streams: what tasks emit, what readers get of it, and what streams promise.

Rules
1. A part says which start of a run has emitted it, and as the how manieth: [start, number, value].
2. The thread that writes is a step here: after each part, all that waits may be written, and then
   others go on for a moment.
3. A reader belongs to a sender. When that has ended, another one goes on behind the last part, by
   its number or by its id.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from aztask.context import TaskLease
from aztask.errors import BrokerUnavailable
from aztask.message.message import TaskMessage
from aztask.steps.emitting import BATCH_SECONDS, Emission
from aztask.steps.parts import parts_of
from aztask.steps.stream import Listener, Stream, StreamPart, stream_of
from aztask.steps.suspension import Parked
from aztask.stores.records.base import State
from aztask.support import clock
from aztask.support.parts import Part
from aztask.worker.pool.attempt import Outbox, RunReader
from aztask.worker.pool.packets import Answers

from .course import Decision
from .points import Death

if TYPE_CHECKING:
    from .actors import Actor, Sender
    from .book import Key
    from .world import World

LOOKS: Final = 40
"""How often a reader looks, if the task has not ended before."""

FIRST_PAUSE: Final = 0.6
LONGEST_PAUSE: Final = 60.0


@dataclass(slots=True)
class Started:
    """A start of a run that emits.

    * `began_at`: when its take was known to be stored; `parked`: whether it ended in a wait.
    * `values`: what it has emitted, including what a run before its wait had written.
    """

    key: Key
    began_at: float | None = None
    parked: bool = False
    values: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Reader:
    """A reader of a stream.

    * `number`, `id`: of its last part. `looked_at`: when it looked last.
    """

    sender: Sender
    listener: Listener
    number: int = 0
    id: str = ""
    looks: int = 0
    looked_at: float = 0.0


class Streams:
    """What the tasks of a world have emitted, and the assertions about it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.starts: list[Started] = []
        self._of_task: dict[str, list[int]] = {}
        self._whole: dict[Key, list[Any]] = {}
        self._readers: dict[tuple[str, int], Reader] = {}

    def _complain(self, name: str, text: str, task_id: str) -> None:
        self._world.book.complain(name, text, task_id)

    # -- what is emitted ---------------------------------------------------------------------

    def started(self, start: Started) -> int:
        """A run emits its first part; returns the number of its start."""
        self.starts.append(start)
        number = len(self.starts) - 1
        self._of_task.setdefault(start.key[0], []).append(number)
        return number

    def ended(self, start: Started) -> None:
        """A run has returned, and all its parts are written."""
        if start.key[0] in self._of_task:
            self._whole[start.key] = start.values

    # -- what is read ------------------------------------------------------------------------

    def check(self, task_id: str, before: int, parts: list[StreamPart], since: float) -> None:
        """What a reader got behind a number. since: the store was read after that."""
        number = before
        for part in parts:
            if part.reset:
                self._world.book.counts["resets of streams"] += 1
                number = 0
                continue
            self._world.book.counts["parts read"] += 1
            number += 1
            start, emitted, _ = part.value
            if (part.number, emitted) != (number, number):
                text = f"part {part.number} is the {emitted}. of its run, and {number} was to come"
                self._complain("parts-in-order", text, task_id)
            self._check_start(task_id, start, part.number, since)

    def _check_start(self, task_id: str, start: int, number: int, since: float) -> None:
        """No other start has taken over that does not go on behind this one."""
        mine = self.starts[start]
        for later in self._of_task[task_id]:
            other = self.starts[later]
            if later <= start or other.began_at is None or other.began_at > since:
                continue
            if other.key == mine.key or not mine.parked:
                text = (
                    f"part {number} is one of start {start}, {mine.key[1:]}, and start {later}, "
                    f"{other.key[1:]}, has begun a take"
                )
                self._complain("superseded-is-not-read", text, task_id)

    def look(self, sender: Sender, task_id: str, which: int) -> bool:
        """A reader looks once; whether it has to look again."""
        reader = self._reader(sender, task_id, which)
        if reader.listener.stream.due():
            return True
        reader.looks += 1
        asked_at = self._world.time.now
        reader.listener.stream.look()
        record = reader.listener.stream.record
        parts = list(reader.listener.new())
        self.check(task_id, reader.number, parts, reader.looked_at)
        reader.looked_at = asked_at  # a look may ask for the end alone, the next one does not
        if parts:
            reader.number, reader.id = parts[-1].number, parts[-1].id
        return record is None and reader.looks < LOOKS

    def _reader(self, sender: Sender, task_id: str, which: int) -> Reader:
        found = self._readers.get((task_id, which))
        if found is not None and found.sender is sender:
            return found
        after: int | str = 0
        if found is not None:
            after = found.id if which % 2 else found.number
        listener = Listener(self.stream(sender, task_id), after, sender.app.codec)
        made = self._readers[task_id, which] = Reader(sender, listener)
        if found is not None:
            made.number, made.id, made.looks = found.number, found.id, found.looks
        return made

    def stream(self, sender: Sender, task_id: str) -> Stream:
        """The stream of a task, as this program sees it."""
        results = sender.app.results
        return stream_of(results, parts_of(results, sender.app.codec), task_id)

    # -- at last -----------------------------------------------------------------------------

    def check_at_last(self) -> None:
        """The stream of a task that has succeeded has all parts of its last run, and no others."""
        world = self._world
        for task_id in self._of_task:
            life = world.book.lives[task_id]
            record = world.record_of(life)
            if record is None or record.state is not State.SUCCEEDED:
                continue
            key = (task_id, record.key.generation, record.key.hop)
            if (wanted := self._whole.get(key)) is None:
                continue
            sender = world.sender(life.app)
            # One of its own: readers may share one that ended before the task was replayed.
            store = parts_of(sender.app.results, sender.app.codec)
            assert store is not None
            stream = Stream(store, sender.results, task_id)
            listener = Listener(stream, 0, sender.app.codec)
            while stream.record is None:
                world.time.move(stream.due())
                stream.look()
            parts = list(listener.new())
            self.check(task_id, 0, parts, world.time.now - 10.0)
            found = [part.value[2] for part in parts]
            if found != wanted:
                text = f"its last run has emitted {wanted}, and {found} are there"
                self._complain("last-take-is-whole", text, task_id)


class SteppedEmission(Emission):
    """Where a run emits. What the thread of a process does are steps of the run (rule 2)."""

    def __init__(
        self, actor: Actor, message: TaskMessage, delivery_count: int, lease: TaskLease
    ) -> None:
        super().__init__(actor.app, message, delivery_count, lease)
        self._actor = actor
        self._world = actor.world
        self._of = message
        self._number = -1
        self._started = Started(message.key)

    def emit(self, value: Any, branch: str = "") -> None:
        """Emit, and mostly let what waits be written."""
        if self._number < 0:
            self._number = self._world.streams.started(self._started)
        values = self._started.values
        values.append(value)
        super().emit([self._number, len(values), value], branch)
        if self._world.dice.random() < 0.6:
            self.write()
            self._world.sleep(BATCH_SECONDS)

    def start(self, part: Part) -> None:
        """There is no thread."""

    def wait(self, done: Callable[[], bool], seconds: float) -> bool:
        """Write until it is true."""
        until = clock.monotonic() + seconds
        while not done() and clock.monotonic() < until and self.write():
            pass
        return done()

    def append(self, batch: list[tuple[int, bytes]]) -> None:
        """One request, before and after which its worker may die or freeze."""
        self._world.point("append<")
        self._actor.ask("results")
        super().append(batch)
        if self.begun and self._started.began_at is None:
            self._started.began_at = self._world.time.now
        self._world.point("append>")

    def end(self, error: BaseException | None) -> None:
        """Write what is left, unless the process is dead."""
        if isinstance(error, Death):
            return
        self._started.parked = isinstance(error, Parked)
        super().end(error)
        if error is None:
            self._world.streams.ended(self._started)


class SteppedReader(RunReader):
    """Reads calls in the processes of a world."""

    def __init__(self, actor: Actor, outbox: Outbox, answers: Answers) -> None:
        super().__init__(actor.app, outbox, answers, os.getpid())
        self._actor = actor

    def emission(self, message: TaskMessage, delivery_count: int, lease: TaskLease) -> Emission:
        """Without a thread."""
        return SteppedEmission(self._actor, message, delivery_count, lease)


# -- what senders do -----------------------------------------------------------------------------


def start(world: World, sender: Sender, decision: Decision) -> None:
    """Send a task that emits, and read its stream."""
    plan, count, readers = decision.what
    task_id = sender.app.tasks[f"{sender.label}.stream"].delay(plan, count).id
    listen(world, decision.app, task_id, readers)


def listen(world: World, label: str, task_id: str, readers: int) -> None:
    """Read a stream from soon on, by so many readers."""
    for which in range(readers):
        what = (task_id, which, FIRST_PAUSE * (1 + which))
        world.later(1.0 + which, Decision(0.0, "read", label, what))


def read(world: World, sender: Sender, decision: Decision) -> None:
    """A reader looks, and will look again."""
    task_id, which, pause = decision.what
    try:
        again = world.streams.look(sender, task_id, which)
    except BrokerUnavailable:
        again = True
    if again:
        what = (task_id, which, min(1.4 * pause, LONGEST_PAUSE))
        world.later(pause, Decision(0.0, "read", decision.app, what))
