"""A kept-alive connection to the queue service, and the answers that come over it.

Rule: what the service says is bounded: header lines, body, and the time for each read.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Iterator, MutableMapping
from typing import Any, BinaryIO, Final

from azure.core.exceptions import HttpResponseError, ServiceRequestError
from azure.core.rest import HttpRequest, HttpResponse
from azure.core.utils import case_insensitive_dict

IDLE_SECONDS: Final = 60.0
"""A connection that was idle for longer is not used again: balancers forget them silently."""

_LINE: Final = 65536
_LINES: Final = 200
_BODY: Final = 16 * 1024 * 1024
_PIECE: Final = 65536


class TruncatedResponse(ConnectionResetError):
    """What has come of an answer ends within it."""


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
        self.keep_alive = 0.0
        """Seconds that its connection may be used again."""

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
    """One connection. Either it waits, for `send` and `answer`, or it does not, for `send_some` and
    `receive_some`.
    """

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

    def fileno(self) -> int:
        """The socket's, to be waited for."""
        return self._socket.fileno()

    def fresh(self) -> bool:
        """Whether it may be used again: in time, and nothing came unasked (such as its end)."""
        if time.monotonic() >= self.usable_until:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def send(self, data: bytes, seconds: float) -> None:
        """Hand all of it to the kernel. Raises OSError."""
        self._socket.settimeout(seconds)
        self._socket.sendall(data)

    def answer(self, request: HttpRequest) -> Response:
        """Read one answer. Raises OSError, or ValueError on what is not HTTP."""
        response = read_answer(self._file, request, ended=True)
        self.used(response)
        return response

    def wait_for_nothing(self) -> None:
        """From now on, until the next `send`."""
        self._socket.settimeout(0.0)

    def send_some(self, data: memoryview) -> int:
        """How many bytes the kernel took. Raises OSError."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0

    def receive_some(self) -> bytes | None:
        """What has come: None where nothing has, b"" at the connection's end. Raises OSError."""
        try:
            return self._socket.recv(_PIECE)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None

    def used(self, response: Response) -> None:
        """After an answer: it says how long the connection may be used again."""
        self.usable_until = time.monotonic() + response.keep_alive

    def close(self) -> None:
        """At once."""
        self._file.close()
        self._socket.close()


def read_answer(file: BinaryIO, request: HttpRequest, *, ended: bool) -> Response:
    """One answer. ended: whether `file` ends where the connection does, which tells the end of a
    body of no given length.

    Raises OSError (Cut where the file ends within the answer), or ValueError on what is not HTTP.
    """
    version, _, rest = _line(file).partition(" ")
    status, _, reason = rest.partition(" ")
    if not version.startswith("HTTP/1.") or not status.isdigit():
        raise ValueError("the answer is not HTTP")
    headers: dict[str, str] = {}
    while line := _line(file):
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
        if len(headers) > _LINES:
            raise ValueError("the answer has too many headers")
    empty = request.method == "HEAD" or status in ("204", "304")
    body = b"" if empty else _body(file, headers, ended)
    response = Response(request, int(status), reason, case_insensitive_dict(headers), body)
    response.keep_alive = 0.0 if version == "HTTP/1.0" else _keep_alive(headers)
    return response


def _line(file: BinaryIO) -> str:
    line = file.readline(_LINE)
    if not line.endswith(b"\n"):
        if len(line) == _LINE:
            raise ValueError("the answer has a line that is too long")
        raise TruncatedResponse("the connection ended within an answer")
    return line.rstrip(b"\r\n").decode("latin-1")


def _body(file: BinaryIO, headers: dict[str, str], ended: bool) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return _chunks(file)
    if "content-length" in headers:
        return _exactly(file, int(headers["content-length"]))
    if not ended:
        raise TruncatedResponse("the answer ends with its connection")
    headers["connection"] = "close"
    return file.read(_BODY)


def _chunks(file: BinaryIO) -> bytes:
    parts: list[bytes] = []
    size = 0
    while count := int(_line(file).partition(";")[0], 16):
        size += count
        parts.append(_exactly(file, count if size <= _BODY else -1))
        _line(file)
    while _line(file):  # trailers
        pass
    return b"".join(parts)


def _exactly(file: BinaryIO, count: int) -> bytes:
    if not 0 <= count <= _BODY:
        raise ValueError("the answer is too long")
    data = file.read(count)
    if len(data) < count:
        raise TruncatedResponse("the connection ended within an answer")
    return data


def _keep_alive(headers: dict[str, str]) -> float:
    if headers.get("connection", "").lower() == "close":
        return 0.0
    seconds = IDLE_SECONDS
    for part in headers.get("keep-alive", "").split(","):
        name, _, value = part.partition("=")
        if name.strip() == "timeout" and value.strip().isdigit():
            seconds = min(seconds, int(value) - 1.0)
    return seconds


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
