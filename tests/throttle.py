"""An HTTP proxy that admits so many requests a second, as a storage account does.

The others are answered with 503 ServerBusy and do not reach the server. It knows the length of a
message from its head, and runs in a thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

BODY = (
    b'<?xml version="1.0" encoding="utf-8"?><Error><Code>ServerBusy</Code>'
    b"<Message>The server is busy.</Message></Error>"
)
SHARE = 0.25
"""Of a second: what was not used of it may be used at once."""


class Throttle:
    """What the proxy has seen. rate: requests a second that it admits; None for all."""

    def __init__(self, target: int, rate: float | None, retry_after: int | None) -> None:
        self.rate = rate
        self.admitted = 0
        self.refused = 0
        self.port = 0
        self._target = target
        pause = b"" if retry_after is None else b"Retry-After: %d\r\n" % retry_after
        head = b"HTTP/1.1 503 The server is busy.\r\nContent-Type: application/xml\r\n%s"
        head += b"x-ms-error-code: ServerBusy\r\nContent-Length: %d\r\n\r\n"
        self._busy = head % (pause, len(BODY)) + BODY
        self._tokens = 1.0
        self._at = time.monotonic()

    def _admits(self) -> bool:
        now = time.monotonic()
        if self.rate is not None:
            filled = self._tokens + (now - self._at) * self.rate
            self._tokens, self._at = min(max(1.0, self.rate * SHARE), filled), now
            if self._tokens < 1.0:
                self.refused += 1
                return False
            self._tokens -= 1.0
        self.admitted += 1
        return True

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client."""
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while True:
                message = await _message(reader)
                if not self._admits():
                    writer.write(self._busy)
                    continue
                if upstream is None:
                    upstream = await asyncio.open_connection("127.0.0.1", self._target)
                upstream[1].write(message)
                writer.write(await _message(upstream[0]))
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()
            if upstream is not None:
                upstream[1].close()


async def _message(reader: asyncio.StreamReader) -> bytes:
    """A request or an answer, whole."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    fields = {name.strip().lower(): value.strip() for name, _, value in lines}
    if b"chunked" not in fields.get(b"transfer-encoding", b""):
        return head + await reader.readexactly(int(fields.get(b"content-length", 0)))
    body = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        body += line + await reader.readexactly(size + 2)
        if not size:
            return head + body


@contextmanager
def throttling(
    target: int, rate: float | None, *, retry_after: int | None = None
) -> Iterator[Throttle]:
    """A throttle in front of a port of 127.0.0.1.

    retry_after: seconds that its refusals ask for.
    """
    throttle = Throttle(target, rate, retry_after)
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def serve() -> None:
        server = await asyncio.start_server(throttle.handle, "127.0.0.1", 0, limit=2**20)
        throttle.port = server.sockets[0].getsockname()[1]
        started.set()
        await stopping.wait()
        server.close()

    stopping = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    started.wait(10)
    try:
        yield throttle
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(10)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
