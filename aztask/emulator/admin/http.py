"""A small HTTP/1.1 server for the administration API (the part of RFC 9112 that its clients use).

Rules
1. Head and body are limited before they are read. A connection is closed after `IDLE_SECONDS`
   without a complete request.
2. Each connection has one request at a time. It stays open unless the client asks to close it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import parse_qsl

from aztask.emulator.admin.routes import HttpRequest, HttpResponse, Routes, failed
from aztask.emulator.broker.broker import Broker

log = logging.getLogger(__name__)

MAX_HEAD = 64 * 1024
MAX_BODY = 1024 * 1024
IDLE_SECONDS = 120.0
MAX_CONNECTIONS = 200
STOP_SECONDS = 1.0


class _BadRequest(Exception):
    """A request that gets this status and ends the connection."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class AdminServer:
    """Listens for administration clients. deleted: called with the path of a deleted entity."""

    def __init__(self, broker: Broker, deleted: Callable[[str], None]) -> None:
        self._broker = broker
        self._deleted = deleted
        self._routes = Routes(broker, deleted, secure=False)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None] | None] = set()

    async def start(self, host: str, port: int, context: ssl.SSLContext | None = None) -> int:
        """Listen, with TLS if there is a `context`; return the bound port. Raises OSError."""
        self._routes = Routes(self._broker, self._deleted, secure=context is not None)
        self._server = await asyncio.start_server(
            self._serve, host, port, ssl=context, limit=MAX_HEAD
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close all connections and wait until their tasks have ended.

        Connections are aborted. A close with TLS waits for the client's answer, which an idle
        client does not send.
        """
        if self._server:
            self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        serving = [task for task in self._serving if task is not None]
        if serving:
            await asyncio.wait(serving, timeout=STOP_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.current_task()
        self._open.add(writer)
        self._serving.add(task)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (OSError, EOFError, TimeoutError):
            log.debug("an administration client disconnected or sent nothing in time")
        finally:
            self._open.discard(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            self._serving.discard(task)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection stays open."""
        keep = False
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                request = await _read(reader, writer)
            keep = request.headers.get("connection", "").lower() != "close"
            response = self._answer(request)
        except _BadRequest as error:
            response = failed(error.status, str(error))
        body = response.body.encode()
        reason = HTTPStatus(response.status).phrase
        head = [
            f"HTTP/1.1 {response.status} {reason}",
            f"Content-Type: {response.content_type}",
            f"Content-Length: {len(body)}",
            f"Connection: {'keep-alive' if keep else 'close'}",
        ]
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        await writer.drain()
        return keep

    def _answer(self, request: HttpRequest) -> HttpResponse:
        try:
            return self._routes.answer(request)
        except Exception:
            log.exception("%s %s failed: a bug of the emulator", request.method, request.path)
            return failed(500, "a bug of the emulator, see its log")


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HttpRequest:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _BadRequest(431, "the request's head is too long") from None
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _BadRequest(400, "this port speaks HTTP/1.1")
    headers = {}
    for line in lines[1:]:
        name, separator, value = line.partition(":")
        if separator:
            headers[name.strip().lower()] = value.strip()
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await _body(reader, headers)
    path, _, query = words[1].partition("?")
    return HttpRequest(words[0].upper(), path, dict(parse_qsl(query)), headers, body)


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return await _chunks(reader)
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()) or int(length) > MAX_BODY:
        raise _BadRequest(413, f"a body of {length[:20]} bytes; at most {MAX_BODY}")
    return await reader.readexactly(int(length))


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        line = (await reader.readuntil(b"\r\n")).split(b";")[0].strip()
        try:
            size = int(line, 16)
        except ValueError:
            raise _BadRequest(400, "a chunk without a size") from None
        if size < 0 or len(body) + size > MAX_BODY:
            raise _BadRequest(413, f"a body of more than {MAX_BODY} bytes")
        body += (await reader.readexactly(size + 2))[:size]
        if not size:
            return body
