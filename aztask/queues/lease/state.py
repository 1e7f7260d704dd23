"""The lease: its states and its renewal schedule. No I/O, no threads, no clock of its own.

Rules
1. Every change of state is a row of `TRANSITIONS`; a missing row is a mistake in aztask and raises.
2. A lease is due for renewal when `renew_at` (70 % by default) of the *current* lease has passed,
   whatever the age of the message. When one lease is due, those past `BATCH_FROM` (50 %) are
   renewed with it, so that thousands of leases cost few requests. With `NO_RENEWAL`, a lease is
   renewed only when its task asks for more time.
3. While a renewal is under way nothing settles, and during and after a settlement nothing renews.
4. A deadline counts from the instant before the granting request was sent. At `Lease.deadline` the
   lease is lost, whatever the service may say later; work is told to stop a little earlier, at
   `Lease.stop_at`.
5. `limit_at` ends renewal: a renewal that would pass it is shortened, or not made if the service
   decides the duration. Then the message becomes available to others.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from aztask.errors import AlreadySettled, LeaseLost
from aztask.queues.delivery import Delivery, Lost, Renewed, Unknown

RENEW_AT = 0.7
NO_RENEWAL = 1.0
"""The value of `renew_at` that switches renewals off."""
BATCH_FROM = 0.5
LONGEST_STOP_MARGIN = 2.0
SHORTEST_RENEWAL = 0.05


class LeaseState(Enum):
    """The states of a lease; see `TRANSITIONS`."""

    HELD = "held"
    RENEWING = "renewing"
    UNKNOWN = "unknown"
    SETTLING = "settling"
    SETTLED = "settled"
    LOST = "lost"


class LeaseEvent(Enum):
    """The events that change the state of a lease."""

    RENEW = "renew"
    RENEWED = "renewed"
    RENEW_FAILED = "renew failed"
    TOKEN_GONE = "token gone"  # noqa: S105  # the name of an event
    SETTLE = "settle"
    SETTLED = "settled"
    SETTLE_FAILED = "settle failed"
    LAPSE = "lapse"


_S, _E = LeaseState, LeaseEvent

TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (_S.HELD, _E.RENEW): _S.RENEWING,
    (_S.HELD, _E.SETTLE): _S.SETTLING,
    (_S.HELD, _E.LAPSE): _S.LOST,
    (_S.RENEWING, _E.RENEWED): _S.HELD,
    (_S.RENEWING, _E.RENEW_FAILED): _S.HELD,
    # The reply was lost, and the renewal itself made our token stale (Storage queue): the work may
    # go on until the last confirmed deadline, but the lease can no longer be renewed or settled.
    (_S.RENEWING, _E.TOKEN_GONE): _S.UNKNOWN,
    (_S.RENEWING, _E.LAPSE): _S.LOST,
    (_S.UNKNOWN, _E.LAPSE): _S.LOST,
    (_S.SETTLING, _E.SETTLED): _S.SETTLED,
    (_S.SETTLING, _E.SETTLE_FAILED): _S.HELD,
    (_S.SETTLING, _E.LAPSE): _S.LOST,
    # Two threads may find out about the end; the second one changes nothing.
    (_S.LOST, _E.LAPSE): _S.LOST,
    (_S.SETTLED, _E.LAPSE): _S.SETTLED,
}


@dataclass(slots=True, eq=False)
class Lease:
    """The exclusive, expiring right to one delivery.

    * `seconds`: the duration that each renewal requests.
    * `granted_at`, `limit_at`: on the clock of the deadlines.
    * `renewals`: successful renewals so far.
    * `failures`: renewals in a row that got no answer.
    * `hurried`: more time was asked for while a renewal for the former duration was under way.
    """

    delivery: Delivery
    seconds: float
    granted_at: float
    state: LeaseState = LeaseState.HELD
    limit_at: float | None = None
    renewals: int = 0
    failures: int = 0
    hurried: bool = False
    lost_reason: str = ""
    due_at: float = field(default=0.0)

    @classmethod
    def of(
        cls, delivery: Delivery, *, seconds: float | None = None, limit_at: float | None = None
    ) -> Lease:
        """The lease that came with `delivery`.

        * `seconds`: what renewals request; by default the duration that was granted.
        """
        granted = delivery.lease_seconds
        return cls(delivery, seconds or granted, delivery.deadline - granted, limit_at=limit_at)

    @property
    def deadline(self) -> float:
        """When the lease ends unless it is renewed."""
        return self.delivery.deadline

    @property
    def stop_at(self) -> float:
        """When work under the lease must stop: a margin before the deadline."""
        return self.deadline - min(LONGEST_STOP_MARGIN, 0.1 * self.delivery.lease_seconds)

    def alive(self, now: float) -> bool:
        """True if work may go on: the lease is not lost and its deadline not reached."""
        return self.state is not LeaseState.LOST and now < self.deadline

    def change(self, event: LeaseEvent) -> None:
        """Move to the state that the table names.

        Raises AlreadySettled or LeaseLost if the lease has ended, RuntimeError on a mistake in
        aztask.
        """
        after = TRANSITIONS.get((self.state, event))
        if after is not None:
            self.state = after
        elif self.state in (LeaseState.SETTLED, LeaseState.SETTLING):
            raise AlreadySettled
        elif self.state is LeaseState.LOST:
            raise LeaseLost(self.lost_reason or LeaseLost.__doc__)
        else:
            raise RuntimeError(f"a lease that is {self.state.value} cannot {event.value}")


class LeaseBook:
    """All leases that one keeper holds, and when each is due. Not locked: the keeper locks."""

    def __init__(self, *, renew_at: float = RENEW_AT, fixed_lease: bool = False) -> None:
        self._renew_at = renew_at
        self._fixed_lease = fixed_lease
        self._heap: list[tuple[float, int, Lease]] = []
        self._order = count()
        self._leases: dict[Lease, None] = {}  # in order of arrival, so that a course repeats

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases))

    def add(self, lease: Lease) -> None:
        """Hold the lease and schedule its renewal."""
        self._leases[lease] = None
        self._schedule(lease, self._renewal_at(lease))

    def drop(self, lease: Lease) -> None:
        """Forget the lease (settled, lost or given up); it is not renewed again."""
        self._leases.pop(lease, None)

    def next_at(self) -> float | None:
        """When the next lease is due; None if there is none."""
        while self._heap and self._stale(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> tuple[list[Lease], list[Lease]]:
        """(leases to renew, now in state RENEWING; leases that ended, now LOST)."""
        due_at = self.next_at()
        if due_at is None or due_at > now:
            return [], []
        renew: list[Lease] = []
        lapsed: list[Lease] = []
        while self._heap:
            entry = self._heap[0]
            if self._stale(entry):
                heapq.heappop(self._heap)
                continue
            lease = entry[2]
            if entry[0] > now and self._early_at(lease) > now:
                break
            heapq.heappop(self._heap)
            self._decide(lease, now, renew, lapsed)
        return renew, lapsed

    def renewal_seconds(self, lease: Lease, now: float) -> float | None:
        """Seconds to request in a renewal; None if the lease is not renewed again (rule 5)."""
        if lease.limit_at is None or now + lease.seconds <= lease.limit_at:
            return lease.seconds
        remaining = lease.limit_at - now
        if self._fixed_lease or remaining < SHORTEST_RENEWAL or lease.limit_at <= lease.deadline:
            return None
        return remaining

    def ends_at_limit(self, lease: Lease, now: float) -> bool:
        """True if the lease's next end is final because of `limit_at`, and for no other reason."""
        if lease.limit_at is None or lease.failures or lease.state is not LeaseState.HELD:
            return False
        if self._renew_at >= NO_RENEWAL:
            return lease.limit_at <= lease.deadline
        return self.renewal_seconds(lease, now) is None

    def answered(self, lease: Lease, answer: Renewed | Lost | Unknown, asked_at: float) -> None:
        """Record the answer to a renewal that was requested at `asked_at`.

        A failed renewal is tried again soon, until the deadline; the answer `Lost` ends the lease.
        """
        if isinstance(answer, Renewed):
            lease.change(LeaseEvent.RENEWED)
            lease.granted_at = asked_at
            lease.renewals += 1
            lease.failures = 0
            self._schedule(lease, self._renewal_at(lease))
        elif isinstance(answer, Lost):
            self.lapse(lease, answer.reason or "the broker says that it is no longer ours")
        else:
            lease.change(LeaseEvent.RENEW_FAILED)
            lease.failures += 1
            pause = min(0.1 * 2**lease.failures, 0.1 * lease.delivery.lease_seconds)
            self._schedule(lease, min(asked_at + pause, lease.deadline))

    def token_gone(self, lease: Lease) -> None:
        """Record that a renewal's reply was lost, and its token with it: no more renewals."""
        lease.change(LeaseEvent.TOKEN_GONE)
        self._schedule(lease, lease.deadline)

    def lapse(self, lease: Lease, reason: str) -> None:
        """End the lease; the first reason is kept."""
        lease.change(LeaseEvent.LAPSE)
        lease.lost_reason = lease.lost_reason or reason
        self.drop(lease)

    def hurry(self, lease: Lease, now: float) -> None:
        """Renew the lease at the next turn: the task asked for more time, or its run began."""
        self._schedule(lease, now)

    def retry_settlement(self, lease: Lease, now: float) -> None:
        """Hold and renew the lease again, because its settlement got no answer."""
        lease.change(LeaseEvent.SETTLE_FAILED)
        self._schedule(lease, max(now, self._renewal_at(lease)))

    def _decide(self, lease: Lease, now: float, renew: list[Lease], lapsed: list[Lease]) -> None:
        if now >= lease.deadline:
            if lease.state in (LeaseState.HELD, LeaseState.UNKNOWN):
                self.lapse(lease, "its deadline passed before it could be renewed")
                lapsed.append(lease)
        elif lease.state is LeaseState.HELD:
            if self.renewal_seconds(lease, now) is None:
                self._schedule(lease, lease.deadline)
            else:
                lease.change(LeaseEvent.RENEW)
                renew.append(lease)
        elif lease.state is LeaseState.UNKNOWN:
            self._schedule(lease, lease.deadline)

    def _renewal_at(self, lease: Lease) -> float:
        """When to renew the lease; if it is not renewed, when it ends."""
        if self._renew_at >= NO_RENEWAL:
            return lease.deadline
        return lease.granted_at + self._renew_at * self._granted(lease)

    def _schedule(self, lease: Lease, at: float) -> None:
        lease.due_at = at
        heapq.heappush(self._heap, (at, next(self._order), lease))

    def _stale(self, entry: tuple[float, int, Lease]) -> bool:
        at, _, lease = entry
        return lease not in self._leases or lease.due_at != at

    def _early_at(self, lease: Lease) -> float:
        if lease.failures or lease.state is not LeaseState.HELD or lease.due_at >= lease.deadline:
            return lease.due_at  # a retry is planned, or only its end is
        return min(lease.due_at, lease.granted_at + BATCH_FROM * self._granted(lease))

    @staticmethod
    def _granted(lease: Lease) -> float:
        return lease.delivery.lease_seconds
