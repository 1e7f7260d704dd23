"""Messages that a Kombu channel has delivered and that are not acknowledged yet.

Rules
1. From receipt to settlement a keeper renews all of them, started or not.
2. Any thread may settle; each message is settled once. A settlement waits for a renewal that is
   under way.
3. A lost lease is logged: once when it is lost, and once when its consumer acknowledges too late.
   Nothing is settled then, and the message is delivered again.
4. A message whose lease expired before it was delivered is dropped, and never delivered.
5. On a remote broker an acknowledgement is carried out in the background, so it raises nothing: see
   `aztask.celery.transport.unacked`. For an event loop, every settlement is.
6. A message of a session is settled before the next one comes.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from time import monotonic, sleep
from typing import Final, Generic, TypeAlias, TypeVar

from aztask.errors import AlreadySettled, AztaskError, BrokerError, BrokerUnavailable
from aztask.queues.base import Receiver
from aztask.queues.delivery import Delivery, Lost, Settled, Unknown
from aztask.queues.lease.keeper import LeaseKeeper, LeaseReports
from aztask.queues.lease.state import Lease, LeaseState
from aztask.settlement import Complete, Settlement, name_of
from aztask.support.clock import boot_seconds
from aztask.support.parts import Part

# -- Changes ---------------------------------------------------------------------------------------
#
# What may allow a connection's next receive: a settlement, a consumer, another prefetch count.


class Changes:
    """Counts the changes of one connection, and wakes the thread that waits for one."""

    def __init__(self) -> None:
        self.count = 0
        self._condition = threading.Condition()
        self._wanted: Callable[[], bool] | None = None
        self._ended = False

    def note(self) -> None:
        """Something changed: end the waits that wait for it."""
        with self._condition:
            self.count += 1
            # Asked here, not by the waiting thread: to wake it costs more than to look.
            if self._wanted is None or self._ended or self._wanted():
                self._condition.notify_all()

    def wait(self, seen: int, seconds: float) -> None:
        """Wait until the count is no longer `seen`, at most `seconds`.

        Read `count` before you look at what may have changed: a change in between ends the wait.
        """
        with self._condition:
            self._condition.wait_for(lambda: self.count != seen, seconds)

    def wait_until(self, wanted: Callable[[], bool], seconds: float) -> None:
        """Wait until a change makes `wanted` true, at most `seconds`; one thread at a time.

        * `wanted`: called with every change, by the thread that notes it. It must not wait.
        """
        with self._condition:
            self._wanted = wanted
            try:
                self._condition.wait_for(lambda: self._ended or wanted(), seconds)
            finally:
                self._wanted = None

    def end(self) -> None:
        """End the waits of `wait_until`, now and in the future."""
        self._ended = True
        self.note()


# -- Settles messages of a remote broker on a thread of its own, many in one request.
#
# Rules
# 1. Acknowledging does not wait for the service's answer. Otherwise a consumer would stand still,
#    and with Celery's prefork pool one thread acknowledges for all processes.
# 2. Messages gather for `GATHER` before a request, and while another one is under way: a consumer
#    of quick tasks acknowledges one message at a time, and one request for each would cost more
#    than the task. No caller waits for the request; its message may be delivered again for so much
#    longer if the process dies. If `MOST` or more wait, the connection receives nothing further
#    until there is room. An acknowledgement never waits: an event loop would stand still with it.
# 3. If the process dies before the answer, the message is delivered again, as after any late
#    acknowledgement.

T = TypeVar("T")

MOST: Final = 64

GATHER: Final = 0.003
"""Seconds; well below the time that a lock leaves when it is renewed."""


class Completions(Generic[T]):
    """The messages of one channel that are to be settled.

    * `complete`: settles these messages, at most `MOST`; called on the thread.
    """

    def __init__(self, complete: Callable[[Sequence[T]], None]) -> None:
        self._complete = complete
        self._waiting: list[T] = []
        self._busy = self._idle = self._closed = False
        self._changed = threading.Condition()
        self._part = Part("completions")
        self._thread: threading.Thread | None = None

    def add(self, message: T) -> None:
        """Settle the message with the next request; never waits."""
        with self._changed:
            self._waiting.append(message)
            if self._thread is None:
                self._thread = self._part.thread(self._run, "aztask-completions")
                self._thread.start()
            if self._idle:
                self._changed.notify_all()

    @property
    def crowded(self) -> bool:
        """True if so many wait that nothing further should be received (rule 2)."""
        return len(self._waiting) >= MOST

    def close(self, seconds: float) -> bool:
        """Wait until all are settled, at most `seconds`; then end the thread. True if all are."""
        ends_at = monotonic() + seconds
        with self._changed:
            while (self._waiting or self._busy) and (left := ends_at - monotonic()) > 0:
                self._changed.wait(left)
            self._closed = True
            self._changed.notify_all()
            return not self._waiting and not self._busy

    def _run(self) -> None:
        while batch := self._take():
            try:
                self._complete(batch)
            except Exception:  # their leases end by themselves; the next batch may succeed
                logger.exception(
                    "could not settle %d messages; they are delivered again", len(batch)
                )

    def _take(self) -> list[T]:
        """The next batch; [] when it was closed and none is left."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._idle = True
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._idle = False
            gathering = not (self._closed or self.crowded)
        if gathering:
            sleep(GATHER)
        with self._changed:
            batch, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            self._busy = bool(batch)
            return batch


