"""Many requests at once over several connections, by one thread that waits for all of them.

Threads that wait for an answer each take the interpreter's lock from one another several times a
request [measured: 0.44 ms of CPU time for a send by eight threads, 0.23 ms here].

Rules
1. A request that was not handed to the kernel in full was not carried out: ServiceRequestError.
   From then on a failure leaves that open: ServiceResponseError. Nothing is ever sent twice.
2. Each request is composed when a connection is free for it, so that its date is its own, and
   forgotten with its answer, of which the caller keeps what it needs: a batch may be large.
3. Each has its own time for an answer. A connection whose answer did not come is closed. When as
   many in a row as there are connections got none, the rest is not sent: it would wait as long.
"""

from __future__ import annotations

import io
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from azure.core.exceptions import (
    AzureError,
    ServiceRequestError,
    ServiceRequestTimeoutError,
    ServiceResponseError,
    ServiceResponseTimeoutError,
)
from azure.core.rest import HttpRequest

from aztask.azure.connection import Connection, Response, TruncatedResponse, bytes_of, read_answer

Item = TypeVar("Item")
Kept = TypeVar("Kept")

_SENDING: Final = selectors.EVENT_READ | selectors.EVENT_WRITE


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request under way. unsent: of it. came: of its answer. give_up_at: monotonic seconds.

    blocked: whether the kernel has no room for what is unsent.
    """

    index: int
    request: HttpRequest
    unsent: memoryview
    give_up_at: float
    came: bytearray = field(default_factory=bytearray)
    blocked: bool = False


class ConnectionSource(Protocol):
    """Where an exchange has its connections from."""

    def connect(self) -> Connection:
        """A new one, for one that is used up. Raises AzureError."""

    def more(self) -> Connection | None:
        """One that another exchange needs no longer, if there is one."""

    def give_back(self, connection: Connection) -> None:
        """One that can be used again."""


class Exchange(Generic[Item, Kept]):
    """One batch of requests. `run` is called once."""

    def __init__(
        self,
        items: Sequence[Item],
        compose: Callable[[Item], HttpRequest],
        take: Callable[[Response], Kept],
        *,
        reading: float,
        lender: ConnectionSource,
    ) -> None:
        """take: what is kept of an answer. reading: seconds for one."""
        self._todo = deque(enumerate(items))
        self._compose = compose
        self._take = take
        self._reading = reading
        self._lender = lender
        self._free: deque[Connection] = deque()
        self._calls: dict[Connection, PendingRequest] = {}
        unsent = ServiceRequestError("the request was not sent")
        self._answers: list[Kept | AzureError] = [unsent] * len(items)
        self._selector = selectors.DefaultSelector()
        self._width = 0
        self._silent = 0

    def run(self, connections: Sequence[Connection]) -> list[Kept | AzureError]:
        """Exchange all over these connections. Ctrl-C closes them."""
        self._width = len(connections)
        try:
            for connection in connections:
                self._take_on(connection)
            self._feed()
            while self._calls:
                self._turn()
        finally:
            for key in self._selector.get_map().values():
                _connection_of(key).close()
            self._selector.close()
        return self._answers

    def _take_on(self, connection: Connection) -> None:
        connection.wait_for_nothing()
        self._selector.register(connection, selectors.EVENT_READ)
        self._free.append(connection)

    def _feed(self) -> None:
        """Send the next request over each free connection; give back those that have no more."""
        if self._todo and (another := self._lender.more()):
            self._take_on(another)
        while self._free:
            connection = self._free.popleft()
            if self._todo:
                self._start(connection)
            else:
                self._selector.unregister(connection)
                self._lender.give_back(connection)

    def _start(self, connection: Connection) -> None:
        index, item = self._todo.popleft()
        try:
            request = self._compose(item)
            data = memoryview(bytes_of(request))
        except AzureError as error:
            self._answers[index] = error
            self._free.append(connection)
            return
        give_up_at = time.monotonic() + self._reading
        self._calls[connection] = PendingRequest(index, request, data, give_up_at)
        self._send(connection)

    def _turn(self) -> None:
        """Wait for the next answers, or for the time of one to be over.

        What has come is looked at before the time is: a new connection may have taken long.
        """
        now = time.monotonic()
        first = min(call.give_up_at for call in self._calls.values())
        for key, mask in self._selector.select(max(0.0, first - now)):
            connection = _connection_of(key)
            if mask & selectors.EVENT_WRITE:
                self._send(connection)
            if mask & selectors.EVENT_READ and connection in self._calls:
                self._receive(connection)
            self._feed()
        for connection in [each for each, call in self._calls.items() if call.give_up_at <= now]:
            self._failed(connection, TimeoutError(f"none within {self._reading:g} s"))
        self._feed()

    def _send(self, connection: Connection) -> None:
        call = self._calls[connection]
        try:
            call.unsent = call.unsent[connection.send_some(call.unsent) :]
        except OSError as error:
            self._failed(connection, error)
            return
        blocked = bool(call.unsent)
        if blocked != call.blocked:
            call.blocked = blocked
            self._selector.modify(connection, _SENDING if blocked else selectors.EVENT_READ)

    def _receive(self, connection: Connection) -> None:
        call = self._calls[connection]
        try:
            while (data := connection.receive_some()) is not None:
                call.came += data
                if self._complete(connection, call, ended=not data):
                    return
        except (OSError, ValueError) as error:
            self._failed(connection, error)

    def _complete(self, connection: Connection, call: PendingRequest, *, ended: bool) -> bool:
        """Take the answer if it is whole. Raises OSError and ValueError as `read_answer`."""
        file = io.BytesIO(call.came)
        try:
            response = read_answer(file, call.request, ended=ended)
        except TruncatedResponse:
            if ended:
                raise
            return False
        del self._calls[connection]
        self._silent = 0
        self._answers[call.index] = self._take(response)
        connection.used(response)
        if call.unsent or ended or file.read(1) or not connection.fresh():
            self._replace(connection)
        else:
            self._free.append(connection)
        return True

    def _failed(self, connection: Connection, error: Exception) -> None:
        """There will be no answer on this connection."""
        call = self._calls.pop(connection)
        if call.unsent:
            answer: AzureError = ServiceRequestError(f"the request could not be sent: {error}")
        elif isinstance(error, TimeoutError):
            answer = ServiceResponseTimeoutError(f"no answer in time: {error}")
        else:
            answer = ServiceResponseError(f"no answer: {error}")
        answer.__cause__ = error
        self._answers[call.index] = answer
        self._silent += isinstance(error, TimeoutError)
        if self._silent >= self._width:
            self._send_no_more(ServiceRequestTimeoutError("the service does not answer"))
        self._replace(connection)

    def _replace(self, connection: Connection) -> None:
        """Go on without it. If there is no other and no new one, the rest is not sent."""
        self._selector.unregister(connection)
        connection.close()
        if not self._todo:
            return
        try:
            self._take_on(self._lender.connect())
        except AzureError as error:
            if not self._calls and not self._free:
                self._send_no_more(error)

    def _send_no_more(self, error: AzureError) -> None:
        for index, _ in self._todo:
            self._answers[index] = error
        self._todo.clear()


def _connection_of(key: selectors.SelectorKey) -> Connection:
    assert isinstance(key.fileobj, Connection)
    return key.fileobj
