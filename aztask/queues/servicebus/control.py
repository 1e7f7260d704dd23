"""The control connection: renewals, settlements and peeks, many of them in one request.

Rules
1. One thread owns one SDK receiver: it is fast but not thread-safe, and a second thread on it
   stalls for up to a second ([seen] azure-servicebus 7.15). Other threads post work and wait.
2. Work that was posted during a request goes out together in the next request.
3. A request with one bad lock token fails as a whole: it is halved until the bad token is alone.
4. After a broken connection, a new one is opened and the request is repeated, once: renewing or
   settling a lock token twice does no harm. If that fails too, the answer is `Unknown`.
5. A `LockRequest` notes that a request got no answer. If the service refuses the repetition, the
   caller decides what that means: the first request may have taken effect.
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

from aztask.errors import BrokerUnavailable
from aztask.queues.delivery import Lost, Settled, Unknown
from aztask.queues.servicebus import private
from aztask.queues.servicebus.client import BusClient, Connect
from aztask.queues.servicebus.errors import SDK_ERRORS, error_of, is_lost, is_refusal
from aztask.support.display import plural
from aztask.support.parts import Part

logger = logging.getLogger(__name__)

MAX_TOKENS: Final = 200
"""The most lock tokens in one request: about 4 KiB."""

SHORTEST_OPENING: Final = 2.0
"""Seconds: the SDK needs half a second to open a connection, more on a busy machine."""

LONGEST_BATCH: Final = 60.0
"""Seconds for what has been posted by then: a few requests, each with its time-out."""

RENEW: Final = "renew"

Verdict: TypeAlias = Settled | Lost | Unknown


@dataclass(slots=True, eq=False)
class LockRequest:
    """An operation on one lock.

    verb: `RENEW` or a key of `private.STATUSES`.
    verdict: the service's answer, set by `Control.carry_out`.
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
        """Operations of the same kind can share a request."""
        return self.verb, self.reason, self.description