logger = logging.getLogger(__name__)

SETTLE_TRIES = 4
FIRST_PAUSE = 0.1
CLOSE_SECONDS = 5.0
RENEWAL_PAUSE = 0.005


Settling: TypeAlias = "tuple[UnackedDelivery, Lease, Settlement]"


@dataclass(slots=True, eq=False)
class UnackedDelivery:
    """One unacknowledged message. `lease` is None if it was deleted at receipt."""

    tag: int
    receiver: Receiver
    delivery: Delivery
    consumer_tag: str = ""
    lease: Lease | None = None

    def lapsed(self) -> bool:
        """True if its lease has expired, so that no consumer may work on it."""
        return self.lease is not None and not self.lease.alive(boot_seconds())


class Unacked:
    """The unacknowledged messages of one channel."""

    def __init__(
        self, keeper: LeaseKeeper, changes: Changes | None = None, *, remote: bool = False
    ) -> None:
        """The unacknowledged messages of one channel, none at first.

        * `changes`: of the connection; notes every settlement there.
        * `remote`: whether a settlement waits for a network, so that acknowledgements do not.
        """
        self._keeper = keeper
        self._changes = Changes() if changes is None else changes
        self._completions = Completions(self._settle_batch) if remote else None
        self._holdings: dict[int, UnackedDelivery] = {}
        self._of_sessions: dict[int, UnackedDelivery] = {}  # being settled in the background

    def __len__(self) -> int:
        return len(self._holdings)

    def hold(self, receiver: Receiver, holdings: list[UnackedDelivery], seconds: float) -> None:
        """Renew these from now on, each time for `seconds`."""
        for holding in holdings:
            holding.lease = Lease.of(holding.delivery, seconds=seconds)
            self._holdings[holding.tag] = holding
        self._keeper.hold(receiver, [holding.lease for holding in holdings if holding.lease])

    def holds(self, receiver: Receiver) -> bool:
        """True if a message of this receiver is not settled yet (rule 6)."""
        held = [*list(self._holdings.values()), *list(self._of_sessions.values())]
        return any(each.receiver is receiver for each in held)

    @property
    def crowded(self) -> bool:
        """True if so many settlements wait that nothing further should be received."""
        return self._completions is not None and self._completions.crowded

    def tags_up_to(self, tag: int) -> list[int]:
        """The tags of messages delivered up to and including `tag`, in order."""
        return sorted(held for held in list(self._holdings) if held <= tag)

    def settle(self, tag: int, settlement: Settlement, *, background: bool = False) -> bool:
        """Carry out `settlement`; returns True if it took effect, or will in the background.

        * `background`: True if the caller may not wait for a network: an event loop.

        False: the message is not held here, or its lease was lost. Raises BrokerUnavailable if the
        broker gave no answer within a few tries: the message may be delivered again then. If the
        process dies before the broker has answered, the lease expires and the message is delivered
        again.
        """
        holding = self._holdings.get(tag)
        in_session = holding is not None and holding.delivery.session is not None
        completions = self._completions
        if not background and (in_session or not isinstance(settlement, Complete)):
            completions = None
        if holding is not None and in_session and completions is not None:
            self._of_sessions[tag] = holding  # before it is no longer held: see `holds`
        if self._holdings.pop(tag, None) is None or holding is None or holding.lease is None:
            self._of_sessions.pop(tag, None)
            logger.warning(
                "message %s is not held here (already settled, or received before a fork):"
                " cannot %s it", tag, name_of(settlement),
            )  # fmt: skip
            return False
        if completions is not None:
            completions.add((holding, holding.lease, settlement))
            self._changes.note()
            return True
        try:
            return self._settle(holding, holding.lease, settlement)
        finally:
            self._changes.note()

    def give_back(self, tags: Sequence[int], settlement: Settlement) -> None:
        """Settle messages that will not be acknowledged; never raises.

        If the broker is unreachable, the leases of the rest expire by themselves.
        """
        for number, tag in enumerate(tags):
            try:
                self.settle(tag, settlement)
            except BrokerError as error:
                rest = [self._holdings.pop(left, None) for left in tags[number + 1 :]]
                self._keeper.drop([held.lease for held in rest if held and held.lease])
                logger.warning(
                    "could not give back %d messages; they come back when their leases end: %s",
                    len(tags) - number,
                    error,
                )
                return

    def drop(self, holding: UnackedDelivery) -> None:
        """Forget a message whose lease expired before it was delivered; it will be redelivered."""
        self._holdings.pop(holding.tag, None)
        self._changes.note()
        if holding.lease is not None:
            self._keeper.drop([holding.lease])
        logger.warning(
            "message %s of queue %s waited here until its lease expired, it will be redelivered;"
            " lower the prefetch count or make the lease longer",
            holding.delivery.envelope.message_id,
            holding.delivery.queue,
        )

    def close(self) -> None:
        """Wait until the settlements in the background are carried out."""
        if self._completions is not None and not self._completions.close(CLOSE_SECONDS):
            logger.warning(
                "acknowledged or rejected messages were not settled within %g s; they are"
                " delivered again when their leases end",
                CLOSE_SECONDS,
            )

    def _settle_batch(self, settling: Sequence[Settling]) -> None:
        """Settle these, one request for each receiver; one that gets no answer is repeated."""
        self._changes.note()  # there is room again for further ones
        ready: dict[Receiver, list[Settling]] = {}
        for each in settling:
            holding, lease, settlement = each
            if self._begin(lease):
                ready.setdefault(holding.receiver, []).append(each)
            else:
                self._too_late(holding, lease, settlement)
        try:
            for receiver, held in ready.items():
                self._settle_together(receiver, held)
        finally:
            for holding, _, _ in settling:
                if self._of_sessions.pop(holding.tag, None) is not None:
                    self._changes.note()

    def _settle_together(self, receiver: Receiver, held: Sequence[Settling]) -> None:
        answers: Sequence[Settled | Lost | Unknown]
        leases = [lease for _, lease, _ in held]
        try:
            answers = receiver.settle(
                [(holding.delivery, settlement) for holding, _, settlement in held]
            )
        except AztaskError as error:
            answers = [Unknown(str(error))] * len(held)
        except Exception:  # an SDK may raise anything; other queues' messages go on
            logger.exception("could not settle %d messages; they are delivered again", len(held))
            self._keeper.drop(leases)
            return
        self._keeper.book(list(zip(leases, answers, strict=True)))
        for (holding, lease, settlement), answer in zip(held, answers, strict=True):
            if isinstance(answer, Lost):
                self._too_late(holding, lease, settlement)
            elif isinstance(answer, Unknown):
                self._settle_alone(holding, lease, settlement)

    def _settle_alone(self, holding: UnackedDelivery, lease: Lease, settlement: Settlement) -> None:
        try:
            self._settle(holding, lease, settlement)
        except AztaskError as error:
            logger.warning("%s", error)
        except Exception:  # an SDK may raise anything; the messages beside it go on
            logger.exception("could not %s a message; it is delivered again", name_of(settlement))
            self._keeper.drop([lease])

    def _settle(self, holding: UnackedDelivery, lease: Lease, settlement: Settlement) -> bool:
        for attempt in range(SETTLE_TRIES):
            if not self._begin(lease):
                self._too_late(holding, lease, settlement)
                return False
            try:
                answer = self._answer(holding, settlement)
            except AztaskError:
                self._keeper.drop([lease])
                raise
            self._keeper.book([(lease, answer)])
            if isinstance(answer, Settled):
                return True
            if isinstance(answer, Lost):
                self._too_late(holding, lease, settlement)
                return False
            if attempt < SETTLE_TRIES - 1:
                time.sleep(FIRST_PAUSE * 2**attempt)
        self._keeper.drop([lease])
        raise BrokerUnavailable(
            f"the broker did not confirm to {name_of(settlement)} message"
            f" {holding.delivery.envelope.message_id}: it may be delivered again"
        )

    def _begin(self, lease: Lease) -> bool:
        """True if the lease may be settled now, after waiting for a renewal that is under way."""
        while not self._keeper.begin_settlement([lease])[0]:
            if lease.state is not LeaseState.RENEWING or boot_seconds() >= lease.deadline:
                return False
            time.sleep(RENEWAL_PAUSE)
        return True

    @staticmethod
    def _answer(holding: UnackedDelivery, settlement: Settlement) -> Settled | Lost | Unknown:
        try:
            answer = holding.receiver.settle([(holding.delivery, settlement)])[0]
        except BrokerUnavailable as error:
            logger.warning("could not %s a message: %s", name_of(settlement), error)
            return Unknown(str(error))
        except AlreadySettled:
            return Settled()
        return answer

    @staticmethod
    def _too_late(holding: UnackedDelivery, lease: Lease, settlement: Settlement) -> None:
        logger.warning(
            "too late to %s message %s of queue %s, whose lease was lost (%s):"
            " it is delivered again; make the lease longer or the task shorter",
            name_of(settlement),
            holding.delivery.envelope.message_id,
            holding.delivery.queue,
            lease.lost_reason or lease.state.value,
        )


