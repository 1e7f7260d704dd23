"""A made-up queue service: what it does and what it answers are told apart, request by request.

Time stands still until a test moves it, or until the code under test waits or sleeps. Requests on
other threads are carried out when the test says so, in the order that it wants.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from azure.core.exceptions import (
    AzureError,
    HttpResponseError,
    ServiceRequestError,
    ServiceResponseError,
)
from still import Still

from aztask.message.envelope import Envelope
from aztask.queues.storagequeue import delivery as storage_delivery
from aztask.queues.storagequeue import settling as storage_renewal
from aztask.queues.storagequeue.delivery import QueueRequests, StorageDelivery
from aztask.queues.storagequeue.messages import ReceivedMessage
from aztask.queues.storagequeue.settling import Renewals, StorageSettler
from aztask.support.clock import Clock

OK = "ok"
LOST = "the answer is lost"
MISSED = "the request is lost"
UNSENT = "it could not be sent"
BUSY = "the service is busy"
DENIED = "the credential is refused"
FAILED = "the service fails before it does anything (HTTP 500)"
FAILED_LATE = "the service fails after it took effect (HTTP 500)"

FAULTS = (OK, LOST, MISSED, UNSENT, BUSY)
BROKEN = (LOST, MISSED)
"""The caller cannot tell these two apart."""


def refused(status, code):
    headers = {"x-ms-error-code": code}
    response = SimpleNamespace(status_code=status, reason="Because", headers=headers)
    return HttpResponseError(code, response=response)


def mismatch():
    return refused(400, "PopReceiptMismatch")


def missing():
    return refused(404, "MessageNotFound")


@dataclass
class Stored:
    """A message as the service holds it."""

    text: str
    token: str = "token-0"
    visible_at: float = 0.0
    count: int = 0
    put_at: float = 0.0


@dataclass
class Service:
    """The messages of one queue. faults: of the next requests, in order; then all is well.

    done: every request that took effect. asked: every request.
    """

    time: Still
    messages: dict[str, Stored] = field(default_factory=dict)
    faults: deque = field(default_factory=deque)
    asked: list = field(default_factory=list)
    done: list = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    puts: int = 0
    takes: float = 0.0

    def put(self, text, delay, *, seconds):
        def effect():
            self.puts += 1
            self.messages[f"p-{self.puts}"] = Stored(
                text, self._token(), self.time.now + delay, 0, self.time.now
            )

        self._do(("put", text, delay), effect, seconds)

    def receive(self, limit, hidden, *, seconds):
        def effect():
            received = []
            for name, stored in self.messages.items():
                if stored.visible_at <= self.time.now and len(received) < limit:
                    stored.token, stored.count = self._token(), stored.count + 1
                    stored.visible_at = self.time.now + hidden
                    received.append(
                        ReceivedMessage(
                            name, stored.token, stored.count, stored.put_at, stored.text
                        )
                    )
            return received

        return self._do(("receive", limit, hidden), effect, seconds), self.headers

    def update(self, message, receipt, delay, text, *, seconds):
        def effect():
            stored = self._held(message, receipt)
            stored.token, stored.visible_at = self._token(), self.time.now + delay
            stored.text = stored.text if text is None else text
            return stored.token

        return self._do(("update", message, receipt, delay), effect, seconds)

    def delete(self, message, receipt, *, seconds):
        def effect():
            self._held(message, receipt)
            del self.messages[message]

        self._do(("delete", message, receipt), effect, seconds)

    def delete_all(self, leases, *, connections, seconds):
        answers = []
        self.batch = (connections, seconds)
        for message, receipt, late in leases:
            try:
                if late():
                    raise ServiceRequestError("too late")
                self.delete(message, receipt, seconds=seconds)
                answers.append(None)
            except AzureError as error:
                answers.append(error)
        return answers

    def put_all(self, texts, *, connections, seconds):
        return None

    def take(self, message):
        """Another worker receives it, if it may."""
        stored = self.messages[message]
        if self.time.now >= stored.visible_at:
            stored.token, stored.visible_at = self._token(), self.time.now + 1000.0

    def _do(self, what, effect, seconds):
        self.asked.append((*what, seconds))
        self.time.now += self.takes
        fault = self.faults.popleft() if self.faults else OK
        if isinstance(fault, Exception):
            raise fault
        if fault == UNSENT:
            raise ServiceRequestError("unsent")
        if fault == BUSY:
            raise refused(503, "ServerBusy")
        if fault == DENIED:
            raise refused(403, "AuthenticationFailed")
        answer = None
        if fault not in (MISSED, FAILED):
            try:
                answer = effect()
                self.done.append(what)
            except HttpResponseError:
                if fault == OK:
                    raise
        if fault in (FAILED, FAILED_LATE):
            raise refused(500, "InternalError")
        if fault in BROKEN:
            raise ServiceResponseError("broken")
        return answer

    def _held(self, message, receipt):
        if message not in self.messages:
            raise missing()
        if self.messages[message].token != receipt:
            raise mismatch()
        return self.messages[message]

    def _token(self):
        self.tokens += 1
        return f"token-{self.tokens}"


class ThreadPool:
    """Keeps what was submitted until the test carries it out, and its answer until it is due."""

    def __init__(self):
        self.calls: list = []
        self.futures: list[Future] = []
        self.outcomes: dict[int, tuple] = {}

    def submit(self, call):
        self.calls.append(call)
        self.futures.append(Future())
        return self.futures[-1]

    def map(self, call, items):
        return [call(item) for item in items]

    def carry_out(self, n):
        """The service gets request `n` (from 0)."""
        try:
            self.outcomes[n] = (self.calls[n](), None)
        except storage_delivery.FailedRequest as error:
            self.outcomes[n] = (None, error)

    def deliver(self, n):
        """The caller gets the answer to request `n`."""
        if n not in self.outcomes:
            self.carry_out(n)
        value, error = self.outcomes[n]
        if error is not None:
            self.futures[n].set_exception(error)
        else:
            self.futures[n].set_result(value)


class Bench:
    """A queue, its dead letters, and what renews and settles their deliveries."""

    def __init__(self, monkeypatch, *, dead_letter=False, offset=0.0):
        self.time = Still(1000.0)
        self.clock = Clock(self.time.monotonic, self.time.wall, self._sleep)
        self.service, self.poison = Service(self.time), Service(self.time)
        self.thread_pool = ThreadPool()
        self.requests = QueueRequests("q", self.service, self.clock)
        self.renewals = Renewals(self.requests, self.thread_pool)
        self.client = SimpleNamespace(offset=offset)
        self.living = Service(self.time)
        self.settling = StorageSettler(
            self.client,
            self.requests,
            poison=QueueRequests("q-poison", self.poison, self.clock),
            living=QueueRequests("q", self.living, self.clock) if dead_letter else None,
            renewals=self.renewals,
        )
        self.waited: list[float] = []
        self.slept: list[float] = []
        monkeypatch.setattr(storage_renewal, "wait", self._wait)

    def delivery(self, name="m-0", *, lease=10.0, text="text"):
        """A delivery that was received now."""
        self.service.messages[name] = Stored(text, "token-0", self.time.now + lease)
        return StorageDelivery(
            "q",
            Envelope(b"body"),
            name,
            "token-0",
            1,
            0.0,
            self.time.now + lease,
            lease,
            text=text,
        )

    def failure(self, fault):
        """What a request with this fault raises."""
        service = Service(self.time, faults=deque([fault]))
        try:
            QueueRequests("q", service, self.clock).put("", 0.0, 1.0)
        except storage_delivery.FailedRequest as failed:
            return failed
        raise AssertionError(f"{fault} is no failure")

    def _wait(self, futures, timeout, return_when):
        self.waited.append(timeout)
        if not any(each.done() for each in futures):
            self.time.now += timeout

    def _sleep(self, seconds):
        self.slept.append(seconds)
        self.time.now += seconds


@pytest.fixture
def make(monkeypatch):
    return lambda **options: Bench(monkeypatch, **options)


@pytest.fixture
def bench(make):
    return make()
