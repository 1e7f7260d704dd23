"""A lane: does a stage's work in batches, inline or on threads of its own.

A stage that only touches a local file runs inline, in the supervisor's turn, because passing it to
a thread would cost more than the work. A stage that waits for a network runs on threads: all that
arrived during one batch becomes the next batch. One thread does this as long as it keeps up, since
a small batch costs as much as a large one. A second thread takes over items that have waited for
`PATIENCE` seconds, so that a stuck batch does not block the items behind it.

Each lane is a part (`aztask.support.parts`). If a batch fails unexpectedly, its items return as
they were, so that their stage is tried again; the lane goes on with others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from aztask.support.clock import boot_seconds
from aztask.support.parts import Part
from aztask.worker.mailbox import Mailbox

Item = TypeVar("Item")
Given_contra = TypeVar("Given_contra", contravariant=True)

BATCH = 256
PATIENCE = 0.02
"""Seconds that an item waits for a busy thread before another thread takes it."""


class Work(Generic[Item]):
    """What a lane does with its batches: a stage inherits from this.

    Without threads the supervisor's loop calls all of it.
    """

    def work(self, batch: Sequence[Item], /) -> None:
        """Do the work; on a thread of the lane."""

    def done(self, batch: Sequence[Item], /) -> None:
        """Take the batch back, whatever became of it; always in the supervisor's turn."""

    def failed(self, batch: Sequence[Item], /) -> None:
        """Note that `work` raised, before `done`; on the thread that did the work."""


class Lane(Protocol[Given_contra]):
    """A lane as its stage uses it: `InlineLane`, `ThreadLane`, and the stepped one of the tests."""

    part: Part

    def __len__(self) -> int:
        """How many items are queued or worked on."""

    @property
    def waiting(self) -> bool:
        """Whether something is left for the supervisor's next turn."""

    def submit(self, items: Iterable[Given_contra], /) -> None:
        """Queue these items for the next batch."""

    def turn(self) -> None:
        """Work on everything that is queued, if the supervisor's turn does this lane's work."""

    def stop(self) -> None:
        """Finish what is queued, and end the threads."""


class Batches(Generic[Item]):
    """The queue of a lane and its work; what every kind of lane has in common."""

    def __init__(self, part: Part, work: Work[Item]) -> None:
        self.part = part
        self._work = work
        self._items: deque[Item] = deque()

    def take(self) -> list[Item]:
        """Take out the next batch."""
        return [self._items.popleft() for _ in range(min(BATCH, len(self._items)))]

    def do(self, batch: Sequence[Item]) -> None:
        """Work on a batch. If that fails unexpectedly, its items return as they were."""
        self.part.begin()
        try:
            self._work.work(batch)
        except Exception as error:  # noqa: BLE001  # the part logs it
            self.part.failed(error, f"{len(batch)} items are tried again")
            self._work.failed(batch)
        else:
            self.part.rest()
        finally:
            self.part.idle()


class InlineLane(Batches[Item]):
    """Works in the supervisor's turn, on the calling thread."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def waiting(self) -> bool:
        """Whether something is left for the next turn."""
        return bool(self._items)

    def submit(self, items: Iterable[Item]) -> None:
        """Queue these items for the next `turn`."""
        self._items.extend(items)

    def turn(self) -> None:
        """Work on everything that is queued."""
        for _ in range(len(self._items) // BATCH + 1):
            if batch := self.take():
                self.do(batch)
                self._work.done(batch)

    def stop(self) -> None:
        """Nothing is left to end."""
        self.part.stop()


class ThreadLane(Batches[Item]):
    """Works on threads of its own; `done` is posted to the supervisor's loop."""

    waiting = False

    def __init__(self, part: Part, work: Work[Item], mailbox: Mailbox, threads: int) -> None:
        """threads: how many the lane starts."""
        super().__init__(part, work)
        self._mailbox = mailbox
        self._condition = threading.Condition()
        self._busy = 0
        self._working = 0
        self._watched = False
        self._waiting_since = 0.0
        self._stopping = False
        self._threads = [
            part.thread(self._serve, f"aztask-{part.name}-{number}") for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._items) + self._busy

    def submit(self, items: Iterable[Item]) -> None:
        """Queue these items, and wake a thread."""
        with self._condition:
            if not self._items:
                self._waiting_since = boot_seconds()
            self._items.extend(items)
            if not self._working or not self._watched:
                self._condition.notify()

    def turn(self) -> None:
        """The threads do the work."""

    def stop(self) -> None:
        """Finish what is queued and end the threads."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()
        self.part.stop()

    def _serve(self) -> None:
        while True:
            with self._condition:
                if not self._await_work():
                    return
                batch = self.take()
                self._waiting_since = boot_seconds()
                self._busy += len(batch)
                self._working += 1
            try:
                self.do(batch)
            finally:
                with self._condition:
                    self._working -= 1
                self._mailbox.post(lambda batch=batch: self._returned(batch))  # type: ignore[misc]

    def _await_work(self) -> bool:
        """Wait until this thread should take a batch; False at the end. The caller has the lock."""
        while True:
            left = self._waiting_since + PATIENCE - boot_seconds()
            if self._items and (not self._working or self._stopping or left <= 0):
                return True
            if self._stopping:
                return False
            if not self._items or self._watched:
                self._condition.wait()
            else:
                self._watched = True
                try:
                    self._condition.wait(left)
                finally:
                    self._watched = False

    def _returned(self, batch: Sequence[Item]) -> None:
        with self._condition:
            self._busy -= len(batch)
        self._work.done(batch)


def lane_of(
    name: str,
    work: Work[Item],
    mailbox: Mailbox,
    *,
    threads: int = 0,
    essential: str = "",
) -> Lane[Item]:
    """A lane with so many threads, 0 for an inline one. essential: as `Part` takes it."""
    part = Part(name, essential=essential)
    return ThreadLane(part, work, mailbox, threads) if threads else InlineLane(part, work)
