"""Learns how far the service's clock is ahead of ours, from the times that the service writes.

Schedules are given to Service Bus in absolute time, so a clock that is an hour off would make every
delay an hour longer or shorter. Leases do not need this: their deadlines are relative.

Rules
1. A time on a message that has just arrived is never later than the service's current time, so the
   highest recent one is the best estimate. Schedules use this estimate.
2. A time that the service certainly wrote between two instants of our clock is a *pin*: it bounds
   the difference of the two clocks from both sides. Leases are checked with pins; see
   `aztask.queues.servicebus.lock`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from azure.servicebus import ServiceBusReceivedMessage

from aztask.errors import AztaskError, BrokerUnavailable
from aztask.queues.delivery import Delivery
from aztask.queues.servicebus.reading import damage_of
from aztask.queues.servicebus.wire import ENQUEUED, epoch_of, is_direct, position_of
from aztask.settlement import Complete, Settlement
from aztask.support.clock import Clock

STEP_SECONDS: Final = 2.0
"""If a sample is this much lower than the estimate, one of the clocks was set."""

DRIFT: Final = 200e-6
"""The fastest drift of two clocks, in seconds per second: twice that of a bad quartz."""

PIN_SECONDS: Final = 3600.0
"""How long a pin is used."""


@dataclass(frozen=True, slots=True)
class ClockBounds:
    """The service's time minus our monotonic clock lies between `low` and `high`, at instant `at`
    of that clock. number: tells one pin from another.
    """

    low: float
    high: float
    at: float
    number: int = 0

    def widened(self, now: float) -> ClockBounds:
        """The bounds at `now`, wider by what the clocks may have drifted apart."""
        drifted = abs(now - self.at) * DRIFT
        return replace(self, low=self.low - drifted, high=self.high + drifted)


class BusClock:
    """Estimates the service's time. Any thread may call."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset: float | None = None
        self._pin: ClockBounds | None = None
        self._pins = 0
        self._lock = threading.Lock()

    @property
    def known(self) -> bool:
        """Whether the service's time was learned."""
        return self._offset is not None

    @property
    def offset(self) -> float:
        """Seconds that the service's clock is ahead of ours; 0 until it is known."""
        return self._offset or 0.0

    def now(self) -> float:
        """The service's current time, UTC epoch seconds."""
        return self._clock.wall() + self.offset

    def learn(self, service_time: float) -> None:
        """Learn from `service_time`, which the service wrote on a message that has just arrived."""
        sample = service_time - self._clock.wall()
        with self._lock:
            known = self._offset
            if known is None or sample > known or sample < known - STEP_SECONDS:
                self._offset = sample

    def pin(self, service_time: float, after: float, before: float) -> None:
        """Set the pin: the service wrote `service_time` between these instants of our clock.

        The newest pin is used: it comes from the node that serves the queue now.
        """
        with self._lock:
            self._pins += 1
            self._pin = ClockBounds(service_time - before, service_time - after, before, self._pins)

    def unpin(self) -> None:
        """Forget the pin: it contradicts other facts."""
        with self._lock:
            self._pin = None

    @property
    def pinned(self) -> ClockBounds | None:
        """The bounds as of now; None without a recent pin."""
        pin, now = self._pin, self._clock.monotonic()
        return None if pin is None or now - pin.at > PIN_SECONDS else pin.widened(now)


# -- The probe -------------------------------------------------------------------------------------
#
# The message that finds the service's time: scheduled ahead, peeked at, cancelled.
#
# Rules
# 1. A probe is due soon and lives shortly, so one that stays (the process died, or its cancellation
#    was not answered) is gone within two minutes. Only if our clock is wrong by more than that is
#    the next one due later, see `DUE_SECONDS`.
# 2. A probe is recognised by its message id. Receivers complete one that they get, and peeks skip
#    it: it is no task, in the queue or among the dead letters, where a queue may keep what expires.
#    Nor is it counted there, see `Peeking.without_probes`; a replay or a purge that meets it
#    removes it.

logger = logging.getLogger(__name__)

PREFIX: Final = "aztask-clock-"
TIME_TO_LIVE: Final = 60.0
"""Seconds that a probe is in the queue once it is due: long enough for a worker to drop it."""

