"""Shares what a worker learns about the leases of its queues, and follows the shared advice.

Rules
1. Counts are kept in memory and shared at most every `SHARE_SECONDS`, sooner (`LOSS_SECONDS`) while
   leases are being lost, and when the worker ends. If a worker dies, its last counts are lost.
2. An unreachable store delays nothing: a thread of its own writes to it, and counts that could not
   be shared are shared later.
3. The advised lease applies to new receives. If a sender knew a longer lease for its message, the
   message is extended when it is received, within the queue's bounds.
4. A damaged document is set aside, and counting starts again.
5. If the service fixes the lease, or with ``adaptive=False``, everything is counted and advised,
   and nothing is changed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

from aztask.errors import AztaskError, DecodeError
from aztask.leaseadvice.advisor import bounds_of
from aztask.leaseadvice.document import LeaseDocument, LeaseStore, Stored
from aztask.leaseadvice.learning import LeaseCounts, learn
from aztask.queues.lease.state import LeaseState
from aztask.support import chance
from aztask.worker.lane import Lane, Work
from aztask.worker.pipeline.work import WorkItem
from aztask.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

SHARE_SECONDS: Final = 60.0
LOSS_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 1.0
TRIES: Final = 8
LONGER: Final = 1.05
"""A lease is extended only if the sender's advice is at least this many times as long."""


