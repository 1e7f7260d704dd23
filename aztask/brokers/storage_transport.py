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
3. What the service says is bounded: header lines, body, and the time for each read.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, MutableMapping
from types import TracebackType
from typing import Any, BinaryIO, Final

import certifi
from azure.core.exceptions import (
    HttpResponseError,
    ServiceRequestError,
    ServiceRequestTimeoutError,
    ServiceResponseError,
    ServiceResponseTimeoutError,
)
from azure.core.pipeline.transport import HttpTransport
from azure.core.rest import HttpRequest, HttpResponse
from azure.core.utils import case_insensitive_dict

CONNECT_SECONDS: Final = 5.0
READ_SECONDS: Final = 15.0
IDLE_SECONDS: Final = 60.0
"""A connection that was idle for longer is not used again: balancers forget them silently."""

_LINE: Final = 65536
_LINES: Final = 200
_BODY: Final = 16 * 1024 * 1024


class Response(HttpResponse):
    """An answer, read in full."""

    def __init__(
        self,
        request: HttpRequest,
        status: int,
        reason: str,
        headers: MutableMapping[str, str],
        body: bytes,
    ) -> None:
        self._request = request
        self._status = status
        self._reason = reason
        self._headers = headers
        self._body = body
        self._encoding: str | None = "utf-8"
        self.context: dict[str, Any] = {}

    @property
    def request(self) -> HttpRequest:
        """What it answers."""
        return self._request

    @property
    def status_code(self) -> int:
        """The HTTP status."""
        return self._status

    @property
    def headers(self) -> MutableMapping[str, str]:
        """Without regard to case."""
        return self._headers

    @property
    def reason(self) -> str:
        """The phrase beside the status."""
        return self._reason

    @property
    def content_type(self) -> str | None:
        """The header of that name."""
        return self._headers.get("content-type")

    @property
    def is_closed(self) -> bool:
        """Always: it is read in full."""
        return True

    @property
    def is_stream_consumed(self) -> bool:
        """Always."""
        return True

    @property
    def encoding(self) -> str | None:
        """What `text` decodes with."""
        return self._encoding

    @encoding.setter
    def encoding(self, value: str | None) -> None:
        self._encoding = value

    @property
    def url(self) -> str:
        """The request's."""
        return self._request.url

    @property
    def content(self) -> bytes:
        """The body."""
        return self._body

    def text(self, encoding: str | None = None) -> str:
        """The body, decoded; a byte order mark is dropped."""
        text = self._body.decode(encoding or self._encoding or "utf-8", "replace")
        return text.removeprefix("\ufeff")

    def json(self) -> Any:
        """The queue service speaks XML."""
        raise ValueError("the answer is XML, not JSON")

    def raise_for_status(self) -> None:
        """Raise HttpResponseError for a status of 400 or more."""
        if self._status >= 400:
            raise HttpResponseError(response=self)

    def read(self) -> bytes:
        """The body."""
        return self._body

    def iter_bytes(self, **kwargs: Any) -> Iterator[bytes]:
        """The body, in one piece."""
        yield self._body

    def iter_raw(self, **kwargs: Any) -> Iterator[bytes]:
        """The body, in one piece."""
        yield self._body

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> Response:
        return self

    def __exit__(self, *args: object) -> None:
        return None

    def __repr__(self) -> str:
        return f"<Response: {self._status} {self._reason}>"


class Connection:
    """One connection, and the answers that come over it."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, seconds: float) -> None:
        plain = socket.create_connection((host, port), timeout=seconds)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = tls.wrap_socket(plain, server_hostname=host) if tls else plain
        except BaseException:
            plain.close()
            raise
        self._file: BinaryIO = self._socket.makefile("rb")
        self.usable_until = 0.0

    def fresh(self) -> bool:
        """Whether it may be used again: in time, and nothing came unasked (such as its end)."""
        if time.monotonic() >= self.usable_until:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def send(self, data: bytes, seconds: float) -> None:
        self._socket.settimeout(seconds)
        self._socket.sendall(data)

    def answer(self, request: HttpRequest) -> Response:
        """Read one answer. Raises OSError, or ValueError on what is not HTTP."""
        version, _, rest = self._line().partition(" ")
        status, _, reason = rest.partition(" ")
        if not version.startswith("HTTP/1.") or not status.isdigit():
            raise ValueError("the answer is not HTTP")
        headers: dict[str, str] = {}
        while line := self._line():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
            if len(headers) > _LINES:
                raise ValueError("the answer has too many headers")
        body = b"" if request.method == "HEAD" or status in ("204", "304") else self._body(headers)
        self._set_use(headers, version)
        return Response(request, int(status), reason, case_insensitive_dict(headers), body)

    def _line(self) -> str:
        line = self._file.readline(_LINE)
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the connection ended within an answer")
        return line.rstrip(b"\r\n").decode("latin-1")

    def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return self._chunks()
        if "content-length" in headers:
            return self._exactly(int(headers["content-length"]))
        headers["connection"] = "close"
        return self._file.read(_BODY)

    def _chunks(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while count := int(self._line().partition(";")[0], 16):
            size += count
            parts.append(self._exactly(count if size <= _BODY else -1))
            self._line()
        while self._line():  # trailers
            pass
        return b"".join(parts)

    def _exactly(self, count: int) -> bytes:
        if not 0 <= count <= _BODY:
            raise ValueError("the answer is too long")
        data = self._file.read(count)
        if len(data) < count:
            raise ConnectionResetError("the connection ended within an answer")
        return data

    def _set_use(self, headers: dict[str, str], version: str) -> None:
        seconds = IDLE_SECONDS
        if headers.get("connection", "").lower() == "close" or version == "HTTP/1.0":
            seconds = 0.0
        for part in headers.get("keep-alive", "").split(","):
            name, _, value = part.partition("=")
            if name.strip() == "timeout" and value.strip().isdigit():
                seconds = min(seconds, int(value) - 1.0)
        self.usable_until = time.monotonic() + seconds

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class LeanTransport(HttpTransport[HttpRequest, HttpResponse]):
    """Connections to one host."""

    def __init__(self) -> None:
        self._idle: list[Connection] = []
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
        connection = self._connection(request, kwargs.get("connection_timeout", CONNECT_SECONDS))
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

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _connection(self, request: HttpRequest, seconds: float) -> Connection:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect(request, seconds)
            if connection.fresh():
                return connection
            connection.close()

    def _connect(self, request: HttpRequest, seconds: float) -> Connection:
        scheme, _, rest = request.url.partition("://")
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


def bytes_of(request: HttpRequest) -> bytes:
    """The request as it travels."""
    content = request.content
    body = content.encode() if isinstance(content, str) else bytes(content or b"")
    netloc, slash, path = request.url.partition("://")[2].partition("/")
    lines = [f"{request.method} {slash or '/'}{path} HTTP/1.1", f"Host: {netloc}"]
    for name, value in request.headers.items():
        if "\r" in value or "\n" in value:
            raise ServiceRequestError(f"the header {name} has a line break in it")
        if name.lower() != "content-length":
            lines.append(f"{name}: {value}")
    lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


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
