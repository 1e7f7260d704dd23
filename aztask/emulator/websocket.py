"""AMQP over WebSockets (RFC 6455), for clients behind proxies and in browsers.

The AMQP port and the administration port both take them, at the service's path. A connection begins
as an HTTP request; afterwards its frames carry the bytes of AMQP, wherever those are cut.

Rules
1. Frames are limited before they are buffered. A violation of the protocol ends the connection,
   with the close code of RFC 6455, part 7.4.1. A close of the client is answered with its code.
2. Without a key, a page of another origin is refused: a browser does not keep it from connecting to
   this machine, as it does for other requests.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from aztask.emulator.config import is_loopback
from aztask.emulator.server import Endpoint, Server

PATH: Final = "/$servicebus/websocket"
PROTOCOLS: Final = ("AMQPWSB10", "amqp")  # the service's, and that of the AMQP binding
MAX_HEAD: Final = 16 * 1024
MAX_FRAME: Final = 4 * 1024 * 1024
_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, part 1.3
_CONTINUATION, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x2, 0x8, 0x9, 0xA
_FINAL, _MASKED, _LONGEST_CONTROL = 0x80, 0x80, 125
NORMAL, PROTOCOL_ERROR, NO_BINARY, TOO_BIG = 1000, 1002, 1003, 1009
_TEXT = 0x1


def answer(path: str, headers: Mapping[str, str], *, key_required: bool) -> bytes | None:
    """Return the answer to a request for a WebSocket; None if it is none, or is refused.

    headers: by lower-case name.
    """
    if path.rstrip("/").lower() != PATH or "websocket" not in headers.get("upgrade", "").lower():
        return None
    key = headers.get("sec-websocket-key", "")
    if not key or not (key_required or from_here(headers)):
        return None
    offered = [each.strip() for each in headers.get("sec-websocket-protocol", "").split(",")]
    chosen = next((each for each in offered if each in PROTOCOLS), None)
    digest = hashlib.sha1(key.encode() + _GUID, usedforsecurity=False).digest()
    lines = [
        "HTTP/1.1 101 Switching Protocols",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Accept: {base64.b64encode(digest).decode()}",
        *([f"Sec-WebSocket-Protocol: {chosen}"] if chosen else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def from_here(headers: Mapping[str, str]) -> bool:
    """Return whether Host and Origin name this machine; programs send no Origin."""
    named = [f"//{headers.get('host', 'localhost')}", headers.get("origin", "//localhost")]
    try:
        return all(is_loopback(urlsplit(each).hostname or "") for each in named)
    except ValueError:
        return False


def headers_of(lines: list[str]) -> dict[str, str]:
    """Return the headers of a request's lines, by lower-case name."""
    pairs = (line.partition(":") for line in lines)
    return {name.strip().lower(): value.strip() for name, colon, value in pairs if colon}


class BadFrame(Exception):
    """The peer violated RFC 6455. code: the reason of the close."""

    def __init__(self, message: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(message)
        self.code = code


def framed(payload: bytes, code: int = _BINARY) -> bytes:
    """Return one frame of the server, which is never masked."""
    size = len(payload)
    if size < 126:
        head = bytes((_FINAL | code, size))
    elif size < 1 << 16:
        head = bytes((_FINAL | code, 126)) + size.to_bytes(2)
    else:
        head = bytes((_FINAL | code, 127)) + size.to_bytes(8)
    return head + payload


class FrameReader:
    """Cuts a client's bytes into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._at = 0  # where the next frame begins: many small ones are cut off together
        self._parts = False  # a message in parts has begun

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the frames that are complete now, as (code, payload). Raises BadFrame."""
        self._rest += data
        found = []
        while (one := self._next()) is not None:
            found.append(one)
        del self._rest[: self._at]
        self._at = 0
        return found

    def _next(self) -> tuple[int, bytes] | None:
        rest, at = self._rest, self._at
        if len(rest) < at + 2:
            return None
        first, size = rest[at], rest[at + 1] & 0x7F
        self._check(first, rest[at + 1])
        start = at + 2
        if size > _LONGEST_CONTROL:
            width = 2 if size == 126 else 8
            if len(rest) < start + width:
                return None
            size, start = int.from_bytes(rest[start : start + width]), start + width
        if size > MAX_FRAME:
            raise BadFrame(f"a frame of {size} bytes; {MAX_FRAME} are allowed", TOO_BIG)
        body = start + 4
        if len(rest) < body + size:
            return None
        self._at = body + size
        if first & 0x0F < _CLOSE:
            self._parts = not first & _FINAL
        return first & 0x0F, _unmasked(rest[body : body + size], rest[start:body])

    def _check(self, first: int, second: int) -> None:
        """Check the first two bytes of a frame. Raises BadFrame."""
        code = first & 0x0F
        if first & 0x70 or not second & _MASKED:
            raise BadFrame("reserved bits, or no mask")
        if code >= _CLOSE and (not first & _FINAL or second & 0x7F > _LONGEST_CONTROL):
            raise BadFrame("a control frame that is long, or in parts")
        if code == _TEXT:
            raise BadFrame("a text; AMQP is binary", NO_BINARY)
        if code not in (_CONTINUATION, _BINARY, _CLOSE, _PING, _PONG):
            raise BadFrame(f"a frame of the kind {code}")
        if code < _CLOSE and (code == _CONTINUATION) is not self._parts:
            raise BadFrame("parts of messages in the wrong order")


def _unmasked(payload: bytearray, mask: bytearray) -> bytes:
    size = len(payload)
    repeated = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(payload) ^ int.from_bytes(repeated)).to_bytes(size)


