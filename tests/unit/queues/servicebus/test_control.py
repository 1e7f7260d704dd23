"""The control connection: what is repeated, what is remembered of it, and that it goes on."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from azure.servicebus.exceptions import (
    MessageLockLostError,
    ServiceBusConnectionError,
    ServiceBusServerBusyError,
)

from aztask.errors import BrokerUnavailable
from aztask.queues.delivery import Lost, Settled, Unknown
from aztask.queues.servicebus import private
from aztask.queues.servicebus.control import RENEW, Control, LockRequest

BROKEN = ServiceBusConnectionError(message="the connection broke")
BUSY = ServiceBusServerBusyError(message="too much")


class Service:
    """Answers requests for tokens. held: those that are locked. answers: what goes wrong first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: set[uuid.UUID] = set()
        self.answers: list[Exception | None] = []
        self.requests: list[int] = []
        self.connections = 0
        monkeypatch.setattr(private, "settle_many", self._settle)
        monkeypatch.setattr(private, "renew_many", self._renew)
        client: Any = SimpleNamespace(close=lambda link: None, drop=lambda link: None)
        self.control = Control(client, self._connect, "q", 1.0)

    def _connect(self) -> Any:
        self.connections += 1
        return SimpleNamespace(_running=True)

    def _settle(self, link: Any, verb: str, tokens: list[uuid.UUID], *texts: str) -> None:
        self._answer(tokens)
        self.held -= set(tokens)

    def _renew(self, link: Any, tokens: list[uuid.UUID], timeout: float) -> None:
        self._answer(tokens)

    def _answer(self, tokens: list[uuid.UUID]) -> None:
        self.requests.append(len(tokens))
        if not set(tokens) <= self.held:
            raise MessageLockLostError
        error = self.answers.pop(0) if self.answers else None
        if error is BROKEN:
            self.held -= set(tokens)  # it was done, only the answer is lost
        if error is not None:
            raise error

    def orders(self, count: int, verb: str = "complete") -> list[LockRequest]:
        tokens = [uuid.uuid4() for _ in range(count)]
        self.held |= set(tokens)
        message: Any = None
        return [LockRequest(verb, token, message) for token in tokens]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    made = Service(monkeypatch)
    yield made
    made.control.close()


@pytest.mark.parametrize("count", [1, 5])
def test_a_refusal_after_a_try_without_answer_is_remembered_as_that(service, count) -> None:
    service.answers = [BROKEN]
    orders = service.orders(count)
    service.control.carry_out(orders)
    assert [type(each.verdict) for each in orders] == [Lost] * count
    assert all(each.unanswered for each in orders)
    assert service.connections == 2


def test_a_refusal_at_the_first_try_is_a_refusal(service) -> None:
    orders = service.orders(3)
    service.held.discard(orders[1].token)
    service.control.carry_out(orders)
    assert [type(each.verdict) for each in orders] == [Settled, Lost, Settled]
    assert not any(each.unanswered for each in orders)


def test_a_busy_service_has_answered(service) -> None:
    service.answers = [BUSY]
    orders = service.orders(1)
    service.control.carry_out(orders)
    assert isinstance(orders[0].verdict, Unknown)
    assert not orders[0].unanswered


def test_a_connection_that_cannot_be_opened_has_sent_nothing(service) -> None:
    def refuse() -> Any:
        raise BROKEN

    service.control._connect = refuse
    orders = service.orders(1)
    service.control.carry_out(orders)
    assert isinstance(orders[0].verdict, Unknown)
    assert not orders[0].unanswered


def test_a_renewal_is_repeated_as_well(service) -> None:
    orders = service.orders(2, RENEW)
    service.answers = [ServiceBusConnectionError(message="nothing was done")]
    service.control.carry_out(orders)
    assert [each.verdict for each in orders] == [Settled(), Settled()]


def test_an_error_that_nobody_expects_ends_neither_thread_nor_wait(service) -> None:
    with pytest.raises(ZeroDivisionError):
        service.control.call(lambda link: 1 / 0)
    service.answers = [ZeroDivisionError("in the SDK")]
    orders = service.orders(1)
    service.control.carry_out(orders)
    assert isinstance(orders[0].verdict, Unknown)
    assert service.control.call(lambda link: "goes on") == "goes on"


