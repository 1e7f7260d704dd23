"""Receivers of sessions: messages of one session in order, for one receiver at a time.

Rules
1. The connection that accepted a session owns it: receiving, renewing and settling all happen on
   its one thread, a receive in slices of `SLICE` seconds between which the others get their turn.
2. A receiver of a named session waits until it can have it, and holds it from then on. One that
   takes any session lets go of it when nothing is left in it, and looks for the next.
3. The session's lease is renewed with its deliveries. When it is lost, all of them are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from azure.servicebus import ServiceBusReceiver

from aztask.brokers import servicebus_private as private
from aztask.brokers.base import ANY_SESSION, AnySession, Delivery, Lost, Renewed, Settled, Unknown
from aztask.brokers.servicebus_client import BusClient
from aztask.brokers.servicebus_clock import ServiceClock
from aztask.brokers.servicebus_control import Control
from aztask.brokers.servicebus_delivery import BusDelivery, unsettled
from aztask.brokers.servicebus_errors import SDK_ERRORS, error_of, is_lost, is_no_session
from aztask.brokers.servicebus_receiver import OPEN_SECONDS, BusReceiver, Send, request_seconds
from aztask.clock import Clock
from aztask.settlement import Settlement

SLICE: Final = 0.02
ACCEPT_SECONDS: Final = 0.5
"""How long the service looks for a session with messages before it says that there is none."""

GONE: Final = Lost("the session is not ours any more")


class SessionReceiver(BusReceiver):
    """Takes the deliveries of one session, or of one after the other. Renewing one renews all.

    Closing it lets go of the session: what is leased in it goes back.
    """

    def __init__(
        self,
        client: BusClient,
        queue: str,
        lease: float,
        send: Send,
        service_clock: ServiceClock,
        *,
        clock: Clock,
        session: str | AnySession,
        delete: bool = False,
    ) -> None:
        super().__init__(client, queue, lease, send, service_clock, clock=clock, delete=delete)
        self._session = session
        self._owner: ServiceBusReceiver | None = None
        self._deadline = 0.0
        self._held: list[BusDelivery] = []
        seconds = request_seconds(lease)
        self._settling = Control(client, self._accept, queue, seconds, repeat=False)
        self._renewing = self._settling

    def _accept(self) -> ServiceBusReceiver:
        """On the owning thread: a connection that holds a session. Raises if there is none."""
        link = self._client.receiver(
            self._queue,
            delete=self._delete,
            session=self._session,
            request_seconds=request_seconds(self._lease),
            session_wait=ACCEPT_SECONDS if self._session is ANY_SESSION else None,
        )
        asked_at = self._clock.monotonic()
        try:
            private.open_link(link, OPEN_SECONDS)
        except SDK_ERRORS:
            private.disconnect(link)
            raise
        self._owner, self._deadline = link, asked_at + self._lease
        return link

    def receive(self, limit: int, wait: float) -> list[Delivery]:
        """Up to `limit` deliveries of the session, as soon as there is one."""
        until = time.monotonic() + wait
        while not self._closed:
            left = until - time.monotonic()
            try:
                deliveries: list[Delivery] = self._settling.call(
                    lambda link: self._turn(link, limit)
                )
            except SDK_ERRORS as error:
                self._drop()
                if not is_no_session(error) and not is_lost(error):
                    raise error_of(error, self._queue) from None
                time.sleep(max(0.0, min(ACCEPT_SECONDS, left)))
                deliveries = []
            if deliveries or left <= 0:
                return deliveries
        return []

    def _turn(self, link: ServiceBusReceiver, limit: int) -> list[Delivery]:
        """On the owning thread: one slice of waiting; lets go of a session that is used up."""
        messages: list[Any] = private.pull(link, limit, 5 * SLICE if not self._held else SLICE)
        deliveries = self._deliveries(messages, self._deadline - self._lease)
        now = self._clock.monotonic()
        self._held = [each for each in self._held if not each.settled and now < each.deadline]
        self._held += unsettled(deliveries) if not self._delete else []
        if not deliveries and not self._held and self._session is ANY_SESSION:
            self._drop()
        return deliveries

    def _drop(self) -> None:
        """Let go of the session; the next receive accepts one again."""
        self._owner, self._held = None, []
        self._settling.reconnect()

    def renew(
        self, deliveries: Sequence[Delivery], seconds: float | None = None
    ) -> list[Renewed | Lost | Unknown]:
        """Extend the session's lease, and with it every lease in it."""
        ours = unsettled(deliveries)
        if not ours:
            return []
        asked_at = self._clock.monotonic()
        try:
            self._settling.call(self._renew_session)
        except SDK_ERRORS as error:
            if is_lost(error):
                self._drop()
                return [GONE] * len(ours)
            return [Unknown(str(error_of(error, self._queue)))] * len(ours)
        self._deadline = asked_at + self._lease
        for each in (*self._held, *ours):
            if each in self._held:
                each.deadline = self._deadline
        return [Renewed(self._deadline) if each in self._held else GONE for each in ours]

    def _renew_session(self, link: ServiceBusReceiver) -> None:
        link.session.renew_lock(timeout=request_seconds(self._lease))

    def settle(
        self, pairs: Sequence[tuple[Delivery, Settlement]]
    ) -> list[Settled | Lost | Unknown]:
        """Carry out each settlement on the connection that owns the session; clones first."""
        ours = unsettled([delivery for delivery, _ in pairs])
        if self._owner is None:
            return [GONE] * len(ours)
        return super().settle(pairs)