class FramedTransport(asyncio.Transport):
    """A transport whose writes become frames.

    writer: the stream that had the transport before. It is kept, because a `StreamWriter` closes
    its transport when it is garbage.
    """

    def __init__(self, inner: asyncio.Transport, writer: asyncio.StreamWriter | None) -> None:
        super().__init__()
        self.inner = inner
        self._writer = writer

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.inner.write(framed(bytes(data)))

    def is_closing(self) -> bool:
        return self.inner.is_closing()

    def close(self, code: int = NORMAL) -> None:
        if not self.inner.is_closing():
            self.inner.write(framed(code.to_bytes(2), _CLOSE))
        self.inner.close()

    def abort(self) -> None:
        self.inner.abort()

    def pause_reading(self) -> None:
        self.inner.pause_reading()

    def resume_reading(self) -> None:
        self.inner.resume_reading()


class WebSocketEndpoint(Endpoint):
    """A client's socket whose bytes come and go in frames."""

    def __init__(
        self,
        server: Server,
        transport: asyncio.Transport,
        writer: asyncio.StreamWriter | None = None,
    ) -> None:
        """Serve a transport whose HTTP request was answered, by `writer` if there was one."""
        super().__init__(server)
        self._frames = FrameReader()
        self._framed = FramedTransport(transport, writer)
        self.connection_made(transport)
        self._transport = self._framed
        transport.set_protocol(self)

    def read(self, data: bytes) -> None:
        """Process the frames of these bytes."""
        try:
            frames = self._frames.feed(data)
        except BadFrame as error:
            self._framed.close(error.code)
            return
        payload = b"".join(part for code, part in frames if code in (_CONTINUATION, _BINARY))
        if payload:
            super().read(payload)
        pongs = [framed(part, _PONG) for code, part in frames if code == _PING]
        if pongs and not self._framed.is_closing():
            self._framed.inner.write(b"".join(pongs))
        closing = next((part for code, part in frames if code == _CLOSE), None)
        if closing is not None:
            self._framed.close(_echoed(closing))


def _echoed(payload: bytes) -> int:
    """Return the code that answers a close: the client's, unless a frame must not have it."""
    code = int.from_bytes(payload[:2]) if len(payload) > 1 else NORMAL
    allowed = 3000 <= code <= 4999 or code in {*range(1000, 1004), *range(1007, 1015)}
    return code if allowed and len(payload) != 1 else PROTOCOL_ERROR


class Doorway(asyncio.Protocol):
    """A new connection to the AMQP port, until its first bytes tell AMQP from HTTP."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._endpoint = Endpoint(server)
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, with its time-outs, as one that speaks AMQP."""
        self._endpoint.connection_made(transport)
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  # TCP's always is
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Choose the protocol, and hand the connection over."""
        self._head += data
        if not (self._head.startswith(b"GET ") or b"GET ".startswith(self._head)):
            self._transport.set_protocol(self._endpoint)
            self._endpoint.read(self._head)
        elif b"\r\n\r\n" in self._head:
            self._upgrade()
        elif len(self._head) > MAX_HEAD:
            self._transport.abort()

    def _upgrade(self) -> None:
        head, _, rest = self._head.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        path = words[1].partition("?")[0] if len(words) == 3 else ""
        required = self._server.broker.access.required
        reply = answer(path, headers_of(lines[1:]), key_required=required)
        self._server.endpoints.discard(self._endpoint)
        if reply is None:
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            self._transport.close()
            return
        self._transport.write(reply)
        endpoint = WebSocketEndpoint(self._server, self._transport)
        if rest:
            endpoint.read(rest)

    def connection_lost(self, error: Exception | None) -> None:
        """Forget a client that left before it said anything."""
        self._endpoint.connection_lost(error)
