"""The intake of a queue with sessions: holds several sessions at a time, one delivery of each.

Rules
1. A session's next message is received when the one before is done with: settled, or given back. So
   the messages of a session run in order, one at a time, whatever the broker would hand out.
2. At most `most` sessions are worked on at a time. One whose message waits for its retry (`hold`)
   or for the end of its lease does not count, so that failing sessions do not stop the others; with
   those it is at most `most` * `HELD_PER_WORKED`. Each is a receiver: on Service Bus a connection.
3. Where nothing is to be had, one slot alone keeps looking. As soon as it finds a session, the
   others look too.
4. A session is given up when nothing is left in it, and after `share` seconds if others may wait:
   while another slot looks and finds nothing, nobody does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from aztask.brokers.base import ANY_SESSION, Broker, Receiver, SessionHolder
from aztask.brokers.delivery import Delivery
from aztask.errors import AztaskError
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.worker.intake.intake import QueueSource, pause_after
from aztask.worker.pipeline.work import WorkItem

logger = logging.getLogger(__name__)

HELD_PER_WORKED: Final = 4


class SessionIntake:
    """Receives from the sessions of one queue and hands over, on threads of its own."""

    def __init__(
        self,
        broker: Broker,
        source: QueueSource,
        take: Callable[[SessionSlot, list[Delivery]], None],
        *,
        max_sessions: int,
        share: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """take: gets the deliveries, one at a time, on a thread of this intake.

        max_sessions: see rule 2. share: seconds, see rule 4.
        """
        self.queue = source.queue
        self.source = source
        self._broker = broker
        self._max_sessions = max_sessions
        self._share = share
        self.take = take
        self._clock = clock
        self._condition = threading.Condition()
        self._slots: list[SessionSlot] = []
        self._room = self._looking = self._working = self._waiting = self._resting = 0
        self._quiet = False
        self.stopping = False

    @property
    def idle(self) -> bool:
        """Whether no session is held and none was found."""
        return self._quiet and not self._working and not self._waiting

    def start(self) -> None:
        """Begin to look for sessions, once there is room."""
        with self._condition:
            self._add_slot()

    def allow(self, room: int) -> None:
        """There is room for that many deliveries; below 0 even the sessions at hand are let go."""
        if room != self._room:
            with self._condition:
                self._room = room
                self._condition.notify_all()

    def stop(self) -> None:
        """Receive nothing more. Sessions are given up when their deliveries are done with."""
        with self._condition:
            self.stopping = True
            self._condition.notify_all()
            slots = list(self._slots)
        for slot in slots:
            slot.stop()

    def join(self, timeout: float) -> bool:
        """Wait for the threads' end; whether they have ended."""
        give_up_at = self._clock.monotonic() + timeout
        for slot in self._slots:
            slot.join(max(0.0, give_up_at - self._clock.monotonic()))
        return not any(slot.alive for slot in self._slots)

    def close(self) -> None:
        """Close the receivers."""
        for slot in self._slots:
            slot.close()

    def receiver(self, lease: float) -> Receiver:
        """One more receiver of any session. Raises ConfigurationError, BrokerUnavailable."""
        return self._broker.receiver(
            self.queue, lease=lease, session=ANY_SESSION, poll_ceiling=self.source.poll_ceiling
        )

    # -- what slots ask and tell -------------------------------------------------------------

    def begin_look(self, slot: SessionSlot) -> bool:
        """Wait until one more slot may look for a session; False when it is all over."""
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
            and self._working + self._looking < self._max_sessions
            and held < self._max_sessions * HELD_PER_WORKED
        )

    def end_look(self, slot: SessionSlot, *, found: bool) -> None:
        """The slot looked, and holds a session now or does not."""
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
        """Whether a slot that has its session since then may take the next message of it."""
        if self.stopping or self._room < 0:
            return False
        return self._looking > 0 or self._clock.monotonic() - since < self._share

    def given_up(self) -> None:
        """A slot holds no session any more."""
        with self._condition:
            self._working -= 1
            self._condition.notify_all()

    def set_aside(self, change: int) -> None:
        """One session more (1) or less (-1) only waits: see rule 2."""
        with self._condition:
            self._waiting += change
            self._working -= change
            if change > 0 and not self._resting and not self.stopping:
                self._add_slot()
            self._condition.notify_all()

    def pause(self, seconds: float) -> None:
        """Let time pass; ends early when all is over."""
        with self._condition:
            self._condition.wait_for(lambda: self.stopping, timeout=seconds)

    def _add_slot(self) -> None:
        if len(self._slots) < self._max_sessions * HELD_PER_WORKED:
            slot = SessionSlot(self, len(self._slots), self._clock)
            self._slots.append(slot)
            slot.start()


