"""The table service's clock, learned from the ``Date`` of its answers.

Rules
1. The time is a lower bound. The service writes ``Date`` in whole seconds, rounded down, before the
   answer is received. So ``Date`` plus the time since the answer came is never ahead of the
   service, and the largest such sum of the last answers is the best one.
2. Only the clock of the deadlines measures the time since an answer: the wall clock of this machine
   may be wrong and may jump.
"""

from __future__ import annotations

from collections import deque
from email.utils import parsedate_to_datetime
from threading import Lock
from typing import Final

from aztask.stores.tables.client import TableRequests, TimeBudget
from aztask.support.clock import Clock

SAMPLES: Final = 32
SAMPLE_SECONDS: Final = 900.0
"""How long an answer counts: clocks drift by less than 0.1 s in this time."""

FRESH_SECONDS: Final = 300.0
_ROW: Final = ("w", "-")
"""The row that is read for the answer alone: no worker has this name."""


class ServiceClock:
    """The time of a service. Any thread may call."""

    def __init__(self, requests: TableRequests, clock: Clock) -> None:
        """clock: this machine's; only its clock of the deadlines counts."""
        self._requests = requests
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self._lock = Lock()

    def now(self) -> float:
        """The service's time, UTC epoch seconds. Asks the service if no answer is fresh.

        Raises BrokerUnavailable, and LookupError for an answer without a time.
        """
        with self._lock:
            newest = self._samples[-1][0] if self._samples else None
        if newest is None or self._clock.monotonic() - newest > FRESH_SECONDS:
            self.learn()
        now = self._clock.monotonic()
        with self._lock:
            ahead = [
                date - received
                for received, date in self._samples
                if now - received <= SAMPLE_SECONDS
            ]
        return now + max(ahead)

    def learn(self) -> None:
        """Ask the service for its time."""
        date = self._requests.date(TimeBudget(), *_ROW)
        received = self._clock.monotonic()
        if date is None:
            raise LookupError("the table service's answer has no Date header")
        with self._lock:
            self._samples.append((received, parsedate_to_datetime(date).timestamp()))
