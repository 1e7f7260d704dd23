"""The intake of a queue with sessions: holds several sessions at a time, one delivery of each.

Rules
1. A session's next message is received when the previous one has been settled or given back. So the
   messages of a session run in order, one at a time, whatever the broker would hand out.
2. At most `most` sessions are served at a time. A session whose message waits for its retry
   (`hold`) or for the end of its lease does not count, so that failing sessions do not stop the
   others. With those, at most `most` * `HELD_PER_WORKED` are held. Each one is a receiver,
   on Service Bus a connection.
3. While no session has messages, a single slot keeps looking. As soon as it finds a session, the
   other slots look too.
4. A session is given up when it is empty. It is also given up after `share` seconds if other
   sessions may wait; none does while another slot looks and finds nothing.
"""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import Final

from aztask.errors import AztaskError
from aztask.queues.base import ANY_SESSION, Broker, Receiver, SessionHolder
from aztask.queues.delivery import Delivery
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.parts import Part
from aztask.worker.intake.queueintake import LONGEST_RECEIVE, is_refused, pause_after
from aztask.worker.pipeline.work import WorkItem
from aztask.worker.ports import IntakeReports, QueueSource

logger = logging.getLogger(__name__)

HELD_PER_WORKED: Final = 4


class SessionIntake:
    """Receives from the sessions of one queue and hands the deliveries over."""

    def __init__(
        self,
        broker: Broker,
        source: QueueSource,
        intakes: IntakeReports,
        *,
        most: int,
        share: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """intakes: takes the deliveries, one at a time. most: sessions, see rule 2. share: seconds,
        see rule 4.
        """
        self.queue = source.queue
        self.source = source
        self._broker = broker
        self._most = most
        self._share = share
        self.intakes = intakes
        self._clock = clock
        self._condition = threading.Condition()
        self.part = Part(f"intake {self.queue}", longest=LONGEST_RECEIVE, essential="receive")
        self._closing = Part(f"closing of sessions of {self.queue}", longest=LONGEST_RECEIVE)
        self._slots: list[SessionSlot] = []
        self._room = self._looking = self._working = self._waiting = self._resting = 0
        self._quiet = self.worked = False
        self.stopping = False

    @property
    def idle(self) -> bool:
        """Whether no session is held and none was found."""
        return self._quiet and not self._working and not self._waiting

    @property
    def working(self) -> int:
        """How many sessions are served now."""
        return self._working

    def start(self) -> None:
        """Start to look for sessions as soon as there is room."""
        with self._condition:
            self._add_slot()

    def allow(self, room: int) -> None:
        """Set how many more deliveries there is room for; below 0, sessions are given up too."""
        if room != self._room:
            with self._condition:
                self._room = room
                self._condition.notify_all()

    def set_most(self, most: int) -> None:
        """Serve up to this many sessions from now on; those beyond it are served to their end."""
        with self._condition:
            self._most = most
            self._condition.notify_all()

    def stop(self) -> None:
        """Stop receiving. Each session is given up when its delivery has ended."""
        with self._condition:
            self.stopping = True
            self._condition.notify_all()
            slots = list(self._slots)
        self.part.stop()
        for slot in slots:
            if slot.looks:  # closing ends a pending look; it may take a moment
                self._closing.once(slot.close, f"aztask-closing-{self.queue}").start()

    def join(self, timeout: float) -> bool:
        """Wait `timeout` seconds for the threads; returns whether all have ended."""
        give_up_at = self._clock.monotonic() + timeout
        for slot in self._slots:
            slot.join(max(0.0, give_up_at - self._clock.monotonic()))
        return not any(slot.alive for slot in self._slots)

    def close(self) -> None:
        """Close the receivers, which gives their sessions back."""
        for slot in self._slots:
            slot.close()

    def receiver(self, lease: float) -> Receiver:
        """Open a receiver of any session. Raises ConfigurationError, BrokerUnavailable."""
        return self._broker.receiver(
            self.queue, lease=lease, session=ANY_SESSION, poll_ceiling=self.source.poll_ceiling
        )

    def refused(self, error: Exception) -> None:
        """End the worker with this error, see `is_refused`. Nothing more is received."""
        self.stop()
        self.intakes.refused(error)

    # -- called by the slots -----------------------------------------------------------------

    def begin_look(self, slot: SessionSlot) -> bool:
        """Wait until `slot` may look for a session; False when the intake stops."""
        with self._condition:
            self._resting += 1
            while not self.stopping and not self._may_look():
                self._condition.wait()
            self._resting -= 1
            self._looking += 1
            slot.looks = not self.stopping
            return slot.looks

    def _may_look(self) -> bool:
        held = self._working + self._waiting + self._looking
        return (
            self._room > self._looking
            and not (self._quiet and self._looking)
            and self._working + self._looking < self._most
            and held < self._most * HELD_PER_WORKED
        )

    def end_look(self, slot: SessionSlot, *, found: bool) -> None:
        """The slot has looked. found: it holds a session now."""
        with self._condition:
            slot.looks = False
            self._looking -= 1
            self._quiet = not found
            if found:
                self._working += 1
                self._room -= 1
                if not self._resting and not self.stopping:
                    self._add_slot()
            self._condition.notify_all()

    def go_on(self, since: float) -> bool:
        """Whether a slot may receive the next message of the session that it holds since `since`.

        since: on the clock of the deadlines.
        """
        if self.stopping or self._room < 0:
            return False
        return self._looking > 0 or self._clock.monotonic() - since < self._share

    def given_up(self) -> None:
        """A slot has given its session up."""
        with self._condition:
            self._working -= 1
            self._condition.notify_all()

    def set_aside(self, change: int) -> None:
        """One more session (1) or one less (-1) only waits: see rule 2."""
        with self._condition:
            self._waiting += change
            self._working -= change
            if change > 0 and not self._resting and not self.stopping:
                self._add_slot()
            self._condition.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until the intake stops."""
        with self._condition:
            self._condition.wait_for(lambda: self.stopping, timeout=seconds)

    def _add_slot(self) -> None:
        if len(self._slots) < self._most * HELD_PER_WORKED:
            slot = SessionSlot(self, len(self._slots), self._clock)
            self._slots.append(slot)
            slot.start()


class SessionSlot:
    """One receiver and its thread, which serve one session after the other."""

    def __init__(self, intake: SessionIntake, number: int, clock: Clock) -> None:
        self.queue = intake.queue
        self._receiver: Receiver | None = None
        self._asked = 0.0
        self._asked_at = 0.0
        self._intake = intake
        self._clock = clock
        self.looks = False
        self._over: SimpleQueue[WorkItem] = SimpleQueue()
        self._taken = False
        self._set_aside = False
        self._failures = 0
        self._thread = intake.part.thread(self._run, f"aztask-in-{self.queue}-{number}")

    def start(self) -> None:
        """Start the thread, which looks for sessions."""
        self._thread.start()

    def close(self) -> None:
        """Close the receiver, which gives its session back."""
        if self._receiver is not None:
            self._receiver.close()

    def join(self, timeout: float) -> None:
        """Wait `timeout` seconds for the thread to end."""
        self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        """Whether the thread is still running."""
        return self._thread.is_alive()

    @property
    def session(self) -> SessionSlot:
        """What holds the session of a delivery: this slot."""
        return self

    @property
    def receiver(self) -> Receiver:
        """The receiver through which the deliveries are renewed and settled."""
        if self._receiver is None:
            self._asked = self._intake.intakes.lease(self.queue)
            self._receiver = self._intake.receiver(self._asked)
        return self._receiver

    def _at_the_lease_of_now(self) -> Receiver:
        receiver, lease = self.receiver, self._intake.intakes.lease(self.queue)
        if lease != self._asked:
            self._asked = lease
            receiver.set_lease(lease)
        return receiver

    # -- called by the supervisor ------------------------------------------------------------

    def held(self) -> None:
        """The delivery waits for its retry, under its lease (rule 2)."""
        self._set_aside = True
        self._intake.set_aside(1)

    def ended(self, item: WorkItem) -> None:
        """The delivery has ended, with whatever outcome."""
        self._over.put(item)

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while self._intake.begin_look(self):
            delivery = None
            try:
                delivery = self._receive(self._intake.source.wait)
                if self._intake.stopping:
                    delivery = None  # closing the receiver gives it back with its session
            finally:
                self._intake.end_look(self, found=delivery is not None)
            if delivery is not None:
                try:
                    self._serve(delivery)
                finally:
                    try:
                        self._await_end()
                        self._let_go()
                    finally:
                        self._intake.given_up()
        self.close()

    def _serve(self, delivery: Delivery | None) -> None:
        """Hand over the deliveries of a session until it is given up.

        If this process dies, the session's lease expires, and another worker continues with the
        message that was not settled.
        """
        session, since = "", 0.0
        while delivery is not None:
            if delivery.session != session:  # some receivers move on to the next session at once
                session, since = delivery.session or "", self._clock.monotonic()
            self._intake.intakes.take(self, [delivery], self._asked_at)
            self._taken = True
            item = self._await_end()
            if item is None or not item.settled:
                self._wait_for_lapse(item)
            elif self._intake.go_on(since):
                delivery = self._receive(0.0)
                if delivery is not None and self._intake.stopping:
                    break
                continue
            delivery = None

    def _await_end(self) -> WorkItem | None:
        """Wait for the end of the delivery that the supervisor has; None if it has none."""
        if not self._taken:
            return None
        item = self._over.get()
        self._taken = False
        if self._set_aside:
            self._set_aside = False
            self._intake.set_aside(-1)
        return item

    def _receive(self, wait: float) -> Delivery | None:
        self._intake.part.begin()
        try:
            receiver = self._at_the_lease_of_now() if self.looks else self.receiver
            self._asked_at = self._clock.wall()
            deliveries = receiver.receive(1, wait)
        except Exception as error:  # noqa: BLE001  # an SDK may raise anything
            self._failed(error)
            return None
        self._intake.part.rest()
        self._intake.worked = True
        if self._failures:
            logger.info("queue %s: receiving works again", self.queue)
            self._failures = 0
        return deliveries[0] if deliveries else None

    def _failed(self, error: Exception) -> None:
        if is_refused(error, self._intake.worked):
            self._intake.refused(error)
        elif not self._intake.stopping:
            self._failures += 1
            pause = pause_after(self._intake.part, self.queue, error, self._failures)
            self._intake.pause(pause)
        self._intake.part.idle()

    def _wait_for_lapse(self, item: WorkItem | None) -> None:
        """Wait until the lease of an unsettled message expires: only then is it redelivered."""
        if item is not None and item.left_to_lapse:
            self._intake.set_aside(1)
            self._intake.pause(item.delivery.deadline - self._clock.monotonic())
            self._intake.set_aside(-1)

    def _let_go(self) -> None:
        """Give the session back; its next holder receives the unsettled message first."""
        holder = self.receiver
        assert isinstance(holder, SessionHolder)  # noqa: S101  # every receiver of sessions is one
        try:
            holder.let_go()
        except AztaskError as error:
            logger.info(
                "queue %s: a session could not be given back, its lease will expire: %s",
                self.queue,
                error,
            )
        except Exception:  # an SDK may raise anything; the slot must continue
            logger.exception(
                "queue %s: a session could not be given back, its lease will expire", self.queue
            )
