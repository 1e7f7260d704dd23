"""How many requests a second one queue or table takes, learned from its refusals.

A service that gets more than it can take answers "server busy" (503, or 429) until there is less.
Programs that go on at their own speed are refused most of the time, and pay for each refusal.

Rules
1. Nothing is limited before the first refusal, and nothing is counted then.
2. After it, half a second is counted: how many requests were taken. Then this program sends at most
   `BACKED_OFF` of that, more and more slowly up to the rate at which it was refused, and faster and
   faster beyond it (the curve of CUBIC, RFC 9438). At the next refusal it begins again from what
   was taken in the second before. All programs do so, and share what there is without a word.
3. After a minute without a refusal, nothing is limited.
4. Requests on which a lease depends go first: they wait for each other, and never for a send or a
   poll, nor for a pause that the service asks for.
5. Nothing waits longer than `LONGEST_WAIT`. Then it is sent, and the service decides: a caller who
   has to wait for longer learns that from the refusal.
6. Each queue and each table is a resource of its own: the services limit each of them, too.
   Where the account is the limit, each of its resources learns that by itself.
"""

from __future__ import annotations

import logging
import re
from typing import Final

from aztask.support.clock import monotonic, sleep
from aztask.support.display import visible
from aztask.support.forks import fork_safe_lock

logger = logging.getLogger(__name__)

BACKED_OFF: Final = 0.8
RECOVERY_SECONDS: Final = 3.0
"""Until a rate is back at what was refused."""

SAVED_SECONDS: Final = 0.5
"""What was not used of the last seconds may be used at once: the services count seconds, too."""

FORGOTTEN_SECONDS: Final = 60.0
COUNTED_SECONDS: Final = 1.0
FIRST_SECONDS: Final = 0.5
"""How long requests are counted, and how long after the first refusal."""

LEAST_RATE: Final = 1.0
LONGEST_WAIT: Final = 2.0
"""Seconds: as long as a sender waits before it is told to send again."""

SAID_SECONDS: Final = 60.0
BUSY: Final = frozenset({429, 503})
_ADDRESS: Final = re.compile(r"(localhost|[0-9.]+|\[.*\])(:|$)")
"""A host that is no name of a service."""


class RequestPace:
    """The rate of requests to one resource. Called under the lock of `Paces`."""

    def __init__(self, now: float) -> None:
        """now: the time of the first refusal."""
        self.refused_at = now
        self._counted_from = now
        self._taken = 0
        self._last_taken = 0.0
        self._most: float | None = None
        """The rate at which it was refused, requests a second; None while that is counted."""
        self._since = now
        self._paused_until = now
        self._next = now
        self._next_leased = now

    def rate(self, now: float) -> float | None:
        """How many requests a second it sends now; None for as many as there are."""
        if self._most is None:
            return None
        curve = ((now - self._since) / RECOVERY_SECONDS - 1.0) ** 3
        return max(LEAST_RATE, self._most * (1.0 + (1.0 - BACKED_OFF) * curve))

    def wait(self, now: float, *, leased: bool) -> float:
        """Take the next place in the row; how many seconds it is ahead."""
        self._count(now)
        rate = self.rate(now)
        at = now if leased else max(now, self._paused_until)
        if rate is not None:
            saved = now - SAVED_SECONDS
            self._next = max(self._next, saved) + 1.0 / rate
            if leased:
                self._next_leased = max(self._next_leased, saved) + 1.0 / rate
            at = max(at, (self._next_leased if leased else self._next) - 1.0 / rate)
        if at - now > LONGEST_WAIT:  # it goes then, so those behind it wait for that at most
            at = now + LONGEST_WAIT
            self._next = min(self._next, at)
            self._next_leased = min(self._next_leased, at)
        return at - now

    def answered(self, now: float, *, refused: bool, pause: float) -> bool:
        """Learn from an answer; True if the rate was lowered.

        * `pause`: seconds that the service asks for.
        """
        self._count(now)
        self._taken += not refused
        if not refused:
            return False
        self.refused_at = now
        self._paused_until = max(self._paused_until, now + pause)
        if self._most is None or now - self._since < COUNTED_SECONDS:
            return False  # it is counted, or was on its way when the rate was lowered
        self._lower(now)
        return True

    def _count(self, now: float) -> None:
        """Close the second that is counted, if it has passed."""
        passed = now - self._counted_from
        if passed < (FIRST_SECONDS if self._most is None else COUNTED_SECONDS):
            return
        self._last_taken = self._taken / passed
        self._taken, self._counted_from = 0, now
        if self._most is None:
            self._lower(now)

    def _lower(self, now: float) -> None:
        passed = now - self._counted_from
        taken = max(self._last_taken, self._taken / passed if passed > 0.25 else 0.0)
        # What was taken may be little because little was sent.
        if (rate := self.rate(now)) is not None and self._most is not None:
            taken = min(rate, max(taken, BACKED_OFF * min(rate, self._most)))
        self._most = max(LEAST_RATE, taken)
        self._since = now
        self._next = self._next_leased = now