# -- where the SDK has not the private calls ---------------------------------------------------


class Message:
    """A received message, as the public calls take it."""


class Public:
    """A connection whose calls are the SDK's public ones."""

    _running = True

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.lost: set[object] = set()

    def __getattr__(self, name: str) -> Any:
        def call(message: object, **options: Any) -> None:
            self.calls.append((name, message, options))
            if message in self.lost:
                raise MessageLockLostError

        return call


def test_without_the_private_calls_each_message_has_a_request_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private, "available", lambda: False)
    link: Any = Public()
    client: Any = SimpleNamespace(close=lambda link: None, drop=lambda link: None)
    control = Control(client, lambda: link, "q", 2.5)
    messages: list[Any] = [Message() for _ in range(6)]
    link.lost = {messages[1]}
    kinds = [
        (RENEW, "", ""), (RENEW, "", ""), ("complete", "", ""), ("abandon", "", ""),
        ("defer", "", ""), ("dead-letter", "why", "how"),
    ]  # fmt: skip
    orders = [
        LockRequest(kind[0], uuid.uuid4(), message, *kind[1:])
        for kind, message in zip(kinds, messages, strict=True)
    ]
    control.carry_out(list(orders))
    control.close()
    assert [type(each.verdict) for each in orders] == [Settled, Lost] + [Settled] * 4
    assert {(name, message): options for name, message, options in link.calls} == {
        ("renew_message_lock", messages[0]): {"timeout": 2.5},
        ("renew_message_lock", messages[1]): {"timeout": 2.5},
        ("complete_message", messages[2]): {},
        ("abandon_message", messages[3]): {},
        ("defer_message", messages[4]): {},
        ("dead_letter_message", messages[5]): {"reason": "why", "error_description": "how"},
    }


# -- what a request is -------------------------------------------------------------------------


def test_a_request_without_a_reason_has_none(service) -> None:
    message: Any = None
    assert LockRequest("complete", uuid.uuid4(), message).kind == ("complete", "", "")
    assert LockRequest("dead-letter", uuid.uuid4(), message, "why", "how").kind == (
        "dead-letter",
        "why",
        "how",
    )


def test_a_connection_that_holds_a_session_is_not_opened_again() -> None:
    """The session went with it: the next request asks for a connection of its own."""
    links: list[Any] = []
    dropped: list[Any] = []

    def connect() -> Any:
        links.append(SimpleNamespace(_running=True))
        return links[-1]

    client: Any = SimpleNamespace(close=lambda link: None, drop=dropped.append)
    control = Control(client, connect, "q", 1.0, repeat=False)
    assert control.call(lambda link: link) is links[0]
    assert control.call(lambda link: link) is links[0]
    links[0]._running = False
    assert control.call(lambda link: link) is links[1]
    assert dropped == [links[0]]
    control.close()


def test_without_repetition_the_first_answer_counts() -> None:
    tries: list[Any] = []

    def fail(link: Any) -> None:
        tries.append(link)
        raise BROKEN

    client: Any = SimpleNamespace(close=lambda link: None, drop=lambda link: None)
    control = Control(client, lambda: SimpleNamespace(_running=True), "q", 1.0, repeat=False)
    with pytest.raises(ServiceBusConnectionError):
        control.call(fail)
    assert len(tries) == 1
    control.close()


def test_after_its_end_a_connection_takes_no_more_work(service) -> None:
    service.control.warm()
    thread = service.control._thread
    assert thread.daemon, "a connection that hangs must not keep the process from ending"
    service.control.close()
    thread.join(10.0)
    assert not thread.is_alive()
    with pytest.raises(BrokerUnavailable, match="closed"):
        service.control.carry_out(service.orders(1))
    service.control.warm()  # without effect


def test_an_outage_is_warned_of_once_and_its_end_is_logged(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aztask")
    for _ in range(3):
        service.answers = [BUSY, BUSY]
        service.control.carry_out(service.orders(1, RENEW))
    service.answers = []
    for _ in range(2):
        service.control.carry_out(service.orders(2, RENEW))
    begins, ends = caplog.records
    assert (begins.levelname, ends.levelname) == ("WARNING", "INFO")
    assert begins.getMessage().startswith("queue q: cannot renew or settle 1 lease, retry follows")
    assert ends.getMessage() == "queue q: renewing and settling works again"
