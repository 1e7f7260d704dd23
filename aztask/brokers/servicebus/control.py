"""The control connection: renewals, settlements and looks at a queue, many in one request.

Rules
1. One thread owns one SDK receiver: it is fast but not thread-safe, and a second thread on it
   stalls for up to a second ([seen] azure-servicebus 7.15). Others post their work and wait.
2. What was posted while a request was under way goes out together in the next one.
3. A request with one bad token fails as a whole: it is halved until the bad one stands alone.
4. A connection that broke is opened again and the request repeated, once: renewals and settlements
   of a lock token can be repeated without harm. Then the answer is `Unknown`.
5. An order remembers that a request for it got no answer. If the service refuses the repetition,
   the caller decides what that means: the first request may have been carried out.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, TypeAlias
from uuid import UUID

from azure.servicebus import ServiceBusReceivedMessage, ServiceBusReceiver

from aztask.brokers.delivery import Lost, Settled, Unknown
from aztask.brokers.servicebus import private
from aztask.brokers.servicebus.client import BusClient, Connect
from aztask.brokers.servicebus.errors import SDK_ERRORS, error_of, is_lost, is_refusal
from aztask.errors import BrokerUnavailable

logger = logging.getLogger(__name__)

MOST_TOKENS: Final = 200
"""Lock tokens in one request: about 4 KiB."""

SHORTEST_OPENING: Final = 2.0
"""Seconds: the SDK takes half a second to open a connection, more on a busy machine."""

RENEW: Final = "renew"

Verdict: TypeAlias = Settled | Lost | Unknown


@dataclass(slots=True, eq=False)
class LockRequest:
    """What is to be done to one lock. verb: `RENEW` or a key of `private.STATUSES`.

    unanswered: a request for it was sent and got no answer (rule 5).
    """

    verb: str
    token: UUID
    message: ServiceBusReceivedMessage
    reason: str = ""
    description: str = ""
    verdict: Verdict = field(default_factory=Unknown)
    unanswered: bool = False

    @property
    def kind(self) -> tuple[str, str, str]:
        """Orders of one kind can share a request."""
        return self.verb, self.reason, self.description


@dataclass(slots=True, eq=False)
class _Work:
    """Orders of one caller, or a call, with what tells the caller that they are done."""

    future: Future[Any]
    orders: Sequence[LockRequest] = ()
    call: Callable[[ServiceBusReceiver], Any] | None = None


class Control:
    """One connection and its thread. Any thread may call."""

    def __init__(
        self,
        client: BusClient,
        connect: Connect,
        queue: str,
        request_seconds: float,
        *,
        repeat: bool = True,
    ) -> None:
        """repeat: rule 4; not so for a session, which a new connection would not hold."""
        self._reopen = repeat
        self._tries = (False, True) if repeat else (True,)
        self._client = client
        self._connect = connect
        self._queue = queue
        self._seconds = request_seconds
        self._work: deque[_Work] = deque()
        self._condition = threading.Condition(threading.Lock())
        self._receiver: ServiceBusReceiver | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def carry_out(self, orders: Sequence[LockRequest]) -> None:
        """Carry out all; each order then has its verdict."""
        self._post(_Work(Future(), orders)).result()

    def call(self, function: Callable[[ServiceBusReceiver], Any]) -> Any:
        """`function` of the receiver, on its thread. Raises what `error_of` makes of errors."""
        return self._post(_Work(Future(), call=function)).result()

    def warm(self) -> None:
        """Connect now, in the background: the first renewal need not wait for it."""
        with suppress(BrokerUnavailable):  # it was closed meanwhile
            self._post(_Work(Future(), call=lambda _: None))

    def close(self) -> None:
        """Finish what was posted, then let go of the connection."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    def _post(self, work: _Work) -> Future[Any]:
        with self._condition:
            if self._closed:
                raise BrokerUnavailable("the connection was closed; make another receiver")
            self._work.append(work)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name=f"aztask-bus-{self._queue}", daemon=True
                )
                self._thread.start()
            self._condition.notify()
        return work.future

    def _serve(self) -> None:
        while batch := self._take():
            orders = [order for work in batch for order in work.orders]
            try:
                self._carry_out(orders)
            except Exception:  # their verdict stays unknown; the thread serves others too
                logger.exception("%d orders of %s failed", len(orders), self._queue)
            finally:
                for work in batch:
                    if work.call is None:
                        work.future.set_result(None)
            for work in batch:
                if work.call is not None:
                    self._call(work)
        if self._receiver is not None:
            self._client.close(self._receiver)

    def _take(self) -> list[_Work]:
        with self._condition:
            while not self._work and not self._closed:
                self._condition.wait()
            batch = list(self._work)
            self._work.clear()
            return batch

    def _carry_out(self, orders: list[LockRequest]) -> None:
        orders.sort(key=lambda order: order.kind)
        for kind, group in groupby(orders, key=lambda order: order.kind):
            alike = list(group)
            most = MOST_TOKENS if private.available() else 1
            for first in range(0, len(alike), most):
                self._request(kind[0], alike[first : first + most])

    def _request(self, verb: str, orders: list[LockRequest]) -> None:
        """One request for all; halves of it where one of them is lost (rule 3)."""
        error = self._attempt(verb, orders)
        if error is None:
            for order in orders:
                order.verdict = Settled()
        elif not is_lost(error):
            logger.info("%d leases of %s: %s", len(orders), self._queue, error)
            for order in orders:
                order.verdict = Unknown(str(error_of(error, self._queue)))
        elif len(orders) == 1:
            orders[0].verdict = Lost("the service says that the lock is not ours any more")
        else:
            half = len(orders) // 2
            self._request(verb, orders[:half])
            self._request(verb, orders[half:])

    def _attempt(self, verb: str, orders: list[LockRequest]) -> Exception | None:
        """What went wrong, after a second attempt over a new connection where the first broke."""
        for last in self._tries:
            connected = False
            try:
                receiver = self._connected()
                connected = True
                self._send(receiver, verb, orders)
            except SDK_ERRORS as error:
                if is_lost(error) or is_refusal(error):
                    return error
                for order in orders:
                    order.unanswered |= connected
                if last:
                    return error
                self.reconnect()
            else:
                return None
        return None

    def _send(self, receiver: ServiceBusReceiver, verb: str, orders: list[LockRequest]) -> None:
        order = orders[0]
        if not private.available():
            if verb == RENEW:
                receiver.renew_message_lock(order.message, timeout=self._seconds)
            else:
                private.settle_one(receiver, verb, order.message, order.reason, order.description)
        elif verb == RENEW:
            private.renew_many(receiver, [each.token for each in orders], self._seconds)
        else:
            tokens = [each.token for each in orders]
            private.settle_many(receiver, verb, tokens, order.reason, order.description)

    def _call(self, work: _Work) -> None:
        assert work.call is not None  # only called for calls
        for last in self._tries:
            try:
                result = work.call(self._connected())
            except SDK_ERRORS as error:
                if is_lost(error) or is_refusal(error) or last:
                    work.future.set_exception(error)
                    return
                self.reconnect()
            except Exception as error:  # noqa: BLE001  # it is the caller's, and must not end this
                work.future.set_exception(error)
                return
            else:
                work.future.set_result(result)
                return

    def _connected(self) -> ServiceBusReceiver:
        if self._receiver is not None and not (self._reopen or private.is_open(self._receiver)):
            self.reconnect()
        if self._receiver is None:
            self._receiver = self._connect()
        if not private.is_open(self._receiver):
            private.open_link(self._receiver, max(SHORTEST_OPENING, self._seconds))
        return self._receiver

    def reconnect(self) -> None:
        """Give the connection up; the next request opens another."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            self._client.drop(receiver)

    def retire(self) -> None:
        """On its thread: close the connection properly; the next request opens another."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            self._client.close(receiver)
