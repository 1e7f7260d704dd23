"""Receivers of sessions: messages of one session in order, for one receiver at a time.

Rules
1. The connection that accepted a session owns it: one thread receives, renews and settles on it. A
   receive waits in slices of `SLICE` seconds, so that renewals and settlements get their turn.
2. A receiver of a named session waits until the session is free, and then holds it. A receiver of
   any session releases a session that has no messages left, and looks for the next one.
3. The session's lease is renewed together with its deliveries. If it is lost, all of them are lost.
4. Only a receive accepts a session: renewing or settling a delivery of a lost session must not
   accept another session by accident. Each accepted session is a new connection, which takes half a
   second.
5. The session ends with its connection, so a settlement whose answer was lost cannot be repeated.
   Instead we peek at the queue: if the message is gone, it was settled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from azure.servicebus import ServiceBusReceivedMessage, ServiceBusReceiver
from azure.servicebus.exceptions import SessionLockLostError

from aztask.errors import AztaskError, LeaseLost, MessageTooLarge
from aztask.queues.base import (
    ANY_SESSION,
    Delivery,
    Lost,
    MessageState,
    ReceiverOptions,
    Renewed,
    Settled,
    Unknown,
)
from aztask.queues.servicebus import private
from aztask.queues.servicebus.client import BusClient
from aztask.queues.servicebus.clock import without_probes
from aztask.queues.servicebus.control import Control, Verdict
from aztask.queues.servicebus.errors import SDK_ERRORS, error_of, is_lost, is_no_session
from aztask.queues.servicebus.lock import LockWatch
from aztask.queues.servicebus.receiver import OPEN_SECONDS, BusReceiver, Send, request_seconds
from aztask.queues.servicebus.wire import BusDelivery, all_unsettled, state_of
from aztask.settlement import Abandon, Defer, Release, Settlement
from aztask.support.clock import Clock

SLICE: Final = 0.02
SHORTEST_ACCEPT: Final = 0.5
LONGEST_ACCEPT: Final = 30.0
"""The longest time that the service searches for a session with messages, seconds."""

CLOSE_SECONDS: Final = 1.0

STALE: Final = 0.1
"""If accepting took more than this share of the lease, the session is renewed at once."""

GONE: Final = Lost("we no longer hold the session")
UNCONFIRMED: Final = Unknown("the session's connection broke before the settlement was confirmed")


class BusSessionReceiver(BusReceiver):
    """Receives one session, or one session after another. Renewing one delivery renews all.

    Closing the receiver releases the session, and its leased messages go back.
    """

    def __init__(
        self,
        client: BusClient,
        options: ReceiverOptions,
        send: Send,
        *,
        peek: Callable[[int], list[Any]],
        clock: Clock,
        watch: LockWatch | None = None,
    ) -> None:
        """peek: peeks at a sequence number; returns the queue's next message from there on, if any.

        It raises AztaskError or one of `SDK_ERRORS`.
        """
        super().__init__(client, options, send, clock=clock, watch=watch)
        self._session = options.session
        self._peek = peek
        self._max_state_bytes = options.max_state_bytes
        self._owner: ServiceBusReceiver | None = None
        self._opening: ServiceBusReceiver | None = None
        self._accept_until: float | None = None
        self._deadline = 0.0
        self._held: list[BusDelivery] = []
        seconds = request_seconds(options.lease)
        self._settling = Control(client, self._accept, options.queue, seconds, repeat=False)
        self._renewing = self._settling

    # -- receiving ---------------------------------------------------------------------------

    def receive(self, limit: int, wait: float) -> list[Delivery]:
        """Up to `limit` deliveries of the session, as soon as there is one.

        Raises LeaseRefused if the lease differs from the queue's lock duration.
        """
        until = self._clock.monotonic() + wait
        deliveries: list[Delivery] = []
        refusal = self._watched()
        while not self._closed and not deliveries:
            self._accept_until = until
            try:
                deliveries = self._owned(lambda link: self._turn(link, limit), drop_always=True)
                deliveries = without_probes(deliveries, self.settle)
            except SDK_ERRORS as error:
                if not self._closed:
                    self._pause(error, until)
            finally:
                self._accept_until = None
            if self._clock.monotonic() >= until:
                break
        if self._watch is not None and (deliveries or refusal):
            refusal = self._watch.verdict()
        if refusal and self._watch is not None:
            self.let_go()  # the leased messages go back uncounted
            raise self._watch.error()
        return deliveries

    def _pause(self, error: Exception, until: float) -> None:
        """Wait before the next attempt to accept a session; raise what a retry cannot fix."""
        if not is_no_session(error) and not is_lost(error):
            raise error_of(error, self._queue) from None
        if self._session is not ANY_SESSION or is_lost(error):  # the service answered at once
            self._clock.sleep(max(0.0, min(SHORTEST_ACCEPT, until - self._clock.monotonic())))

    def _accept(self) -> ServiceBusReceiver:
        """Open a connection that holds a session; raise if none is free.

        Call on the owning thread.
        """
        self._owner, self._held = None, []
        until = self._accept_until
        if until is None:
            raise SessionLockLostError(message="no session is held here")
        wait = max(SHORTEST_ACCEPT, min(until - self._clock.monotonic(), LONGEST_ACCEPT))
        link = self._client.receiver(
            self._queue,
            delete=self._delete,
            session=self._session,
            request_seconds=request_seconds(self._lease),
            session_wait=wait if self._session is ANY_SESSION else None,
        )
        asked_at = self._clock.monotonic()
        self._opening = link
        try:
            if self._closed:  # `close` may have missed that this link is opening
                raise SessionLockLostError(message="the receiver was closed")
            private.open_link(link, wait + OPEN_SECONDS)
            self._note_lock(link, asked_at)
            if self._clock.monotonic() - asked_at > STALE * self._lease:
                asked_at = self._clock.monotonic()
                self._renew_session(link)
        except BaseException:
            self._client.drop(link)
            raise
        finally:
            self._opening = None
        self._owner, self._deadline = link, asked_at + self._lease
        return link

    def _turn(self, link: ServiceBusReceiver, limit: int) -> list[Delivery]:
        """Wait for messages for one slice; release a session without messages.

        Call on the owning thread.
        """
        if self._clock.monotonic() >= self._deadline:
            raise SessionLockLostError(message="the session's lease ended before it was renewed")
        messages: list[Any] = private.pull(link, limit, 5 * SLICE if not self._held else SLICE)
        deliveries = self._deliveries(messages, self._deadline - self._lease)
        now = self._clock.monotonic()
        self._held = [each for each in self._held if not each.settled and now < each.deadline]
        self._held += all_unsettled(deliveries) if not self._delete else []
        if not deliveries and not self._held and self._session is ANY_SESSION:
            self._retire()
        return deliveries

    def _deliveries(
        self, messages: Sequence[ServiceBusReceivedMessage], asked_at: float
    ) -> list[Delivery]:
        deliveries = super()._deliveries(messages, asked_at)
        for each in deliveries:
            if isinstance(each, BusDelivery):
                each.holder = self._owner
        return deliveries

    def _note_locks(self, messages: Sequence[ServiceBusReceivedMessage], asked_at: float) -> None:
        """Do nothing: a message's lock ends with its session's, so it shows no lock duration."""

    def _note_lock(self, link: ServiceBusReceiver, asked_at: float) -> None:
        """Check the lock duration with the session's lock, which was granted after `asked_at`."""
        locked_until = private.session_locked_until(link)
        if self._watch is not None and locked_until is not None:
            self._watch.lock(locked_until, self._clock.monotonic(), asked_at)

    # -- the session -------------------------------------------------------------------------

    def let_go(self) -> None:
        """Release the session and its leased messages now."""
        if self._owner is None or self._closed:
            return
        try:
            self._settling.call(lambda link: self._retire())
        except SDK_ERRORS as error:  # after a broken connection the session is released anyway
            if not is_lost(error):
                raise error_of(error, self._queue) from None

    def _retire(self) -> None:
        """Release the session by closing its link. Call on the owning thread."""
        self._owner, self._held = None, []
        self._settling.retire()

    def _drop(self) -> None:
        """Give up a lost session or a broken connection; the next receive accepts another session.

        Call on the owning thread.
        """
        self._owner, self._held = None, []
        self._settling.reconnect()

    def session_state(self, session: str) -> bytes | None:
        """The bytes that were last stored with the session. Raises LeaseLost, BrokerUnavailable."""
        seconds = request_seconds(self._lease)
        state: Any = self._of(session, lambda link: link.session.get_state(timeout=seconds))
        return None if state is None else bytes(state)

    def set_session_state(self, session: str, state: bytes | None) -> None:
        """Store bytes with the session. Raises LeaseLost, MessageTooLarge, BrokerUnavailable."""
        limit = self._max_state_bytes
        if state is not None and len(state) > limit:
            raise MessageTooLarge(
                f"a session's state of {len(state)} bytes is too large; {limit} are allowed"
            )
        seconds = request_seconds(self._lease)
        self._of(session, lambda link: link.session.set_state(state, timeout=seconds))

    def _of(self, session: str, request: Callable[[ServiceBusReceiver], Any]) -> Any:
        """Call `request` with the connection that holds the session.

        Raises LeaseLost, BrokerUnavailable.
        """
        owner = self._owner
        if owner is None or owner.session.session_id != session:
            raise LeaseLost(GONE.reason)
        try:
            answers = self._owned(lambda link: [request(link)] if link is owner else [])
        except SDK_ERRORS as error:
            if is_lost(error):
                raise LeaseLost(GONE.reason) from None
            raise error_of(error, self._queue) from None
        if not answers:
            raise LeaseLost(GONE.reason)
        return answers[0]

    def _owned(
        self, request: Callable[[ServiceBusReceiver], Any], *, drop_always: bool = False
    ) -> Any:
        """Call `request` with the owning connection, on its thread.

        If the session turns out to be lost, the connection is dropped on that thread too. On
        another thread the connection could already belong to the next session.
        """

        def guarded(link: ServiceBusReceiver) -> Any:
            try:
                return request(link)
            except SDK_ERRORS as error:
                if drop_always or is_lost(error):
                    self._drop()
                raise

        return self._settling.call(guarded)

    def renew(
        self, deliveries: Sequence[Delivery], seconds: float | None = None
    ) -> list[Renewed | Lost | Unknown]:
        """Extend the session's lease, and with it the leases of all its messages."""
        ours = all_unsettled(deliveries)
        if not ours:
            return []
        asked_at = self._clock.monotonic()
        try:
            self._owned(self._renew_session)
        except SDK_ERRORS as error:
            if is_lost(error):
                return [self._lost(each) for each in ours]
            return [Unknown(str(error_of(error, self._queue)))] * len(ours)
        self._deadline = asked_at + self._lease
        for each in (*self._held, *ours):
            if each in self._held:
                each.deadline = self._deadline
        return [
            Renewed(self._deadline) if each in self._held else self._lost(each) for each in ours
        ]

    def _lost(self, delivery: BusDelivery) -> Lost | Unknown:
        """The answer to the renewal of a delivery that we no longer hold."""
        return UNCONFIRMED if self._may_be_settled(delivery) else GONE

    def _renew_session(self, link: ServiceBusReceiver) -> None:
        asked_at = self._clock.monotonic()
        link.session.renew_lock(timeout=request_seconds(self._lease))
        self._note_lock(link, asked_at)

    def settle(
        self, pairs: Sequence[tuple[Delivery, Settlement]]
    ) -> list[Settled | Lost | Unknown]:
        """Carry out each settlement on the connection that owns the session; clones are sent first.

        For deliveries of a session that ended, this only finds out what happened (rule 5).
        """
        all_unsettled([delivery for delivery, _ in pairs])
        holds = [self._holds(delivery) for delivery, _ in pairs]
        held = [pair for pair, ours in zip(pairs, holds, strict=True) if ours]
        answers = iter(super().settle(held))
        return [
            next(answers) if ours else self._found_out(*pair)
            for pair, ours in zip(pairs, holds, strict=True)
        ]

    def _holds(self, delivery: Delivery) -> bool:
        """Whether the same connection still holds the delivery's session."""
        owner = self._owner
        if owner is None or not isinstance(delivery, BusDelivery):
            return False
        return delivery.holder is owner and private.is_open(owner)

    def _judged(self, delivery: BusDelivery, settlement: Settlement, verdict: Verdict) -> Verdict:
        """The answer for a verdict. After the session ended, a peek decides, not a refusal."""
        if isinstance(verdict, Settled) or self._holds(delivery) or not delivery.attempted:
            return super()._judged(delivery, settlement, verdict)
        found = self._found_out(delivery, settlement)
        return UNCONFIRMED if isinstance(found, Lost) else found

    def _found_out(self, delivery: Delivery, settlement: Settlement) -> Verdict:
        """Find out whether a settlement without an answer took effect, after the session ended.

        Abandoned and released messages go back with their session in any case. A message that is
        still in the queue counts as not settled. The service may show a settled message for a
        while; then we are too cautious.
        """
        if not isinstance(delivery, BusDelivery) or not self._may_be_settled(delivery):
            return GONE

        def done(message: ServiceBusReceivedMessage) -> bool:
            return isinstance(settlement, Defer) and state_of(message) is MessageState.DEFERRED

        if not isinstance(settlement, Abandon | Release):
            number = int(delivery.position)
            try:
                found = self._peek(number)
            except (AztaskError, *SDK_ERRORS) as error:
                return Unknown(str(error_of(error, self._queue)))
            if any(each.sequence_number == number and not done(each) for each in found):
                return GONE
        delivery.settled = True
        return Settled()

    def _release(self, deliveries: Sequence[BusDelivery], kinds: Sequence[Settlement]) -> set[int]:
        """Release deliveries over the owning link; returns the indexes of those released."""
        indexes = [i for i, settlement in enumerate(kinds) if isinstance(settlement, Release)]
        if not indexes:
            return set()
        released: set[int] = self._settling.call(
            lambda link: {i for i in indexes if private.release(link, deliveries[i].message)}
        )
        return released

    def close(self) -> None:
        """Stop receiving and release the session; ends a receive that is in progress."""
        super().close()
        give_up_at = self._clock.monotonic() + CLOSE_SECONDS
        while (opening := self._opening) is not None and self._clock.monotonic() < give_up_at:
            private.end(opening)  # has no effect before its socket exists
            self._clock.sleep(SLICE)