DUE_SECONDS: Final = (60.0, 2 * 3600.0, 2 * 86400.0)
"""When a probe is due, in seconds from now by our clock.

If our clock is behind the service's by more than that, the probe is due at once and cannot be
peeked at as a scheduled one. Then the next one is tried.
"""

MARGIN: Final = 5.0
"""A time that is so close to the due time may be the due time itself, and is not used."""


def is_probe(message_id: str) -> bool:
    """Whether a message is a probe."""
    return message_id.startswith(PREFIX)


def without_probes(
    deliveries: list[Delivery],
    settle: Callable[[Sequence[tuple[Delivery, Settlement]]], Any],
    *,
    delete: bool = False,
) -> list[Delivery]:
    """The deliveries that are no probes. Probes are completed; delete: they are gone already."""
    probes = [each for each in deliveries if is_probe(each.envelope.message_id)]
    if not probes:
        return deliveries
    logger.debug("dropped %d clock probes of %s", len(probes), probes[0].queue)
    if not delete:
        settle([(each, Complete()) for each in probes])
    return [each for each in deliveries if not is_probe(each.envelope.message_id)]


# -- Calibration -----------------------------------------------------------------------------------
#
# Finds pins: times that the service certainly wrote between two instants of our clock.
#
# Rules
# 1. With the permission to send, schedule a message, peek at it, and cancel it.
# 2. Without it, peek behind the last message of the queue. A message that appears there later was
#    enqueued after that peek, so its enqueued time is a pin. This works because sequence numbers
#    rise without gaps. In a partitioned queue they do so only within each partition, so it gives no
#    pins (the service's documentation, "Message sequencing and timestamps").

PARTITIONED: Final = 1 << 48
"""Sequence numbers from this one on belong to a partition."""

MAX_PEEKS: Final = 100
"""Peeks in one attempt: enough to find the end of any queue."""


class ClockCalibration:
    """Finds pins in one queue. Any thread may call; `once` one at a time."""

    def __init__(
        self,
        service_clock: BusClock,
        clock: Clock,
        probe: Callable[[], None],
        peek: Callable[[int], ServiceBusReceivedMessage | None],
    ) -> None:
        """probe: does rule 1. peek: peeks at the next message from a sequence number on.

        Both raise AztaskError or `SDK_ERRORS`. If `probe` is not permitted, `peek` is used.
        """
        self.service_clock = service_clock
        self.clock = clock
        self._probe = probe
        self._peek = peek
        self._may_send = True
        self._last = 0
        self._empty: tuple[int, float] | None = None
        self._lock = threading.Lock()

    def once(self) -> None:
        """Try to find a pin. Raises as `probe` and `peek` do."""
        if self._may_send:
            try:
                self._probe()
                return
            except BrokerUnavailable:
                raise
            except AztaskError:  # no permission to send, or no time on the message
                self._may_send = False
        gap = 1
        for _ in range(MAX_PEEKS):
            number = self._next(gap)
            asked_at = self.clock.monotonic()
            found = self._peek(number)
            if found is not None:
                gap *= 2
                if self.message(found, self.clock.monotonic()) or self._last >= PARTITIONED:
                    return
                continue
            with self._lock:
                self._empty = (number, asked_at)
                if number <= self._last + 1:
                    return

    def _next(self, gap: int) -> int:
        """Where to peek: further and further behind the last message, then in between."""
        with self._lock:
            if self._empty is None:
                return self._last + gap
            return (self._last + 1 + self._empty[0]) // 2

    def message(self, message: ServiceBusReceivedMessage, read_at: float) -> bool:
        """Note a message that was received or peeked at; returns whether its time is a pin.

        A damaged message is ignored: its times may be the sender's.
        """
        if damage_of(message) is not None:
            return False
        number, enqueued = position_of(message), epoch_of(message, ENQUEUED)
        with self._lock:
            self._last = max(self._last, number)
            if self._empty is None or number < self._empty[0]:
                return False
            asked_at = self._empty[1]
            self._empty = None
        if enqueued is None or number >= PARTITIONED or not is_direct(message):
            return False
        self.service_clock.pin(enqueued, asked_at, read_at)
        return True
