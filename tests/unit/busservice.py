"""A Service Bus of one queue in this process, on a fake clock, as far as receivers see it.

Only the functions of `aztask.queues.servicebus.private` are replaced, which send the requests.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from azure.servicebus import ServiceBusReceivedMessage
from azure.servicebus._pyamqp.message import Message, Properties
from azure.servicebus.exceptions import (
    MessageLockLostError,
    ServiceBusConnectionError,
    SessionLockLostError,
)
from still import Still

from aztask.queues.servicebus import private

LEASE = 60.0


def broken() -> ServiceBusConnectionError:
    """The connection ended before the answer came."""
    return ServiceBusConnectionError(message="the connection broke")


class Time(Still):
    """A fake clock that can be slept on."""

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Answer:
    """How a request goes wrong. done: it was carried out all the same, only its answer is lost."""

    error: Exception
    done: bool = False


class Link:
    """One connection. options: what it was asked for with. owned: the tokens that came over it."""

    def __init__(self, service: BusService, options: dict[str, Any]) -> None:
        self.service = service
        self.options = options
        self.owned: set[uuid.UUID] = set()
        self.peeked: list[dict[str, Any]] = []
        self.forgotten: list[tuple[int, bytes]] = []
        self.session: Any = SimpleNamespace(
            session_id=options.get("session"),
            renew_lock=self._renew_session,
            get_state=lambda timeout: service.read_state(self, timeout),
            set_state=lambda state, timeout: service.write_state(self, state, timeout),
            _locked_until_utc=None,
        )
        self._running = False

    def peek_messages(self, **options: Any) -> list[Any]:
        self.peeked.append(options)
        self.service.answer("peek", self)
        return []

    def receive_deferred_messages(self, numbers: list[int]) -> list[Any]:
        self.service.requests.append(("deferred", tuple(numbers)))
        self.service.answer("deferred", self)
        if not set(numbers) <= set(self.service.deferred):
            raise MessageLockLostError
        return [self.service.lock(self.service.deferred[number]) for number in numbers]

    def _renew_session(self, timeout: float) -> None:
        self.service.requests.append(("renew-session", timeout))
        self.service.answer("renew-session", self)
        if self not in self.service.holders:
            raise SessionLockLostError
        self.session._locked_until_utc = self.service.lock_end()


@dataclass
class BusService:
    """arriving: what the next pulls bring. locked: tokens that are held. answers: by kind of
    request, what goes wrong, in order; None: nothing. requests: (kind, details), in order.
    """

    time: Time
    clock: Any = field(init=False)
    arriving: deque[Any] = field(default_factory=deque)
    locked: set[uuid.UUID] = field(default_factory=set)
    deferred: dict[int, Any] = field(default_factory=dict)
    answers: dict[str, list[Answer | None]] = field(default_factory=dict)
    requests: list[tuple[Any, ...]] = field(default_factory=list)
    pulls: list[tuple[Link, int, float]] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    closed: list[Link] = field(default_factory=list)
    dropped: list[Link] = field(default_factory=list)
    releases: list[uuid.UUID] = field(default_factory=list)
    holders: list[Link] = field(default_factory=list)
    state: bytes | None = None
    request_takes: float = 0.0
    on_pull: Callable[[Callable[[], bool]], None] = lambda stop: None
    numbers: int = 0

    def __post_init__(self) -> None:
        self.clock = self.time

    # -- what a test asks for ---------------------------------------------------------------

    @property
    def client(self) -> Any:
        return SimpleNamespace(receiver=self._receiver, close=self._close, drop=self._drop)

    def message(self, *, session: str | None = None, count: int = 0) -> ServiceBusReceivedMessage:
        """A new message, which a pull or a request will lock."""
        self.numbers += 1
        annotations = {b"x-opt-sequence-number": self.numbers, b"x-opt-enqueued-time": 1000}
        made = ServiceBusReceivedMessage(
            Message(
                data=[b"body"],
                message_annotations=annotations,
                properties=Properties(message_id=f"m{self.numbers}", group_id=session),
            ),
            receiver=None,
            lock_token=uuid.uuid4(),
        )
        made._delivery_id = self.numbers
        made._delivery_tag = str(self.numbers).encode()
        if count:
            made._raw_amqp_message.header.delivery_count = count
        return made

    def bring(self, count: int = 1, **options: Any) -> list[ServiceBusReceivedMessage]:
        """The next pull brings so many messages."""
        messages = [self.message(**options) for _ in range(count)]
        self.arriving.append(messages)
        return messages

    def fail(self, kind: str, *answers: Answer | Exception | None) -> None:
        """The next requests of this kind go so."""
        made = [Answer(each) if isinstance(each, Exception) else each for each in answers]
        self.answers.setdefault(kind, []).extend(made)

    def kinds(self) -> list[str]:
        return [request[0] for request in self.requests]

    # -- the service --------------------------------------------------------------------------

    def lock(self, message: Any) -> Any:
        self.locked.add(message.lock_token)
        return message

    def lock_end(self) -> datetime:
        return datetime.fromtimestamp(self.time.now + LEASE, UTC)

    def answer(self, kind: str, link: Link, done: Callable[[], None] = lambda: None) -> None:
        if kind != "connect":
            self.time.now += self.request_takes
        waiting = self.answers.get(kind)
        answer = waiting.pop(0) if waiting else None
        if answer is None or answer.done:
            done()
        if answer is not None:
            if isinstance(answer.error, ServiceBusConnectionError):
                link._running = False
            raise answer.error

    def settle_many(
        self, link: Any, verb: str, tokens: Sequence[uuid.UUID], reason: str, text: str
    ) -> None:
        self.requests.append((verb, tuple(tokens), reason, text))
        if not set(tokens) <= self.locked:
            raise MessageLockLostError
        self.answer("settle", link, lambda: self.locked.difference_update(tokens))

    def renew_many(self, link: Any, tokens: Sequence[uuid.UUID], timeout: float) -> None:
        self.requests.append(("renew", tuple(tokens), timeout))
        if not set(tokens) <= self.locked:
            raise MessageLockLostError
        self.answer("renew", link)

    def read_state(self, link: Link, timeout: float) -> bytes | None:
        self.requests.append(("get-state", timeout))
        self.answer("state", link)
        return self.state

    def write_state(self, link: Link, state: bytes | None, timeout: float) -> None:
        self.requests.append(("set-state", timeout))
        self.answer("state", link)
        self.state = state

    def open_link(self, link: Any, timeout: float) -> None:
        self.requests.append(("open", timeout))
        self.answer("open", link)
        link._running = True
        if "session" in link.options and link.options["session"] is not None:
            self.holders.append(link)
            link.session.session_id = "s1"
            link.session._locked_until_utc = self.lock_end()

    def pull(
        self, link: Any, limit: int, wait: float, stop: Callable[[], bool] = lambda: False
    ) -> list[Any]:
        self.pulls.append((link, limit, wait))
        self.on_pull(stop)
        self.answer("pull", link)
        brought = self.arriving.popleft() if self.arriving else []
        if not brought:
            self.time.now += wait
        for message in brought:
            link.owned.add(self.lock(message).lock_token)
        return list(brought)

    def release(self, link: Any, message: Any) -> bool:
        if not link._running or message.lock_token not in link.owned:
            return False
        self.releases.append(message.lock_token)
        self.locked.discard(message.lock_token)
        return True

    def _receiver(self, queue: str, **options: Any) -> Link:
        link = Link(self, {"queue": queue, **options})
        self.answer("connect", link)
        self.links.append(link)
        return link

    def _close(self, link: Link) -> None:
        self.closed.append(link)
        self._end(link)

    def _drop(self, link: Link) -> None:
        self.dropped.append(link)
        self._end(link)

    def _end(self, link: Any) -> None:
        link._running = False
        if link in self.holders:
            self.holders.remove(link)


def forget(link: Any, deliveries: Iterable[tuple[int, bytes]]) -> None:
    link.forgotten += deliveries


def finish(receiver: Any) -> None:
    """Close a receiver, and wait for its threads: they would go on in the next test."""
    receiver.close()
    for control in (receiver._settling, receiver._renewing):
        if control._thread is not None:
            control._thread.join(10.0)


def install(monkeypatch: pytest.MonkeyPatch) -> BusService:
    """The service, in the place of the SDK's requests."""
    service = BusService(Time())
    monkeypatch.setattr(private, "available", lambda: True)
    monkeypatch.setattr(private, "end", service._end)
    monkeypatch.setattr(private, "forget", forget)
    for name in ("settle_many", "renew_many", "open_link", "pull", "release"):
        monkeypatch.setattr(private, name, getattr(service, name))
    return service
