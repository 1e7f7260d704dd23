"""The HTTP transport that the storage SDK runs on: kept-alive connections and little else.

The SDK's own transport spends half of a request's CPU time on what a queue never needs: cookies,
redirects, proxy look-ups, multipart bodies [measured: 1.2 ms against 0.55 ms for a send]. This one
is handed to the SDK through its documented ``transport`` argument; signing, headers, serialization
and errors stay the SDK's.

Rules
1. A request that was not handed to the kernel in full was not carried out: ServiceRequestError.
   From then on a failure leaves that open: ServiceResponseError. Nothing is ever sent twice.
2. Any thread may call. A connection serves one request at a time, and is used again unless the
   service has closed it or would soon.
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

from aztask.brokers.storage_connection import Connection, Response, bytes_of
from aztask.brokers.storage_exchange import Answer, Exchange

Item = TypeVar("Item")

CONNECT_SECONDS: Final = 5.0
READ_SECONDS: Final = 15.0
EXCHANGING: Final = 16
"""Connections for all exchanges that are under way; each has at least one."""


class LeanTransport(HttpTransport[HttpRequest, HttpResponse]):
    """Connections to one host."""

    def __init__(self) -> None:
        self._idle: list[Connection] = []
        self._lent = 0
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None
        self._pid = os.getpid()
        self._closed = False

    def open(self) -> None:
        """Connections open when they are needed."""

    def close(self) -> None:
        """Close what is idle; what is in use is closed when it comes back. Not after a fork."""
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
        """Send the request and read its answer; rule 1 says what a failure means.

        connection_timeout, read_timeout: seconds, per request.
        """
        reading = float(kwargs.get("read_timeout", READ_SECONDS))
        data = bytes_of(request)
        connecting = kwargs.get("connection_timeout", CONNECT_SECONDS)
        connection = self._idle_one() or self._connect(request.url, connecting)
        keep = False
        try:
            _hand_over(connection, data, reading)
            response = _answer(connection, request)
            keep = True
        finally:
            if not keep:
                connection.close()
        self._give_back(connection)
        return response

    def exchange(
        self,
        url: str,
        items: Sequence[Item],
        compose: Callable[[Item], HttpRequest],
        *,
        connections: int,
        connecting: float,
        reading: float,
    ) -> list[Answer]:
        """The answer to the request that `compose` makes of each item, or what it raised.

        url: of any of the requests, which all go to one host. connections: at most so many, and
        fewer where exchanges of other threads have theirs. connecting, reading: seconds.
        """
        count = self._lend(min(connections, len(items)))
        try:
            try:
                lent = self._several(url, count, connecting)
            except AzureError as error:
                return [error] * len(items)
            return Exchange(
                items,
                compose,
                reading=reading,
                connect=lambda: self._connect(url, connecting),
                give_back=self._give_back,
            ).run(lent)
        finally:
            with self._lock:
                self._lent -= count

    def _lend(self, count: int) -> int:
        """How many connections an exchange may have: at least one."""
        with self._lock:
            count = max(1, min(count, EXCHANGING - self._lent))
            self._lent += count
            return count

    def _several(self, url: str, count: int, seconds: float) -> list[Connection]:
        """Idle connections, and new ones, made side by side; fewer if some fail, none is raised."""
        found: list[Connection] = []
        while len(found) < count and (connection := self._idle_one()):
            found.append(connection)
        if not (missing := count - len(found)):
            return found
        self._context()  # made once, not by each thread
        failed: AzureError | None = None
        with ThreadPoolExecutor(missing) as threads:
            for future in [threads.submit(self._connect, url, seconds) for _ in range(missing)]:
                try:
                    found.append(future.result())
                except AzureError as error:
                    failed = error
        if failed and not found:
            raise failed
        return found

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _idle_one(self) -> Connection | None:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None or connection.fresh():
                return connection
            connection.close()

    def _connect(self, url: str, seconds: float) -> Connection:
        scheme, _, rest = url.partition("://")
        netloc = rest.partition("/")[0].partition("?")[0]
        host, _, digits = netloc.rpartition(":") if _has_port(netloc) else (netloc, "", "")
        port = int(digits) if digits else (443 if scheme == "https" else 80)
        try:
            return Connection(
                host.strip("[]"), port, self._context() if scheme == "https" else None, seconds
            )
        except TimeoutError as error:
            raise ServiceRequestTimeoutError(f"no connection to {netloc}: {error}") from error
        except OSError as error:
            raise ServiceRequestError(f"no connection to {netloc}: {error}") from error

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            given = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE")
            self._tls = ssl.create_default_context(cafile=given or certifi.where())
        return self._tls


def _has_port(netloc: str) -> bool:
    return netloc.rpartition(":")[2].isdigit() and not netloc.endswith("]")


def _hand_over(connection: Connection, data: bytes, seconds: float) -> None:
    try:
        connection.send(data, seconds)
    except OSError as error:
        raise ServiceRequestError(f"the request could not be sent: {error}") from error


def _answer(connection: Connection, request: HttpRequest) -> Response:
    try:
        return connection.answer(request)
    except TimeoutError as error:
        raise ServiceResponseTimeoutError(f"no answer in time: {error}") from error
    except (OSError, ValueError) as error:
        raise ServiceResponseError(f"no answer: {error}") from error