class LeaseWatch(Work[dict[str, LeaseCounts]]):
    """Only the supervisor's loop calls it, except for `seconds`, which any thread may call."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._app = runtime.app
        self._options = runtime.options
        self._keeper = runtime.keeper
        self._journal = runtime.journal
        self._clock = runtime.clock
        self._seen: dict[str, LeaseCounts] = {}
        self._lane: Lane[dict[str, LeaseCounts]] | None = None
        self._share_at = self._clock.monotonic() + SHARE_SECONDS * chance.uniform(0.2, 1.0)
        self._look_at = 0.0
        self._hurried = False
        self._stopping = threading.Event()
        if self._app.leases.enabled:
            self._app.leases.read()  # the advice from before this worker started
            self._lane = runtime.lane("lease-advice", self, threads=1)
        self._asked = {queue: self.seconds(queue) for queue in self._options.queues}

    def seconds(self, queue: str) -> float:
        """The lease to ask for now, in seconds. ``--lease`` fixes it."""
        if self._options.lease is not None:
            return self._options.lease
        return self._app.lease_now(queue)

    def received(self, items: Sequence[WorkItem]) -> None:
        """Extend messages whose senders knew a longer lease than they were received under."""
        if self._options.lease is not None or self._app.broker.capabilities.fixed_lease:
            return
        for item in items:
            opened = item.opened
            advised = opened.message.lease_seconds if opened is not None else None
            if advised is not None and advised > LONGER * item.lease.seconds:
                self._extend(item, advised)

    def _extend(self, item: WorkItem, advised: float) -> None:
        settings = self._app.queue_settings(item.queue)
        if settings.adaptive is False:
            return
        longest = self._app.broker.capabilities.max_lease_seconds
        lease = bounds_of(settings, longest).clamp(advised)
        if lease > LONGER * item.lease.seconds:
            self._keeper.extend(item.lease, lease, None)
            self._hurry()  # the sender knows what this worker does not

    def ended(self, item: WorkItem) -> None:
        """Count a delivery that has ended, with whatever outcome."""
        if self._lane is None:
            return
        seen = self._seen.setdefault(item.queue, LeaseCounts())
        held = self._clock.monotonic() - item.received_at
        noted = {kind for kind, _ in item.notes}
        if item.stop is not None and item.stop.failed:
            return  # it reached max_lease, whatever its lease was: that says nothing about its work
        if "settle_failed" in noted:
            seen.refused(held, item.lease.seconds)
        elif "lease_lost" in noted:
            seen.cut_off(held, item.lease.seconds)
        elif item.lease.state is LeaseState.UNKNOWN:
            seen.unsettled(held, item.lease.seconds)
        elif item.settled and item.outcome is not None and not item.outcome.again:
            seen.settled(held)  # time that was spent waiting for a retry is not work
        if seen.losses:
            self._hurry()

    def tick(self, now: float) -> None:
        """Share and read counts when due, and notice leases that have changed."""
        if self._lane is None:
            return
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._look()
        if now >= self._share_at and not len(self._lane):
            self._share_at = now + SHARE_SECONDS * chance.uniform(0.8, 1.2)
            self._hurried = False
            self._tell()

    def _look(self) -> None:
        for queue, former in self._asked.items():
            lease = self.seconds(queue)
            if lease != former:
                self._asked[queue] = lease
                advice = self._app.leases.advice(queue)
                reason = advice.reason if advice is not None else "as configured"
                logger.info(
                    "queue %s: the lease is now %g s, it was %g s; %s", queue, lease, former, reason
                )
                self._journal.lease_changed(queue, former, lease, reason)

    def stop(self) -> None:
        """Share the last counts, in one try, and end the thread."""
        if self._lane is not None:
            self._stopping.set()
            self._tell()
            self._lane.stop()
            self._look()  # a change that was learned since the last look has its event, too

    def _hurry(self) -> None:
        if not self._hurried:
            self._hurried = True
            self._share_at = min(self._share_at, self._clock.monotonic() + LOSS_SECONDS)

    def _tell(self) -> None:
        taken, self._seen = {queue: seen for queue, seen in self._seen.items() if seen}, {}
        if self._lane is not None:
            self._lane.submit([taken])

    # -- on the lane's thread ----------------------------------------------------------------

    def work(self, batch: Sequence[dict[str, LeaseCounts]]) -> None:
        """Share these counts, or leave them in the batch."""
        for taken in batch:
            try:
                if self._published(taken):
                    taken.clear()  # `done` puts back what is left in it
            except AztaskError as error:
                if self._lane is not None:
                    self._lane.part.trouble(error)
                logger.warning(
                    "lease advice could not be shared, it will be tried again: %s", error
                )

    def _published(self, taken: dict[str, LeaseCounts]) -> bool:
        """Publish the counts; whether that worked. If another worker was first, start again."""
        store, advisor = self._app.leases.store, self._app.leases
        for turn in range(1 if self._stopping.is_set() else TRIES):
            if turn:
                self._clock.sleep(chance.uniform(0.0, 0.05 * 2**turn))
            stored = _load(store)
            document = self._learned(stored.document, taken)
            if not taken or store.publish(document, stored):
                advisor.learned(Stored(document, None))
                return True
        logger.info(
            "lease advice was not shared: other workers published first; it will be tried again"
        )
        return False

    def _learned(self, document: LeaseDocument, taken: dict[str, LeaseCounts]) -> LeaseDocument:
        longest = self._app.broker.capabilities.max_lease_seconds
        for queue, seen in taken.items():
            document = learn(
                document,
                queue,
                seen,
                configured=self._options.lease or self._app.lease_seconds(queue),
                bounds=bounds_of(self._app.queue_settings(queue), longest),
                now=self._clock.wall(),
            )
        return document

    def done(self, batch: Sequence[dict[str, LeaseCounts]]) -> None:
        """Back in the loop: keep the counts that could not be shared."""
        for taken in batch:
            for queue, seen in taken.items():
                self._seen.setdefault(queue, LeaseCounts()).put_back(seen)


def _load(store: LeaseStore) -> Stored:
    """Load the document; a damaged one is set aside first. Raises as `LeaseStore.load`."""
    try:
        return store.load()
    except DecodeError as error:
        aside = store.set_aside()
        if aside is not None:
            logger.error("%s. It was moved to %s, and a new document begins", error, aside)
    return store.load()
