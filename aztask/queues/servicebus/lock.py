"""Checks that a queue's lock lasts as long as the configured lease.

Without the permission to manage, a worker cannot read the lock duration and trusts its setting. If
the configured lease is too long, the worker loses leases without notice. If it is too short,
every delay is too long by the difference, because the service's clock is learned from it. So the
worker checks the lease against its messages. Each message says when it was enqueued and when its
lock ends, both by the service's clock:

    enqueued ........... locked ──────────── lock ────────────► locked until
                   asked        read                           (our clock)

Rules
1. Every fact is an interval. A slow network, a backlog or a wrong clock only widens it. The lock is
   at most `locked until - enqueued`. If a pin bounds the difference of the two clocks (see
   `aztask.queues.servicebus.clock`), the lock is at least `locked until - read` and at most
   `locked until - asked`.
2. The lease is refused if no lock within the tolerance of it fits the facts. A verdict that needs a
   pin counts only when a second pin confirms it.
3. Until the lease is confirmed the worker uses it, but learns nothing from it. A confirmed lease is
   checked again when the lock or a clock seems to have changed.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Final

from azure.servicebus import ServiceBusReceivedMessage

from aztask.errors import AztaskError, LeaseRefused
from aztask.queues.servicebus.clock import STEP_SECONDS, ClockBounds, ClockCalibration
from aztask.queues.servicebus.errors import SDK_ERRORS
from aztask.queues.servicebus.wire import ages
from aztask.support.parts import Part

logger = logging.getLogger(__name__)

TOLERANCE: Final = 1.0
"""Seconds by which lease and lock may differ where a pin decides."""

SAME_CLOCK: Final = 0.5
"""Seconds by which they may differ where two times of one message decide, or the settings."""

SHORTEST: Final = 0.1
LONGEST: Final = 300.0 + TOLERANCE
"""The service allows at most 5 minutes. A longer lock means that a clock was set."""

FACTS_SECONDS: Final = 600.0
"""How long facts are used: two clocks drift apart."""

FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 30.0
PATIENCE: Final = 2.0


class LockWatch:
    """Watches the lock of one receiver's queue. Any thread may call."""

    def __init__(
        self,
        queue: str,
        lease: float,
        calibration: ClockCalibration,
        ask: Callable[[], float | None],
        *,
        managed: bool,
    ) -> None:
        """ask: reads the lock duration from the queue's settings; None, or an error, if it may not.

        managed: the settings were read already, and `lease` is what they say.
        """
        self._queue = queue
        self._lease = lease
        self._service_clock = calibration.service_clock
        self._clock = calibration.clock
        self._calibration = calibration
        self._ask = ask
        self._managed = managed
        self._closed = False
        self._hurry = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._part = Part(f"lock check {queue}")
        self._patient = True
        self._confirmed = managed
        self._refusal = ""
        self._actual: float | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._lower = -math.inf  # lower bound of the lock, plus the lead of the service's clock
        self._upper = math.inf  # upper bound of the lock, plus the same lead
        self._longest = math.inf  # upper bound of the lock
        self._usual: float | None = None  # `locked until - read` of a lock that is right
        self._doubted: ClockBounds | None = None
        self._began_at = self._clock.monotonic()

    # -- for receivers -----------------------------------------------------------------------

    def start(self) -> None:
        """Search for a pin in the background, before the first message comes."""
        if not self._confirmed and self._service_clock.pinned is None:
            self._start_search()

    def close(self) -> None:
        """End the background search for pins."""
        self._closed = True
        self._hurry.set()
        self._part.stop()

    def messages(
        self,
        messages: Sequence[ServiceBusReceivedMessage],
        read_at: float,
        asked_at: float = -math.inf,
    ) -> None:
        """Learn from messages read at `read_at` that were not locked before `asked_at`."""
        for message in messages:
            times = ages(message)
            if times is not None:
                enqueued, locked = times
                if not self._confirmed:
                    self._calibration.message(message, read_at)
                self.lock(locked, read_at, asked_at, locked - enqueued)

    def lock(
        self, locked: float, read_at: float, asked_at: float = -math.inf, longest: float = math.inf
    ) -> None:
        """Learn from a lock that ends at `locked`, granted between `asked_at` and `read_at`.

        longest: the greatest possible duration of the lock, seconds.
        """
        with self._lock:
            if self._confirmed and self._is_usual(locked - read_at, longest):
                self._service_clock.learn(locked - self._lease)
                return
            if self._clock.monotonic() - self._began_at > FACTS_SECONDS:
                self._begin_anew()
            self._lower = max(self._lower, locked - read_at)
            self._upper = min(self._upper, locked - asked_at)
            self._longest = min(self._longest, longest)
            self._judge()
            decided = self._confirmed or bool(self._refusal)
            lacking = self._service_clock.pinned is None or self._doubted is not None
        if not decided and (lacking or self._managed):
            self._start_search()

    @property
    def refusal(self) -> str:
        """Why the lease is refused; "" while it is not."""
        return self._refusal

    def error(self) -> LeaseRefused:
        """The error of a refused lease, with the best known lock duration."""
        return LeaseRefused(self._refusal, actual=self._actual)

    def verdict(self) -> str:
        """The refusal for messages that have just been received; "" if the lease is not refused.

        The first call waits a moment for a pin that is being searched for.
        """
        thread = self._thread
        if thread is not None and (self._patient or self._refusal):
            self._patient = False
            thread.join(min(PATIENCE, 0.2 * self._lease))
        return self._refusal

    def try_again(self) -> None:
        """Check a refused lease again: the queue may have been changed.

        It stays refused until the next messages confirm it.
        """
        with self._lock:
            self._begin_anew()
        self._start_search()

    # -- judging: the caller has the lock -----------------------------------------------------

    def _is_usual(self, sample: float, longest: float) -> bool:
        """Whether a confirmed lease still fits. If not, start the check again."""
        usual = self._usual
        grown = usual is not None and sample > usual + STEP_SECONDS
        if grown or longest < self._lease - SAME_CLOCK:
            self._confirmed = False
            self._begin_anew()
            return False
        if usual is None or sample > usual:
            self._usual = sample
        return True

    def _judge(self) -> None:
        """Refuse the lease, confirm it, or wait for more facts."""
        if self._longest < self._lease - SAME_CLOCK:
            self._refuse(-math.inf, self._longest)
            return
        pin = self._service_clock.pinned
        if pin is None or self._lower == -math.inf:
            return
        lower, upper = self._lower - pin.high, min(self._upper - pin.low, self._longest)
        if lower > min(upper + TOLERANCE, LONGEST) or upper < SHORTEST:
            self._service_clock.unpin()  # a clock was set, or the pin is wrong
            self._begin_anew()
        elif lower > self._lease + TOLERANCE or upper < self._lease - TOLERANCE:
            if self._doubted is not None and self._doubted.number != pin.number:
                self._refuse(lower, upper)
            self._doubted = self._doubted or pin
        else:
            self._doubted = None
            if lower >= self._lease - TOLERANCE and upper <= self._lease + TOLERANCE:
                self._confirm()

    def _confirm(self) -> None:
        usual = None if self._lower == -math.inf else self._lower
        self._confirmed, self._refusal = True, ""
        self._begin_anew()
        self._usual = usual

    def _refuse(self, lower: float, upper: float) -> None:
        if upper - lower < TOLERANCE:
            self._actual = (lower + upper) / 2
            actual = f"{self._actual:.1f} s"
        elif lower > self._lease:
            self._actual = lower
            actual = f"{lower:.1f} s at least"
        else:
            self._actual = upper
            actual = f"{upper:.1f} s at most"
        self._refusal = (
            f"queue {self._queue!r} holds its messages for {actual}, not for {self._lease:g} s: "
            f"its lease is fixed; set it with app.queue({self._queue!r}, lease=...) or change the "
            "queue's lock duration"
        )

    # -- searching for pins, on a separate thread ---------------------------------------------

    def _start_search(self) -> None:
        """Search for a pin in the background; at once if the lease is in doubt."""
        with self._lock:
            if self._doubted is not None:
                self._hurry.set()
            if self._thread is None and not self._closed:
                self._thread = self._part.thread(self._search, f"aztask-lock-{self._queue}")
                self._thread.start()

    def _search(self) -> None:
        pause: float | None = FIRST_PAUSE
        longest = min(LONGEST_PAUSE, max(FIRST_PAUSE, self._lease / 4))
        tries = 0
        while pause is not None and not self._closed:
            tries += 1
            self._part.begin()
            pause = self._search_once(min(FIRST_PAUSE * 2.0 ** min(tries, 10), longest))
            self._part.rest()
            if pause:
                self._hurry.wait(pause)
                self._hurry.clear()

    def _search_once(self, pause: float) -> float | None:
        """Try once; returns the pause before the next attempt, None if none is needed for now.

        A new pin that leaves no doubt is enough until the next message comes. If there is a doubt,
        the search for a second pin starts at once.
        """
        known = self._service_clock.pinned
        actual: float | None = None
        try:
            if self._managed:
                actual = self._ask()
            if actual is None:
                self._calibration.once()
        except (AztaskError, *SDK_ERRORS) as error:
            logger.debug("the lock duration of queue %s is not known yet: %s", self._queue, error)
        except Exception as error:  # noqa: BLE001  # an SDK may raise anything
            self._part.failed(error)
        with self._lock:
            if actual is not None:
                self._settle(actual)
            else:
                self._judge()
            pin = self._service_clock.pinned
            new = pin is not None and (known is None or pin.number != known.number)
            decided = self._confirmed or (bool(self._refusal) and (new or actual is not None))
            if decided or (new and self._doubted is None):
                self._thread = None
                return None
            return 0.0 if new else pause

    def _settle(self, actual: float) -> None:
        """Confirm or refuse the lease: the queue's settings give the lock duration."""
        self._confirm()
        if abs(actual - self._lease) > SAME_CLOCK:
            self._confirmed = False
            self._refuse(actual, actual)
