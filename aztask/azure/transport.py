"""The HTTP transport for the storage SDK: kept-alive connections and little else.

Why not the SDK's own transport: it spends half of a request's CPU time on features that queues
never need: cookies, redirects, proxy look-ups, multipart bodies [measured: 1.2 ms against 0.55 ms
for a send]. The SDK gets this one through its documented ``transport`` argument. Signing, headers,
serialization and errors are still the SDK's.

Rules
1. If a request was not handed to the kernel in full, it had no effect: ServiceRequestError. After
   that a failure leaves the effect open: ServiceResponseError. Nothing is ever sent twice.
2. Any thread may call. A connection serves one request at a time. It is used again, unless the
   service has closed it or will close it soon.
3. What refuses requests as too many gets fewer (`aztask.azure.pace`).
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, TypeVar

import certifi
from azure.core.exceptions import (
    AzureError,
    ServiceRequestError,
    ServiceRequestTimeoutError,
    ServiceResponseError,
    ServiceResponseTimeoutError,
)
from azure.core.pipeline.transport import HttpTransport
from azure.core.rest import HttpRequest, HttpResponse

from aztask.azure.connection import Connection, Response, WireRequest
from aztask.azure.exchange import Exchange
from aztask.azure.pace import Paces

Item = TypeVar("Item")
Kept = TypeVar("Kept")

CONNECT_SECONDS: Final = 5.0
READ_SECONDS: Final = 15.0
EXCHANGING: Final = 24
"""The most connections of all running exchanges together; each exchange gets at least one."""


class LeanTransport(HttpTransport[HttpRequest, HttpResponse]):
    """Kept-alive connections to one host. Any thread may call."""

    def __init__(self, *, leased: str = "") -> None:
        """leased: a part of the addresses of changes on which a lease depends; see `Paces`."""
        self.paces = Paces(leased=leased)
        self._idle: list[Connection] = []
        self._lent = 0
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None
        self._pid = os.getpid()
        self._closed = False

    def open(self) -> None:
        """Do nothing: connections are opened when they are needed."""

    def close(self) -> None:
        """Close idle connections; those in use are closed when they come back.

        In a forked child no socket is closed.
        """
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        if self._pid == os.getpid():
            for connection in idle:
                connection.close()

    def __enter__(self) -> LeanTransport:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self.close()

    def send(self, request: HttpRequest, **kwargs: Any) -> HttpResponse:
        """Send the request and read its answer; for the meaning of failures see rule 1.

        connection_timeout, read_timeout: keyword arguments of the SDK, seconds.
        """
        return self.ask(
            WireRequest.of(request),
            connecting=kwargs.get("connection_timeout", CONNECT_SECONDS),
            reading=float(kwargs.get("read_timeout", READ_SECONDS)),
            sdk=request,
        )

    def ask(
        self,
        request: WireRequest,
        *,
        connecting: float,
        reading: float,
        sdk: HttpRequest | None = None,
    ) -> Response:
        """Send one request and read its answer. Raises AzureError, see rule 1.

        connecting, reading: time-outs in seconds.
        sdk: what the answer shows as its request; None for a plain one.
        """
        self.paces.wait(request.method, request.url)
        connection = self.idle_one() or self.connect(request.url, connecting)
        keep = False
        try:
            _hand_over(connection, request.data, reading)
            response = _answer(connection, sdk or request)
            keep = True
        finally:
            if not keep:
                connection.close()
        self.give_back(connection)
        self.paces.answered(request.url, response.status_code, response.retry_after)
        return response

    def exchange(
        self,
        url: str,
        items: Sequence[Item],
        compose: Callable[[Item], WireRequest],
        take: Callable[[Response], Kept],
        *,
        connections: int,
        connecting: float,
        reading: float,
    ) -> list[Kept | AzureError]:
        """Send one request per item in parallel; returns one kept value or error per item.

        url: the URL of any request; all go to the same host.
        compose: makes the request for an item.
        take: returns what to keep of an answer.
        connections: the most connections at the start. There are fewer while other threads'
        exchanges use theirs; when those end, this exchange gets more.
        connecting, reading: time-outs in seconds.
        """
        loan = BorrowedConnections(self, url, connecting)
        try:
            try:
                lent = loan.begin(min(connections, len(items)))
            except AzureError as error:
                return [error] * len(items)
            exchange = Exchange(
                items, compose, take, reading=reading, lender=loan, paces=self.paces
            )
            return exchange.run(lent)
        finally:
            loan.end()

    def lend(self, count: int) -> int:
        """Reserve up to `count` connections for an exchange; returns how many it gets."""
        with self._lock:
            count = max(0, min(count, EXCHANGING - self._lent))
            self._lent += count
            return count

    def lent(self, count: int) -> None:
        """Change the number of reserved connections by `count`, without a limit."""
        with self._lock:
            self._lent += count

    def give_back(self, connection: Connection) -> None:
        """Keep the connection for another request."""
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def idle_one(self) -> Connection | None:
        """An idle connection that can be used again, or None."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None or connection.fresh():
                return connection
            connection.close()

    def connect(self, url: str, seconds: float) -> Connection:
        """Open a connection to the URL's host. Raises AzureError."""
        scheme, _, rest = url.partition("://")
        netloc = rest.partition("/")[0].partition("?")[0]
        host, _, digits = netloc.rpartition(":") if _has_port(netloc) else (netloc, "", "")
        port = int(digits) if digits else (443 if scheme == "https" else 80)
        try:
            return Connection(
                host.strip("[]"), port, self.context() if scheme == "https" else None, seconds
            )
        except TimeoutError as error:
            raise ServiceRequestTimeoutError(f"no connection to {netloc}: {error}") from error
        except OSError as error:
            raise ServiceRequestError(f"no connection to {netloc}: {error}") from error

    def context(self) -> ssl.SSLContext:
        """The TLS context. It is made once, because loading certificates is slow."""
        if self._tls is None:
            given = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE")
            self._tls = ssl.create_default_context(cafile=given or certifi.where())
        return self._tls