class LogLost(LeaseReports):
    """What a connection does about its keeper's reports."""

    def lost(self, lease: Lease) -> None:
        """Log once that a lease was lost while its message is being worked on."""
        logger.warning(
            "the lease of message %s of queue %s was lost (%s): another consumer may have it",
            lease.delivery.envelope.message_id,
            lease.delivery.queue,
            lease.lost_reason,
        )


# -- Early messages --------------------------------------------------------------------------------
#
# Messages that arrived shortly before their time, held by their channel until then.
#
# Rules
# 1. A message is handed out at its eta or up to 0.1 s later, never before. Celery's own timer would
#    start it up to a second late, because that timer's thread sleeps for a second at a time.
# 2. Until then its lease is renewed, as that of any message that was not acknowledged. It does not
#    count for the prefetch count, so it delays no other message.
# 3. At most `MOST_HELD` are held; a message that is earlier or more than that is hidden again.

MOST_HELD: Final = 256


class EarlyMessages:
    """The early messages of one channel, by the time when they are due (UTC epoch seconds)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, UnackedDelivery]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._heap)

    def hold(self, holding: UnackedDelivery, due: float) -> bool:
        """Hold a message until `due`; returns False if there are too many."""
        if len(self._heap) >= MOST_HELD:
            return False
        heapq.heappush(self._heap, (due, next(self._numbers), holding))
        return True

    def due(self, now: float) -> list[UnackedDelivery]:
        """Take out the messages whose time has come, the earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heapq.heappop(self._heap)[2])
        return found

    def seconds(self, now: float) -> float | None:
        """Seconds until the next message is due; None if none is held."""
        return max(0.0, self._heap[0][0] - now) if self._heap else None

    def take(self, consumer_tag: str) -> list[UnackedDelivery]:
        """Take out the messages of one consumer."""
        mine = [each for _, _, each in self._heap if each.consumer_tag == consumer_tag]
        self._heap = [each for each in self._heap if each[2].consumer_tag != consumer_tag]
        heapq.heapify(self._heap)
        return mine

    def clear(self) -> None:
        """Forget the messages, in a child that did not receive them."""
        self._heap.clear()
