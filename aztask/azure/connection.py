"""A kept-alive HTTP connection to the queue service, and the answers that come over it.

Why not an HTTP library: `aztask.azure.exchange` waits for many answers in one thread, which needs
connections that never block.

Rule: an answer is bounded: its header lines, its body, and the time for each read.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, Self

from azure.core.exceptions import HttpResponseError, ServiceRequestError
from azure.core.rest import HttpRequest, HttpResponse
from azure.core.utils import case_insensitive_dict

IDLE_SECONDS: Final = 60.0
"""A connection that was idle for longer is not used again: load balancers drop it silently."""

_LINE: Final = 65536
_LINES: Final = 200
_BODY: Final = 16 * 1024 * 1024
_PIECE: Final = 65536


class TruncatedResponse(ConnectionResetError):
    """The received bytes end in the middle of an answer."""


class MalformedAnswer(ConnectionError):
    """The received bytes are no HTTP answer, or exceed a limit; the rest cannot be read, either."""


@dataclass(slots=True)
class WireRequest:
    """A request as it goes over a connection.

    method, url: as in `data`.
    """

    method: str
    url: str
    data: bytes

    @classmethod
    def of(cls, request: HttpRequest) -> Self:
        """A request of the SDK. Raises ServiceRequestError for a header with a line break."""
        content = request.content
        body = content.encode() if isinstance(content, str) else bytes(content or b"")
        return cls.composed(request.method, request.url, request.headers, body)

    @classmethod
    def composed(cls, method: str, url: str, headers: Mapping[str, str], body: bytes = b"") -> Self:
        """The request with these headers, and with ``Host`` and ``Content-Length``.

        Raises ServiceRequestError for a header with a line break.
        """
        netloc, slash, path = url.partition("://")[2].partition("/")
        lines = [f"{method} {slash or '/'}{path} HTTP/1.1", f"Host: {netloc}"]
        lines += [
            f"{name}: {value}"
            for name, value in headers.items()
            if name.lower() != "content-length"
        ]
        lines.append(f"Content-Length: {len(body)}\r\n\r\n")
        head = "\r\n".join(lines)
        if head.count("\n") != len(lines) + 1 or head.count("\r") != len(lines) + 1:
            bad = [name for name, value in headers.items() if set("\r\n") & {*name, *value}]
            what = f"the header {bad[0]}" if bad else "the address"
            raise ServiceRequestError(f"{what} contains a line break")
        return cls(method, url, head.encode("latin-1") + body)


class Response(HttpResponse):
    """An HTTP answer whose body has been read in full, as the SDK expects it."""

    def __init__(
        self,
        request: HttpRequest | WireRequest,
        status: int,
        reason: str,
        headers: Mapping[str, str],
        body: bytes,
    ) -> None:
        self._request = request
        self._status = status
        self._reason = reason
        self._plain_headers = headers
        self._headers: MutableMapping[str, str] | None = None
        self._body = body
        self._encoding: str | None = "utf-8"
        self.context: dict[str, Any] = {}
        self.keep_alive = 0.0
        """How long its connection may be used again, seconds."""

    @property
    def request(self) -> HttpRequest:
        request = self._request
        if isinstance(request, WireRequest):
            return HttpRequest(request.method, request.url)
        return request

    @property
    def status_code(self) -> int:
        return self._status

    @property
    def headers(self) -> MutableMapping[str, str]:
        """The header fields; names are not case-sensitive."""
        if self._headers is None:  # most answers are only looked at for their status
            self._headers = case_insensitive_dict(self._plain_headers)
        return self._headers

    @property
    def retry_after(self) -> str | None:
        """The header ``Retry-After``, as the service sent it."""
        return self.headers.get("retry-after") if self._status >= 400 else None

    @property
    def reason(self) -> str:
        """The reason phrase after the status."""
        return self._reason

    @property
    def content_type(self) -> str | None:
        """The value of the header ``Content-Type``."""
        return self.headers.get("content-type")

    @property
    def is_closed(self) -> bool:
        """Always True: the answer has been read in full."""
        return True

    @property
    def is_stream_consumed(self) -> bool:
        """Always True: the answer has been read in full."""
        return True

    @property
    def encoding(self) -> str | None:
        """The encoding that `text` uses by default."""
        return self._encoding

    @encoding.setter
    def encoding(self, value: str | None) -> None:
        self._encoding = value

    @property
    def url(self) -> str:
        return str(self._request.url)

    @property
    def content(self) -> bytes:
        return self._body

    def text(self, encoding: str | None = None) -> str:
        """The decoded body, without a byte order mark."""
        text = self._body.decode(encoding or self._encoding or "utf-8", "replace")
        return text.removeprefix("\ufeff")

    def json(self) -> Any:
        """Not supported: the queue service answers in XML. Raises ValueError."""
        raise ValueError("the answer is XML, not JSON")

    def raise_for_status(self) -> None:
        """Raise HttpResponseError for a status of 400 or more."""
        if self._status >= 400:
            raise HttpResponseError(response=self)

    def read(self) -> bytes:
        return self._body

    def iter_bytes(self, **kwargs: Any) -> Iterator[bytes]:
        """The body, in one piece."""
        yield self._body

    def iter_raw(self, **kwargs: Any) -> Iterator[bytes]:
        """The body, in one piece."""
        yield self._body

    def close(self) -> None:
        """Do nothing: the answer has been read in full."""

    def __enter__(self) -> Response:
        return self

    def __exit__(self, *args: object) -> None:
        return None

    def __repr__(self) -> str:
        return f"<Response: {self._status} {self._reason}>"


class Connection:
    """One connection, in one of two modes.

    In blocking mode, use `send` and `answer`. After `unblock`, use `send_some` and `receive_some`.
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
        self._poll = select.poll() if hasattr(select, "poll") else None  # Windows has none
        if self._poll is not None:
            self._poll.register(self._socket, select.POLLIN)
        self.usable_until = 0.0

    def fileno(self) -> int:
        """The socket's file descriptor, for a selector."""
        return self._socket.fileno()

    def fresh(self) -> bool:
        """Whether it may be used again: not idle for too long, and no unexpected data or close."""
        if time.monotonic() >= self.usable_until:
            return False
        if self._poll is None:
            return not select.select([self._socket], [], [], 0)[0]
        return not self._poll.poll(0)

    def send(self, data: bytes, seconds: float) -> None:
        """Send all bytes to the kernel, within `seconds`. Raises OSError."""
        self._socket.settimeout(seconds)
        self._socket.sendall(data)

    def answer(self, request: HttpRequest | WireRequest) -> Response:
        """Read one answer. Raises OSError, also if the answer is not HTTP (`MalformedAnswer`)."""
        response = read_answer(self._file, request, ended=True)
        self.used(response)
        return response

    def unblock(self) -> None:
        """Switch to non-blocking mode, until the next `send`."""
        self._socket.settimeout(0.0)

    def send_some(self, data: memoryview) -> int:
        """Send as much as the kernel accepts; returns the number of bytes. Raises OSError."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0

    def receive_some(self) -> bytes | None:
        """The received bytes: None if there are none yet, ``b""`` at the end. Raises OSError."""
        try:
            return self._socket.recv(_PIECE)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None

    def used(self, response: Response) -> None:
        """Note how long the connection may be used again after this answer."""
        self.usable_until = time.monotonic() + response.keep_alive

    def close(self) -> None:
        """Close the socket without waiting for an answer."""
        self._file.close()
        self._socket.close()


def read_answer(file: BinaryIO, request: HttpRequest | WireRequest, *, ended: bool) -> Response:
    """Read one answer from `file`.

    ended: whether the end of `file` is the end of the connection. Only then a body may come without
    a declared length.

    Raises TruncatedResponse if the file ends within the answer, MalformedAnswer if the answer is
    not HTTP or exceeds a limit, and other OSErrors.
    """
    version, _, rest = _line(file).partition(" ")
    status, _, reason = rest.partition(" ")
    if not version.startswith("HTTP/1."):
        raise MalformedAnswer("the answer is not HTTP")
    number = _number(status, 10)
    headers: dict[str, str] = {}
    while line := _line(file):
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
        if len(headers) > _LINES:
            raise MalformedAnswer("the answer has too many headers")
    empty = request.method == "HEAD" or status in ("204", "304")
    body = b"" if empty else _body(file, headers, ended)
    response = Response(request, number, reason, headers, body)
    response.keep_alive = 0.0 if version == "HTTP/1.0" else _keep_alive(headers)
    return response


def _line(file: BinaryIO) -> str:
    line = file.readline(_LINE)
    if not line.endswith(b"\n"):
        if len(line) == _LINE:
            raise MalformedAnswer("the answer has a line that is too long")
        raise TruncatedResponse("the connection ended within an answer")
    return line.rstrip(b"\r\n").decode("latin-1")


def _body(file: BinaryIO, headers: dict[str, str], ended: bool) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return _chunks(file)
    if "content-length" in headers:
        return _exactly(file, _number(headers["content-length"], 10))
    if not ended:
        raise TruncatedResponse("the answer ends with its connection")
    headers["connection"] = "close"
    return file.read(_BODY)


def _chunks(file: BinaryIO) -> bytes:
    parts: list[bytes] = []
    size = 0
    while count := _number(_line(file).partition(";")[0], 16):
        size += count
        parts.append(_exactly(file, count if size <= _BODY else -1))
        _line(file)
    while _line(file):  # trailers
        pass
    return b"".join(parts)


def _exactly(file: BinaryIO, count: int) -> bytes:
    if not 0 <= count <= _BODY:
        raise MalformedAnswer("the answer is too long")
    data = file.read(count)
    if len(data) < count:
        raise TruncatedResponse("the connection ended within an answer")
    return data


def _number(text: str, base: int) -> int:
    try:
        return int(text, base)
    except ValueError:
        raise MalformedAnswer(f"the answer is not HTTP: {text[:20]!r} is no number") from None


def _keep_alive(headers: dict[str, str]) -> float:
    if headers.get("connection", "").lower() == "close":
        return 0.0
    seconds = IDLE_SECONDS
    for part in headers.get("keep-alive", "").split(","):
        name, _, value = part.partition("=")
        if name.strip() == "timeout" and value.strip().isdigit():
            seconds = min(seconds, int(value) - 1.0)
    return seconds
