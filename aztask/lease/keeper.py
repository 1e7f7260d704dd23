"""The lease keeper: renews every lease it is given, and tells of those it lost.

Rules
1. It runs where no task code runs, so that nothing a task does can delay a renewal.
2. Whoever settles calls `begin_settlement` first; it answers False while a renewal is under way,
   and `settleable` is called when the caller should try again. So renewal and settlement of one
   lease never overlap.
3. Callbacks run on the keeper's threads and must return at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TypeAlias

from aztask.brokers.base import Broker, Receiver
from aztask.brokers.delivery import Lost, Renewed, Settled, Unknown
from aztask.errors import AztaskError, LeaseLost
from aztask.lease.state import RENEW_AT, Lease, LeaseBook, LeaseEvent, LeaseState
from aztask.message.envelope import Envelope
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.threadpool import ThreadPool

logger = logging.getLogger(__name__)

LONGEST_SLEEP = 1.0
RENEWERS = 16
"""Receivers that renew at the same time: each session on Service Bus has one of its own."""

UNANSWERED = "a renewal got no answer; the message comes again when the lease ends"

Group: TypeAlias = tuple[Receiver, float, list[Lease]]
"""Leases that one request can renew, for so many seconds."""


def _nothing(*_: object) -> None:
    """The callback of whoever does not listen."""


class LeaseKeeper:
    """Renews leases in batches, one request per receiver and round where the service can."""

    def __init__(
        self,
        broker: Broker,
        *,
        clock: Clock = SYSTEM_CLOCK,
        renew_at: float = RENEW_AT,
        on_lost: Callable[[Lease], None] = _nothing,
        on_renewed: Callable[[Lease, float], None] = _nothing,
        on_settleable: Callable[[], None] = _nothing,
    ) -> None:
        """on_renewed gets the lease and the age, as a share of the lease, at which it was asked."""
        self._clock = clock
        self._book = LeaseBook(renew_at=renew_at, fixed_lease=broker.capabilities.fixed_lease)
        self._renewal_token_changes = broker.capabilities.update and broker.capabilities.remote
        self._receivers: dict[Lease, Receiver] = {}
        self._condition = threading.Condition()
        self._on_lost = on_lost
        self._on_renewed = on_renewed
        self._on_settleable = on_settleable
        self._settlers_wait = False
        self._stopping = False
        self._thread_pool = ThreadPool("renewing", RENEWERS) if broker.capabilities.remote else None
        self._thread = threading.Thread(target=self._run, name="aztask-leases", daemon=True)

    def start(self) -> LeaseKeeper:
        """Begin to renew."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Renew no more; leases that are still held run out."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        if self._thread_pool is not None:
            self._thread_pool.close()

    def hold(self, receiver: Receiver, leases: Iterable[Lease]) -> None:
        """Renew these, which `receiver` was granted, from now on."""
        with self._condition:
            before = self._book.next_at()
            for lease in leases:
                self._receivers[lease] = receiver
                self._book.add(lease)
            after = self._book.next_at()
            if after is not None and (before is None or after < before):
                self._condition.notify()

    def extend(self, lease: Lease, seconds: float, limit_at: float | None) -> None:
        """Ask for `seconds` from now on, at the next turn, up to `limit_at`."""
        with self._condition:
            lease.seconds = seconds
            lease.limit_at = limit_at
            if lease.state is LeaseState.HELD:
                self._book.hurry(lease, self._clock.monotonic())
                self._condition.notify()

    def limit(self, lease: Lease, limit_at: float) -> None:
        """Renew up to `limit_at`, no further."""
        with self._condition:
            lease.limit_at = limit_at

    def update(
        self, lease: Lease, receiver: Receiver, envelope: Envelope
    ) -> Renewed | Lost | Unknown:
        """Replace the message's content, which renews the lease as well; on the caller's thread.

        Waits for a renewal that is under way. Raises LeaseLost or AlreadySettled; LeaseLost too
        when a renewal got no answer, because then the token may be stale.
        """
        with self._condition:
            self._wait_for_renewal(lease)
            lease.change(LeaseEvent.RENEW)
            asked_at = self._clock.monotonic()
        answer: Renewed | Lost | Unknown = Unknown()
        try:
            answer = receiver.update(lease.delivery, envelope)
        finally:
            with self._condition:
                self._book_answer(lease, answer, asked_at)
                self._condition.notify_all()
        if isinstance(answer, Renewed):
            self._on_renewed(lease, 0.0)
        return answer

    def begin(self, lease: Lease) -> None:
        """Begin the settlement of one lease, after waiting for a renewal that is under way.

        Raises AlreadySettled or LeaseLost; LeaseLost too when a renewal got no answer, because
        then the token may be stale.
        """
        with self._condition:
            self._wait_for_renewal(lease)
            lease.change(LeaseEvent.SETTLE)

    def begin_settlement(self, leases: Iterable[Lease]) -> list[bool]:
        """For each lease: True, it may be settled now; False, not now or not ever (its state)."""
        answers = []
        with self._condition:
            for lease in leases:
                may = lease.state is LeaseState.HELD
                if may:
                    lease.change(LeaseEvent.SETTLE)
                elif lease.state is LeaseState.RENEWING:
                    self._settlers_wait = True
                answers.append(may)
        return answers

    def book(self, answers: Iterable[tuple[Lease, Settled | Lost | Unknown]]) -> None:
        """Note what the broker answered to settlements that were begun.

        Settled: the lease is forgotten. Lost: it is over. Unknown: it is held and renewed until the
        settlement is tried again.
        """
        settled = []
        for lease, answer in answers:
            if isinstance(answer, Settled):
                settled.append(lease)
            elif isinstance(answer, Lost):
                self.lapse(lease, answer.reason or "the broker says so")
            else:
                self.settlement_failed(lease)
        self.settled(settled)

    def settled(self, leases: Iterable[Lease]) -> None:
        """These are settled: forget them."""
        with self._condition:
            for lease in leases:
                lease.change(LeaseEvent.SETTLED)
                self._forget(lease)

    def settlement_failed(self, lease: Lease) -> None:
        """The settlement got no answer: hold and renew the lease until it is tried again."""
        with self._condition:
            self._book.retry_settlement(lease, self._clock.monotonic())
            self._condition.notify()

    def lapse(self, lease: Lease, reason: str) -> None:
        """The lease is over (a settlement was refused); not told again through `on_lost`."""
        with self._condition:
            self._book.lapse(lease, reason)
            self._receivers.pop(lease, None)

    def drop(self, leases: Iterable[Lease]) -> None:
        """Renew these no more and leave them to run out."""
        with self._condition:
            for lease in leases:
                self._forget(lease)

    def __len__(self) -> int:
        with self._condition:
            return len(self._book)

    def _wait_for_renewal(self, lease: Lease) -> None:
        self._condition.wait_for(
            lambda: lease.state is not LeaseState.RENEWING,
            timeout=max(0.0, lease.deadline - self._clock.monotonic()),
        )
        if lease.state in (LeaseState.RENEWING, LeaseState.UNKNOWN):
            raise LeaseLost(UNANSWERED)

    def _forget(self, lease: Lease) -> None:
        self._book.drop(lease)
        self._receivers.pop(lease, None)

    def turn(self, *, wait: bool = False) -> None:
        """Renew what is due and report what lapsed; if nothing is due, `wait` for it a while."""
        with self._condition:
            now = self._clock.monotonic()
            next_at = self._book.next_at()
            if next_at is None or next_at > now:
                if wait and not self._stopping:
                    left = LONGEST_SLEEP if next_at is None else next_at - now
                    self._condition.wait(min(left, LONGEST_SLEEP))
                return
            renew, lapsed = self._book.take_due(now)
            groups = self._grouped(renew, now)
            for lease in lapsed:
                self._receivers.pop(lease, None)
        for lease in lapsed:
            self._on_lost(lease)
        self._renew_all(groups)

    def _run(self) -> None:
        while not self._stopping:
            self.turn(wait=True)

    def _renew_all(self, groups: list[Group]) -> None:
        """Across a network side by side: a connection that hangs must not hold up the others."""
        if self._thread_pool is None:
            for group in groups:
                self._renew(group)
        else:
            self._thread_pool.map(self._renew, groups)

    def _grouped(self, leases: list[Lease], now: float) -> list[Group]:
        """Leases that one request can renew: of one receiver, for the same duration."""
        groups: dict[tuple[int, float], Group] = {}
        for lease in leases:
            seconds = round(self._book.renewal_seconds(lease, now) or lease.seconds, 1)
            receiver = self._receivers[lease]
            groups.setdefault((id(receiver), seconds), (receiver, seconds, []))[2].append(lease)
        return list(groups.values())

    def _renew(self, group: Group) -> None:
        receiver, seconds, leases = group
        asked_at = self._clock.monotonic()
        ages = [(asked_at - lease.granted_at) / lease.delivery.lease_seconds for lease in leases]
        answers: list[Renewed | Lost | Unknown]
        try:
            answers = receiver.renew([lease.delivery for lease in leases], seconds)
        except AztaskError as error:
            logger.warning("could not renew %d leases: %s", len(leases), error)
            answers = [Unknown(str(error), untouched=True)] * len(leases)
        except Exception as error:  # whatever an SDK raises: the other leases must be renewed
            logger.exception("could not renew %d leases", len(leases))
            answers = [Unknown(str(error))] * len(leases)
        with self._condition:
            for lease, answer in zip(leases, answers, strict=True):
                self._book_answer(lease, answer, asked_at)
            tell_settlers, self._settlers_wait = self._settlers_wait, False
            self._condition.notify_all()
        for lease, age, answer in zip(leases, ages, answers, strict=True):
            if isinstance(answer, Renewed):
                self._on_renewed(lease, age)
            elif isinstance(answer, Lost):  # another thread may see it lost: it tells by itself
                self._on_lost(lease)
        if tell_settlers:
            self._on_settleable()

    def _book_answer(self, lease: Lease, answer: Renewed | Lost | Unknown, asked_at: float) -> None:
        if isinstance(answer, Unknown) and self._renewal_token_changes and not answer.untouched:
            self._book.token_gone(lease)
        else:
            self._book.answered(lease, answer, asked_at)
        if lease.state is LeaseState.LOST:
            self._receivers.pop(lease, None)