@dataclass(slots=True, eq=False)
class _Work:
    """The lock requests of one caller, or a call. future: tells the caller that they are done."""

    future: Future[Any]
    requests: Sequence[LockRequest] = ()
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
        """repeat: rule 4; False for a session, because a new connection would not hold it."""
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
        self.part = Part(f"lease connection {queue}", longest=LONGEST_BATCH)
        self._closed = self._failing = False

    def carry_out(self, requests: Sequence[LockRequest]) -> None:
        """Carry out all requests; then each of them has its verdict."""
        self._post(_Work(Future(), requests)).result()

    def call(self, function: Callable[[ServiceBusReceiver], Any]) -> Any:
        """Call `function` with the receiver, on the receiver's thread. Raises the SDK's errors."""
        return self._post(_Work(Future(), call=function)).result()

    def warm(self) -> None:
        """Connect now, in the background, so that the first renewal does not have to wait."""
        with suppress(BrokerUnavailable):  # it was closed in between
            self._post(_Work(Future(), call=lambda _: None))

    def close(self) -> None:
        """Finish the posted work, then close the connection."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self.part.stop()

    def _post(self, work: _Work) -> Future[Any]:
        with self._condition:
            if self._closed:
                raise BrokerUnavailable("the connection was closed; make another receiver")
            self._work.append(work)
            if self._thread is None:
                self._thread = self.part.thread(self._serve, f"aztask-bus-{self._queue}")
                self._thread.start()
            self._condition.notify()
        return work.future

    def _serve(self) -> None:
        if not self._failing:
            self.part.rest()  # it waits for work again, after whatever failed
        while batch := self._take():
            self.part.begin()
            try:
                self._do(batch)
            finally:  # no caller may wait without end
                for work in batch:
                    if not work.future.done():
                        work.future.set_exception(BrokerUnavailable("the request failed"))
            if not self._failing:
                self.part.rest()
            self.part.idle()
        if self._receiver is not None:
            self._client.close(self._receiver)

    def _do(self, batch: list[_Work]) -> None:
        requests = [request for work in batch for request in work.requests]
        try:
            self._carry_out(requests)
        except Exception as error:  # noqa: BLE001  # the thread goes on serving others
            what = plural(len(requests), "lease operation")
            self.part.failed(error, f"whether {what} took effect is unknown")
        finally:
            for work in batch:
                if work.call is None:
                    work.future.set_result(None)
        for work in batch:
            if work.call is not None:
                self._call(work)

    def _take(self) -> list[_Work]:
        with self._condition:
            while not self._work and not self._closed:
                self._condition.wait()
            batch = list(self._work)
            self._work.clear()
            return batch

    def _carry_out(self, requests: list[LockRequest]) -> None:
        requests.sort(key=lambda request: request.kind)
        for kind, group in groupby(requests, key=lambda request: request.kind):
            alike = list(group)
            size = MAX_TOKENS if private.available() else 1
            for first in range(0, len(alike), size):
                self._request(kind[0], alike[first : first + size])

    def _request(self, verb: str, requests: list[LockRequest]) -> None:
        """Send one request for all; split it if one of the locks is lost (rule 3)."""
        error = self._attempt(verb, requests)
        if error is None or is_lost(error):
            self._answered()
        if error is None:
            for request in requests:
                request.verdict = Settled()
        elif not is_lost(error):
            self._unanswered(len(requests), error)
            for request in requests:
                request.verdict = Unknown(str(error_of(error, self._queue)))
        elif len(requests) == 1:
            requests[0].verdict = Lost("the service says that we no longer hold the lock")
        else:
            half = len(requests) // 2
            self._request(verb, requests[:half])
            self._request(verb, requests[half:])

    def _unanswered(self, count: int, error: Exception) -> None:
        """Log requests without an answer: one warning when that begins, then only details."""
        logger.log(
            logging.DEBUG if self._failing else logging.WARNING,
            "queue %s: cannot renew or settle %s, retry follows: %s",
            self._queue,
            plural(count, "lease"),
            error,
        )
        self._failing = True
        self.part.trouble(error)

    def _answered(self) -> None:
        if self._failing:
            self._failing = False
            logger.info("queue %s: renewing and settling works again", self._queue)

    def _attempt(self, verb: str, requests: list[LockRequest]) -> Exception | None:
        """Send the request, and again over a new connection if that broke; returns the error."""
        for last in self._tries:
            connected = False
            try:
                receiver = self._connected()
                connected = True
                self._send(receiver, verb, requests)
            except SDK_ERRORS as error:
                if is_lost(error) or is_refusal(error):
                    return error
                for request in requests:
                    request.unanswered |= connected
                if last:
                    return error
                self.reconnect()
            else:
                return None
        return None

    def _send(self, receiver: ServiceBusReceiver, verb: str, requests: list[LockRequest]) -> None:
        request = requests[0]
        if not private.available():
            if verb == RENEW:
                receiver.renew_message_lock(request.message, timeout=self._seconds)
            else:
                private.settle_one(
                    receiver, verb, request.message, request.reason, request.description
                )
        elif verb == RENEW:
            private.renew_many(receiver, [each.token for each in requests], self._seconds)
        else:
            tokens = [each.token for each in requests]
            private.settle_many(receiver, verb, tokens, request.reason, request.description)

    def _call(self, work: _Work) -> None:
        assert work.call is not None  # noqa: S101  # only called for calls
        for last in self._tries:
            try:
                result = work.call(self._connected())
            except SDK_ERRORS as error:
                if is_lost(error) or is_refusal(error) or last:
                    work.future.set_exception(error)
                    return
                self.reconnect()
            except Exception as error:  # noqa: BLE001  # the caller's error must not end this thread
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
        """Drop the connection; the next request opens a new one."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            self._client.drop(receiver)

    def retire(self) -> None:
        """Close the connection properly; the next request opens a new one. Call on its thread."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            self._client.close(receiver)
