"""The lease keeper: renews every lease it holds, and reports the ones that are lost.

Rules
1. It runs in a process without task code, so that no task can delay a renewal.
2. Before you settle, call `begin_settlement`. It answers False while a renewal is under way;
   `LeaseReports.settleable` says when you should try again. So the renewal and the settlement of
   one lease never overlap.
3. Reports are made on the keeper's threads, and must return at once (`LeaseReports`).
4. Whatever fails, no lease stays in the state of being renewed: it would never be renewed or
   settled again. Its renewal counts as one without an answer, and is tried again.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable
from typing import Final, TypeAlias

from aztask.errors import AlreadySettled, AztaskError, LeaseLost
from aztask.message.envelope import Envelope
from aztask.queues.base import Broker, Receiver
from aztask.queues.delivery import Lost, Renewed, Settled, Unknown
from aztask.queues.lease.state import RENEW_AT, Lease, LeaseBook, LeaseEvent, LeaseState
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.parts import Part
from aztask.support.threadpool import ThreadPool

logger = logging.getLogger(__name__)

LONGEST_SLEEP = 1.0
RENEWERS = 16
"""Receivers that renew at the same time: on Service Bus, each session has its own receiver."""

LONGEST_ROUND: Final = 30.0
"""Seconds for the renewal of all leases that are due: each request ends sooner than its lease."""

UNANSWERED = "a renewal got no answer; the message comes again when the lease ends"

Group: TypeAlias = tuple[Receiver, float, list[Lease]]
"""A receiver, the seconds to request, and the leases that one request can renew for so long."""


class LeaseReports:
    """What a keeper reports; here nothing follows. Rule 3 holds for whatever a subclass does."""

    def lost(self, lease: Lease) -> None:
        """The broker or the clock says that the lease has ended."""

    def renewed(self, lease: Lease, age: float) -> None:
        """The lease was renewed. age: the share of it that had passed at the renewal."""

    def settleable(self) -> None:
        """Leases that were being renewed can be settled."""


class LeaseKeeper:
    """Renews leases in batches: one request per receiver and round if the service can."""

    def __init__(
        self,
        broker: Broker,
        *,
        clock: Clock = SYSTEM_CLOCK,
        renew_at: float = RENEW_AT,
        reports: LeaseReports | None = None,
        threads: bool = True,
    ) -> None:
        """
        * `renew_at`: the share of the lease after which it is renewed.
        * `reports`: gets the lost and renewed leases.
        * `threads`: False if the caller calls `turn`: then nothing runs beside it.
        """
        self._clock = clock
        self._book = LeaseBook(renew_at=renew_at, fixed_lease=broker.capabilities.fixed_lease)
        self._renewal_token_changes = broker.capabilities.update and broker.capabilities.remote
        self._receivers: dict[Lease, Receiver] = {}
        self._condition = threading.Condition()
        self._reports = reports or LeaseReports()
        self._threads = threads
        self._settlers_wait = False
        self._wakes_at = math.inf  # when the thread looks again by itself
        # Those of this round whose renewal has no answer yet, in their order.
        self._unanswered: dict[Lease, None] = {}
        self._failed = False
        self._stopping = False
        remote = broker.capabilities.remote
        self._thread_pool = ThreadPool("renewing", RENEWERS) if remote and threads else None
        self.part = Part("leases", longest=LONGEST_ROUND, essential="renew")
        self._thread = self.part.thread(self._run, "aztask-leases")

    def start(self) -> LeaseKeeper:
        """Start the thread that renews, if it may have one; returns the keeper itself."""
        if self._threads:
            self._thread.start()
        return self

    def stop(self) -> None:
        """Stop renewing; leases that are still held expire."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self.part.stop()
        if self._thread_pool is not None:
            self._thread_pool.close()

    def hold(self, receiver: Receiver, leases: Iterable[Lease]) -> None:
        """Hold these leases, which `receiver` got, and renew them from now on."""
        with self._condition:
            for lease in leases:
                self._receivers[lease] = receiver
                self._book.add(lease)
            next_at = self._book.next_at()
            if next_at is not None and next_at < self._wakes_at:
                self._wakes_at = next_at
                self._condition.notify()

    def extend(self, lease: Lease, seconds: float, limit_at: float | None) -> None:
        """Renew at the next turn, for `seconds` from then, up to `limit_at`."""
        with self._condition:
            lease.seconds = seconds
            lease.limit_at = limit_at
            if lease.state is LeaseState.HELD:
                self._book.hurry(lease, self._clock.monotonic())
                self._condition.notify()
            else:
                lease.hurried = lease.state is LeaseState.RENEWING

    def extend_now(self, lease: Lease, seconds: float, patience: float) -> bool:
        """As `extend`, up to the same limit, and wait up to `patience` seconds for the answer.

        True if the lease was renewed for `seconds`. Raises AlreadySettled, and LeaseLost if it has
        ended or its limit allows no further renewal.
        """
        with self._condition:
            # A renewal that is under way asked for the former duration.
            self._wait_for_renewal(lease)
            if lease.state in (LeaseState.SETTLING, LeaseState.SETTLED):
                raise AlreadySettled
            renewals, limit_at = lease.renewals, lease.limit_at
            self.extend(lease, seconds, limit_at)
            if self._book.renewal_seconds(lease, self._clock.monotonic()) is None:
                raise LeaseLost("max_lease allows no further renewal; raise max_lease")
            self._condition.wait_for(
                lambda: (
                    lease.renewals > renewals
                    or lease.state not in (LeaseState.HELD, LeaseState.RENEWING)
                ),
                timeout=patience,
            )
            return lease.renewals > renewals

    def limit(self, lease: Lease, limit_at: float) -> None:
        """Renew the lease up to `limit_at` and no further."""
        with self._condition:
            lease.limit_at = limit_at

    def ends_at_limit(self, lease: Lease) -> bool:
        """True if the lease is not renewed again because its limit has been reached."""
        with self._condition:
            return self._book.ends_at_limit(lease, self._clock.monotonic())

    def update(
        self, lease: Lease, receiver: Receiver, envelope: Envelope
    ) -> Renewed | Lost | Unknown:
        """Replace the message's content, which also renews the lease; on the caller's thread.

        Waits for a renewal that is under way. Raises LeaseLost or AlreadySettled; LeaseLost also if
        a renewal got no answer, because then the token may be stale.
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
            self._reports.renewed(lease, 0.0)
        return answer

    def begin(self, lease: Lease) -> None:
        """Begin the settlement of one lease, after waiting for a renewal that is under way.

        Raises AlreadySettled or LeaseLost; LeaseLost also if a renewal got no answer, because then
        the token may be stale.
        """
        with self._condition:
            self._wait_for_renewal(lease)
            lease.change(LeaseEvent.SETTLE)

    def begin_settlement(self, leases: Iterable[Lease]) -> list[bool]:
        """For each lease: True if you may settle it now; False if not now or never."""
        answers = []
        with self._condition:
            for lease in leases:
                settleable = lease.state is LeaseState.HELD
                if settleable:
                    lease.change(LeaseEvent.SETTLE)
                elif lease.state is LeaseState.RENEWING:
                    self._settlers_wait = True
                answers.append(settleable)
        return answers

    def book(self, answers: Iterable[tuple[Lease, Settled | Lost | Unknown]]) -> None:
        """Record the broker's answers to settlements.

        After Settled, the lease is forgotten. After Lost, it has ended. After Unknown, it is held
        and renewed until the settlement is tried again.
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
        """Forget these leases, which are settled."""
        with self._condition:
            for lease in leases:
                lease.change(LeaseEvent.SETTLED)
                self._forget(lease)

    def settlement_failed(self, lease: Lease) -> None:
        """Hold and renew the lease until its settlement, which got no answer, is tried again."""
        with self._condition:
            self._book.retry_settlement(lease, self._clock.monotonic())
            self._condition.notify()

    def lapse(self, lease: Lease, reason: str) -> None:
        """End the lease, whose settlement was refused. It is not reported."""
        with self._condition:
            self._book.lapse(lease, reason)
            self._receivers.pop(lease, None)

    def drop(self, leases: Iterable[Lease]) -> None:
        """Stop renewing these leases and let them expire."""
        with self._condition:
            for lease in leases:
                self._forget(lease)

    def __len__(self) -> int:
        with self._condition:
            return len(self._book)

    @property
    def due_at(self) -> float | None:
        """When `turn` has something to do, on the clock of the deadlines; None if it holds none."""
        with self._condition:
            return self._book.next_at()

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
        """Renew leases that are due and report those that ended; `wait` for one if none is due."""
        with self._condition:
            now = self._clock.monotonic()
            next_at = self._book.next_at()
            if next_at is None or next_at > now:
                if not self._failed:
                    self.part.rest()
                if wait and not self._stopping:
                    pause = LONGEST_SLEEP if next_at is None else min(next_at - now, LONGEST_SLEEP)
                    self._wakes_at = now + pause
                    self._condition.wait(pause)
                return
            renew, lapsed = self._book.take_due(now)
            for lease in lapsed:
                self._receivers.pop(lease, None)
            self._unanswered.update(dict.fromkeys(renew))
        self._failed = False
        self.part.begin()
        try:
            for lease in lapsed:
                self._reports.lost(lease)
            with self._condition:
                groups = self._grouped(renew, now)
            self._renew_all(groups)
        finally:
            self._book_unanswered(now)
        if self._failed:
            self.part.idle()
        else:
            self.part.rest()

    def _run(self) -> None:
        while not self._stopping:
            self.turn(wait=True)

    def _book_unanswered(self, asked_at: float) -> None:
        """Renew those again that should have been renewed by now and were not (rule 4)."""
        with self._condition:
            if not self._unanswered:
                return
            for lease in self._unanswered:
                self._book_answer(lease, Unknown("it failed", untouched=True), asked_at)
            self._unanswered.clear()
            self._condition.notify_all()
        self._reports.settleable()

    def _renew_all(self, groups: list[Group]) -> None:
        """Renew the groups; across a network in parallel, so that none waits for another."""
        if self._thread_pool is None:
            for group in groups:
                self._renew(group)
        else:
            self._thread_pool.map(self._renew, groups)

    def _grouped(self, leases: list[Lease], now: float) -> list[Group]:
        """Group leases that one request can renew: of one receiver, for the same duration."""
        groups: dict[tuple[int, float], Group] = {}
        for lease in leases:
            seconds = round(self._book.renewal_seconds(lease, now) or lease.seconds, 1)
            receiver = self._receivers.get(lease)
            if receiver is None:  # it was dropped in between
                continue
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
            logger.warning(
                "could not renew %d leases, trying again until they end: %s", len(leases), error
            )
            answers = [Unknown(str(error), untouched=True)] * len(leases)
        except Exception as error:  # noqa: BLE001  # an SDK may raise anything
            self.part.failed(error, f"the renewal of {len(leases)} leases is tried again")
            self._failed = True
            answers = [Unknown(str(error))] * len(leases)
        with self._condition:
            for lease, answer in zip(leases, answers, strict=True):
                self._unanswered.pop(lease, None)
                self._book_answer(lease, answer, asked_at)
            notify_settlers, self._settlers_wait = self._settlers_wait, False
            self._condition.notify_all()
        for lease, age, answer in zip(leases, ages, answers, strict=True):
            if isinstance(answer, Renewed):
                self._reports.renewed(lease, age)
            elif isinstance(answer, Lost):  # if another thread found it lost, that one reports it
                self._reports.lost(lease)
        if notify_settlers:
            self._reports.settleable()

    def _book_answer(self, lease: Lease, answer: Renewed | Lost | Unknown, asked_at: float) -> None:
        if isinstance(answer, Unknown) and self._renewal_token_changes and not answer.untouched:
            self._book.token_gone(lease)
        else:
            self._book.answered(lease, answer, asked_at)
            if lease.hurried and lease.state is LeaseState.HELD:
                lease.hurried = False
                self._book.hurry(lease, self._clock.monotonic())
        if lease.state is LeaseState.LOST:
            self._receivers.pop(lease, None)