class Paces:
    """The paces of a program's requests to one service. Any thread may call.

    Where nothing is refused, it costs a look at an empty dict.
    """

    def __init__(self, *, leased: str = "") -> None:
        """leased: a part of the addresses of changes on which a lease depends; "" for none."""
        self._leased = leased
        self._paces: dict[str, RequestPace] = {}
        self._lock = fork_safe_lock()
        self._said_at: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._paces)

    def ahead(self, method: str, url: str) -> float:
        """Take a place for a request; in how many seconds it may be sent."""
        if not self._paces:
            return 0.0
        leased = bool(self._leased) and self._leased in url and method in ("PUT", "DELETE")
        resource = resource_of(url)
        with self._lock:
            now = monotonic()
            self._forget(now)
            pace = self._paces.get(resource)
            return 0.0 if pace is None else pace.wait(now, leased=leased)

    def _forget(self, now: float) -> None:
        """Limit no longer what has refused nothing for long, whether it is asked again or not."""
        for resource, pace in list(self._paces.items()):
            if now - pace.refused_at > FORGOTTEN_SECONDS:
                del self._paces[resource]
                self._said_at.pop(resource, None)
                logger.info("%s takes all requests again", visible(resource))

    def wait(self, method: str, url: str) -> None:
        """Wait until a request may be sent."""
        if self._paces and (seconds := self.ahead(method, url)) > 0.0:
            sleep(seconds)

    def answered(self, url: str, status: int, retry_after: str | None) -> None:
        """Learn from an answer. retry_after: the header of that name, if there is one."""
        refused = status in BUSY
        if not refused and not self._paces:
            return
        resource = resource_of(url)
        pause = float(retry_after) if retry_after and retry_after.strip().isdecimal() else 0.0
        with self._lock:
            pace, now = self._paces.get(resource), monotonic()
            if pace is None:
                if not refused:
                    return
                pace = self._paces[resource] = RequestPace(now)
            lowered = pace.answered(now, refused=refused, pause=pause)
            say = lowered and now - self._said_at.get(resource, -SAID_SECONDS) >= SAID_SECONDS
            if say:
                self._said_at[resource] = now
        if say:
            logger.warning(
                "%s refuses requests, since it gets more than it can take (%d): this program sends "
                "%.3g of them a second at most, and tries more later",
                visible(resource),
                status,
                pace.rate(now) or 0.0,
            )


def resource_of(url: str) -> str:
    """The host of a URL and the queue or table that it names.

    Emulators have the account in front of that, in the path.
    """
    host, _, path = url.partition("://")[2].partition("?")[0].partition("/")
    names = path.partition("(")[0].split("/")
    return "/".join([host, *names[: 2 if _ADDRESS.match(host) else 1]])
