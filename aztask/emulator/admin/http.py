"""Requests and responses of the HTTP port (the part of RFC 9112 that its clients use).

Rules
1. Head and body are limited before they are read.
2. Names of headers are compared without regard to case, and kept as they were sent: a header may be
   a property of a message.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from urllib.parse import parse_qsl

from aztask.emulator import websocket
from aztask.emulator.admin import descriptions

MAX_HEAD = 64 * 1024
MAX_BODY = 1024 * 1024
LINGER_SECONDS = 2.0
_ATOM_ENTRY = "application/atom+xml;type=entry;charset=utf-8"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request. headers: by lower-case name. query: the last value of each name.

    path: still quoted. fields: the headers as they were sent, a name several times if it was.
    """

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    fields: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response: status, document and its content type."""

    status: int
    body: str | bytes = ""
    content_type: str = _ATOM_ENTRY
    headers: dict[str, str] = field(default_factory=dict)

    def encoded(self, *, keep: bool) -> bytes:
        """Return the bytes of the response. keep: the connection stays open after it."""
        body = self.body if isinstance(self.body, bytes) else self.body.encode()
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(body)}",
            f"Connection: {'keep-alive' if keep else 'close'}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body


def failed(status: int, detail: str) -> HttpResponse:
    """Return a response with the service's error document."""
    return HttpResponse(
        status, descriptions.error(status, detail), "application/xml; charset=utf-8"
    )


class BadRequest(Exception):
    """A request that gets this status and ends the connection."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


async def read_head(first: bytes, reader: asyncio.StreamReader) -> HttpRequest:
    """Return a request without its body. first: what was read of it. Raises BadRequest."""
    try:
        head = first + await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise BadRequest(431, "the request's head is too long") from None
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise BadRequest(400, "this port speaks HTTP/1.1")
    path, _, query = words[1].partition("?")
    pairs = (line.partition(":") for line in lines[1:])
    fields = tuple((name.strip(), value.strip()) for name, colon, value in pairs if colon)
    headers = websocket.headers_of(lines[1:])
    return HttpRequest(words[0].upper(), path, dict(parse_qsl(query)), headers, b"", fields)


async def read_body(
    request: HttpRequest,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    most: int = MAX_BODY,
    status: int = 413,
) -> HttpRequest:
    """Return the request with its body.

    most: the bytes that it may have. status: of the answer if it has more. Raises BadRequest.
    """
    headers = request.headers
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return replace(request, body=await _chunks(reader, most, status))
    length = headers.get("content-length", "0")
    # a number of so many digits is too large whatever it is, and int() would refuse it
    if not (length.isascii() and length.isdigit() and len(length) < 19) or int(length) > most:
        raise BadRequest(status, f"a body of {length[:20]} bytes; at most {most}")
    return replace(request, body=await reader.readexactly(int(length)))


async def _chunks(reader: asyncio.StreamReader, most: int, status: int) -> bytes:
    body = bytearray()
    while True:
        line = (await reader.readuntil(b"\r\n")).split(b";")[0].strip()
        try:
            size = int(line, 16)
        except ValueError:
            raise BadRequest(400, "a chunk without a size") from None
        if size < 0 or len(body) + size > most:
            raise BadRequest(status, f"a body of more than {most} bytes")
        body += (await reader.readexactly(size + 2))[:size]
        if not size:
            return bytes(body)


async def linger(reader: asyncio.StreamReader) -> None:
    """Read what a client still sends, before its connection is closed.

    A socket that is closed with unread bytes is reset, and the client may lose the answer that says
    what was wrong (RFC 9112, section 9.6).
    """
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while await reader.read(MAX_HEAD):
                pass
    except TimeoutError:
        pass