class SessionSlot:
    """One receiver and its thread: holds one session after the other."""

    def __init__(self, intake: SessionIntake, number: int, clock: Clock) -> None:
        self.queue = intake.queue
        self._receiver: Receiver | None = None
        self._asked = 0.0
        self._intake = intake
        self._clock = clock
        self.looks = False
        self._over: SimpleQueue[WorkItem] = SimpleQueue()
        self._set_aside = False
        self._failures = 0
        self._thread = threading.Thread(
            target=self._run, name=f"aztask-in-{self.queue}-{number}", daemon=True
        )

    def start(self) -> None:
        """Begin to look for sessions."""
        self._thread.start()

    def stop(self) -> None:
        """End a look that is under way: closing may take a moment, so it is not waited for."""
        if self.looks:
            threading.Thread(target=self.close, daemon=True).start()

    def close(self) -> None:
        """Close the receiver, which lets go of its session."""
        if self._receiver is not None:
            self._receiver.close()

    def join(self, timeout: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        """Whether the thread has not ended yet."""
        return self._thread.is_alive()

    @property
    def receiver(self) -> Receiver:
        """What the deliveries are renewed and settled through."""
        if self._receiver is None:
            self._asked = self._intake.source.lease()
            self._receiver = self._intake.receiver(self._asked)
        return self._receiver

    def _at_the_lease_of_now(self) -> Receiver:
        receiver, lease = self.receiver, self._intake.source.lease()
        if lease != self._asked:
            self._asked = lease
            receiver.set_lease(lease)
        return receiver

    # -- what the supervisor tells -----------------------------------------------------------

    def held(self) -> None:
        """The delivery waits for its retry, under its lease."""
        self._set_aside = True
        self._intake.set_aside(1)

    def over(self, item: WorkItem) -> None:
        """The delivery is done with, however it ended."""
        self._over.put(item)

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while self._intake.begin_look(self):
            delivery = self._receive(self._intake.source.wait)
            if self._intake.stopping:
                delivery = None  # closing gives it back with its session
            self._intake.end_look(self, found=delivery is not None)
            if delivery is not None:
                self._serve(delivery)
                self._intake.given_up()
        self.close()

    def _serve(self, delivery: Delivery | None) -> None:
        """Hand over the deliveries of a session until it is given up.

        If this process dies, the session's lease lapses, and others go on with the message that
        was not settled.
        """
        session, since = "", 0.0
        while delivery is not None:
            if delivery.session != session:  # where it costs nothing the receiver takes the next
                session, since = delivery.session or "", self._clock.monotonic()
            self._intake.take(self, [delivery])
            item = self._over.get()
            if self._set_aside:
                self._set_aside = False
                self._intake.set_aside(-1)
            if not item.settled:
                self._wait_for_lapse(item)
            elif self._intake.go_on(since):
                delivery = self._receive(0.0)
                if delivery is not None and self._intake.stopping:
                    break
                continue
            delivery = None
        self._let_go()

    def _receive(self, wait: float) -> Delivery | None:
        try:
            receiver = self._at_the_lease_of_now() if self.looks else self.receiver
            deliveries = receiver.receive(1, wait)
        except AztaskError as error:
            self._failed(error)
            return None
        except Exception as error:  # whatever an SDK raises: a worker that is deaf helps nobody
            logger.exception("queue %s: receiving failed", self.queue)
            self._failed(error)
            return None
        if self._failures:
            logger.info("queue %s answers again", self.queue)
            self._failures = 0
        return deliveries[0] if deliveries else None

    def _failed(self, error: Exception) -> None:
        if not self._intake.stopping:
            self._failures += 1
            self._intake.pause(pause_after(self.queue, error, self._failures))

    def _wait_for_lapse(self, item: WorkItem) -> None:
        """A message that is left to lapse comes again when the lease ends, not before."""
        if item.left_to_lapse:
            self._intake.set_aside(1)
            self._intake.pause(item.delivery.deadline - self._clock.monotonic())
            self._intake.set_aside(-1)

    def _let_go(self) -> None:
        """Give the session back; what was not settled comes first for whoever takes it next."""
        holder = self.receiver
        assert isinstance(holder, SessionHolder)  # every receiver of sessions is one
        try:
            holder.let_go()
        except AztaskError as error:
            logger.info("a session of %s is left to lapse: %s", self.queue, error)
        except Exception:  # whatever an SDK raises: the slot must go on
            logger.exception("a session of %s is left to lapse", self.queue)