class BorrowedConnections:
    """The connections of a transport that one exchange has borrowed."""

    def __init__(self, transport: LeanTransport, url: str, connecting: float) -> None:
        self._transport = transport
        self._url = url
        self._connecting = connecting
        self._count = 0

    def begin(self, count: int) -> list[Connection]:
        """Get at least one connection: idle ones first, then new ones, opened in parallel.

        Half of `count` is enough, because opening a connection takes longer than several requests.
        Raises AzureError if there is no connection at all.
        """
        self._count = self._transport.lend(count)
        if not self._count:
            self._count = 1
            self._transport.lent(1)
        found: list[Connection] = []
        while len(found) < self._count and (connection := self._transport.idle_one()):
            found.append(connection)
        missing = self._count - len(found)
        if missing > len(found):
            found += self._open(missing, required=not found)
        self._transport.lent(len(found) - self._count)
        self._count = len(found)
        return found

    def _open(self, count: int, *, required: bool) -> list[Connection]:
        """Open connections in parallel; returns those that succeeded.

        required: raise AzureError if none succeeded.
        """
        if self._url.startswith("https:"):
            self._transport.context()  # make it here once, not in each thread
        found: list[Connection] = []
        failed: AzureError | None = None
        with ThreadPoolExecutor(count) as threads:
            for future in [threads.submit(self.connect) for _ in range(count)]:
                try:
                    found.append(future.result())
                except AzureError as error:
                    failed = error
        if failed and not found and required:
            raise failed
        return found

    def connect(self) -> Connection:
        """Open a new connection in place of a closed one. Raises AzureError."""
        return self._transport.connect(self._url, self._connecting)

    def more(self) -> Connection | None:
        """An idle connection that no other exchange needs, or None."""
        if not self._transport.lend(1):
            return None
        connection = self._transport.idle_one()
        if connection is None:
            self._transport.lent(-1)
        else:
            self._count += 1
        return connection

    def give_back(self, connection: Connection) -> None:
        """Return a connection that can be used again."""
        self._count -= 1
        self._transport.lent(-1)
        self._transport.give_back(connection)

    def end(self) -> None:
        """Cancel the reservation of all connections that were not given back."""
        self._transport.lent(-self._count)


def _has_port(netloc: str) -> bool:
    return netloc.rpartition(":")[2].isdigit() and not netloc.endswith("]")


def _hand_over(connection: Connection, data: bytes, seconds: float) -> None:
    try:
        connection.send(data, seconds)
    except OSError as error:
        raise ServiceRequestError(f"the request could not be sent: {error}") from error


def _answer(connection: Connection, request: HttpRequest | WireRequest) -> Response:
    try:
        return connection.answer(request)
    except TimeoutError as error:
        raise ServiceResponseTimeoutError(f"no answer in time: {error}") from error
    except OSError as error:
        raise ServiceResponseError(f"no answer: {error}") from error
