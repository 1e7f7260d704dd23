"""A small HTTP server for metrics and probes. No client can keep the others from an answer.

Rules
1. It answers GET and HEAD of fixed paths and nothing else. It reads no body and no query.
2. One thread waits for all connections. It makes the answers of quick pages, the probes, itself: a
   probe needs no other thread, and no room that a client could take.
3. It accepts every connection. When `MOST_CONNECTIONS` are open, it closes the oldest one without a
   whole request, else the oldest one that waits for its answer. What a new connection has already
   sent is read before the next one is accepted.
4. A request has `SECONDS` to arrive, and its answer as long to be made and sent.
5. A second thread makes all other pages, one at a time. All requests that wait for a page when it
   is begun get the same answer.
6. An error of a page is one line in the log, and 500 for the client.
7. The threads are a part (`aztask.support.parts`): accepting goes on whatever fails.

Why not a thread for each connection: 50 half-open connections a second took all of them, and the
probes that then failed made Kubernetes restart the worker.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from http import HTTPStatus
from queue import SimpleQueue
from typing import Final, NamedTuple

from aztask.errors import ConfigurationError
from aztask.support.parts import Part

logger = logging.getLogger(__name__)

SECONDS: Final = 5.0
MOST_CONNECTIONS: Final = 200
"""At 500 connections a second, a client has 0.4 s to send its request after it has connected."""

ACCEPTED_AT_ONCE: Final = 64
"""Connections that are accepted before the others are read again."""

WAITING_TO_CONNECT: Final = 1024
"""Connections that the kernel keeps while this process is busy."""

FRESH_SECONDS: Final = 0.1
"""A quick page is made again after so long: a flood of requests costs no more than ten a second."""

LONGEST_ANSWER: Final = 30.0
"""Seconds after which a page that does not answer counts as a part that stands still."""

LONGEST_HEAD: Final = 8192
"""Bytes of a request without its body."""

NO_FILES: Final = {errno.EMFILE, errno.ENFILE}
PAUSE_SECONDS: Final = 0.5
"""How long no connection is accepted when the process can open no more files."""

TEXT: Final = "text/plain; charset=utf-8"


class HttpAnswer(NamedTuple):
    """The answer to a request. status: of HTTP."""

    status: int
    body: bytes
    content_type: str = TEXT

    def encoded(self, *, body: bool) -> bytes:
        """The bytes to send. body: False for HEAD."""
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n"
            f"Server: aztask\r\nContent-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n"
            "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
        )
        return head.encode("latin-1") + (self.body if body else b"")


BROKEN: Final = HttpAnswer(500, b"error, see the log\n")


class HttpConnection:
    """A client: what it has sent, then what it still gets.

    * `ends_at`: when it is cut off.
    * `watched`: False while it waits for a page, when whatever it sends is of no interest.
    """

    def __init__(self, client: socket.socket, ends_at: float) -> None:
        self.client = client
        self.ends_at = ends_at
        self.received = b""
        self.left = b""
        self.body = True
        self.watched = True

    @property
    def complete(self) -> bool:
        """Whether the whole request has arrived, but for a body."""
        return b"\r\n\r\n" in self.received or b"\n\n" in self.received


class PageMaker:
    """Makes pages on a thread of its own, one at a time (rule 5)."""

    def __init__(self, pages: Mapping[str, Callable[[], HttpAnswer]], part: Part) -> None:
        self._pages = pages
        self._part = part
        self._wanted: SimpleQueue[str | None] = SimpleQueue()
        self._made: deque[HttpAnswer] = deque()
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._thread = part.thread(self._run, "aztask-http-pages")

    def start(self) -> None:
        """From now on, pages that are wanted are made."""
        self._thread.start()

    def want(self, path: str) -> None:
        """Make this page; its answer is announced at `reader`."""
        self._wanted.put(path)

    def made(self) -> list[HttpAnswer]:
        """The pages that were made since the last call."""
        with suppress(BlockingIOError):
            self.reader.recv(4096)
        return [self._made.popleft() for _ in range(len(self._made))]

    def wake(self) -> None:
        """Make `reader` readable, so that the thread that waits for it looks again."""
        with suppress(OSError):  # it is readable already, or closed
            self._writer.send(b"\0")

    def stop(self) -> None:
        """End the thread; a page that is being made is not waited for."""
        self._wanted.put(None)

    def close(self) -> None:
        """Close both ends of the pair; nothing waits for `reader` then."""
        self.reader.close()
        self._writer.close()

    def make(self, path: str) -> HttpAnswer:
        """Make one page now; its error is logged (rule 6)."""
        try:
            return self._pages[path]()
        except Exception:
            logger.exception("the page %s failed", path)
            return BROKEN

    def _run(self) -> None:
        while (path := self._wanted.get()) is not None:
            self._part.begin()
            answer = BROKEN
            try:
                answer = self.make(path)
            finally:  # those who wait get an answer, whatever happens
                self._made.append(answer)
                self.wake()
            self._part.rest()


class PageServer:
    """Serves `pages`, each a function, on two threads of its own."""

    def __init__(
        self,
        host: str,
        port: int,
        pages: Mapping[str, Callable[[], HttpAnswer]],
        *,
        quick: Collection[str] = (),
        seconds: float = SECONDS,
    ) -> None:
        """Listen. Raises ConfigurationError if the address is taken or is not ours.

        * `quick`: the paths of pages that are made without waiting for anything (rule 2).
        * `seconds`: how long a request, and then its answer, may take.
        """
        self._paths = pages.keys()
        self._quick = frozenset(quick)
        self._seconds = seconds
        self._listener = _listening(host, port)
        self.server_address = self._listener.getsockname()
        self.part = Part("http", longest=LONGEST_ANSWER)
        self._maker = PageMaker(pages, self.part)
        self._thread = self.part.thread(self._serve, "aztask-http")
        self._selector = selectors.DefaultSelector()
        self._stopping = False
        self._accepting_from = 0.0
        # Both in the order in which their connections end.
        self._reading: dict[socket.socket, HttpConnection] = {}
        self._answering: dict[socket.socket, HttpConnection] = {}
        self._ready: dict[str, tuple[float, HttpAnswer]] = {}
        self._next: dict[str, list[HttpConnection]] = {}  # wait for a page that is not begun
        self._making: tuple[str, list[HttpConnection]] | None = None

    @property
    def url(self) -> str:
        """The address that it listens on."""
        host, port = self.server_address[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def start(self) -> None:
        """Accept and answer from now on."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._maker.reader, selectors.EVENT_READ)
        self._maker.start()
        self._thread.start()

    def stop(self) -> None:
        """Close the port and all connections; requests that wait are not answered."""
        self._stopping = True
        self.part.stop()
        self._maker.stop()
        self._maker.wake()
        if self._thread.is_alive():
            self._thread.join(SECONDS)
        for connection in [*self._reading.values(), *self._answering.values()]:
            self._close(connection)
        self._selector.close()
        self._maker.close()
        self._listener.close()

    # -- the thread that waits ---------------------------------------------------------------

    def _serve(self) -> None:
        while not self._stopping:
            self.part.rest()
            ready = self._selector.select(1.0 if self._idle() else 0.1)
            self.part.begin()
            accept = False
            for key, _ in ready:
                if key.fileobj is self._listener:
                    accept = True  # the others first: accepting may close one of them
                elif key.fileobj is self._maker.reader:
                    self._deliver()
                else:
                    self._go_on(key.data)
            self._end_late_ones()
            if accept:
                self._accept()

    def _idle(self) -> bool:
        return not self._reading and not self._answering

    def _accept(self) -> None:
        """Accept what waits, and read what has arrived (rule 3)."""
        if time.monotonic() < self._accepting_from:
            time.sleep(0.01)  # the listener stays readable
            return
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in NO_FILES:
                    if self._idle():
                        self._accepting_from = time.monotonic() + PAUSE_SECONDS
                        return
                    self._close_oldest()
                continue  # else the client has gone before it was accepted
            if len(self._reading) + len(self._answering) >= MOST_CONNECTIONS:
                self._close_oldest()  # only now: as long as no client waits, none has to go
            client.setblocking(False)
            connection = HttpConnection(client, time.monotonic() + self._seconds)
            self._reading[client] = connection
            self._selector.register(client, selectors.EVENT_READ, connection)
            self._go_on(connection)

    def _go_on(self, connection: HttpConnection) -> None:
        """Read more of a request, or send more of an answer."""
        try:
            if connection.client in self._reading:
                self._read(connection)
            elif connection.client in self._answering:
                self._send(connection)
        except BlockingIOError:
            return
        except OSError:
            self._close(connection)  # the client has gone

    def _read(self, connection: HttpConnection) -> None:
        data = connection.client.recv(LONGEST_HEAD)
        connection.received += data
        if connection.complete or len(connection.received) > LONGEST_HEAD:
            del self._reading[connection.client]
            self._answering[connection.client] = connection
            connection.ends_at = time.monotonic() + self._seconds
            self._respond(connection)
        elif not data:
            self._close(connection)

    def _respond(self, connection: HttpConnection) -> None:
        method, path = _request_line(connection.received)
        connection.body = method != "HEAD"
        if not connection.complete:
            self._answer(connection, HttpAnswer(431, b"the request is too long\n"))
        elif not path.startswith("/"):
            self._answer(connection, HttpAnswer(400, b"this is no HTTP request\n"))
        elif method not in ("GET", "HEAD"):
            self._answer(connection, HttpAnswer(501, b"only GET and HEAD are answered\n"))
        elif path not in self._paths:
            self._answer(connection, HttpAnswer(404, b"not found\n"))
        elif path in self._quick:
            self._answer(connection, self._quick_answer(path))
        else:
            self._selector.unregister(connection.client)
            connection.watched = False
            self._next.setdefault(path, []).append(connection)
            self._begin_page()

    def _quick_answer(self, path: str) -> HttpAnswer:
        now = time.monotonic()
        at, answer = self._ready.get(path, (float("-inf"), None))
        if answer is None or now - at >= FRESH_SECONDS:
            answer = self._maker.make(path)
            self._ready[path] = (now, answer)
        return answer

    def _begin_page(self) -> None:
        if self._making is None and self._next:
            path = next(iter(self._next))
            self._making = (path, self._next.pop(path))
            self._maker.want(path)

    def _deliver(self) -> None:
        """Send the pages that were made, and have the next one made."""
        for answer in self._maker.made():
            waiting = self._making[1] if self._making is not None else []
            self._making = None
            for connection in waiting:
                if connection.client in self._answering:  # else it was closed while it waited
                    self._selector.register(connection.client, selectors.EVENT_WRITE, connection)
                    connection.watched = True
                    self._answer(connection, answer)
        self._begin_page()

    def _answer(self, connection: HttpConnection, answer: HttpAnswer) -> None:
        connection.left = answer.encoded(body=connection.body)
        self._go_on(connection)

    def _send(self, connection: HttpConnection) -> None:
        """Send as much as the client takes; then the connection ends."""
        sent = connection.client.send(connection.left)
        connection.left = connection.left[sent:]
        if connection.left:
            self._selector.modify(connection.client, selectors.EVENT_WRITE, connection)
            return
        connection.client.shutdown(socket.SHUT_WR)
        self._close(connection)

    def _end_late_ones(self) -> None:
        now = time.monotonic()
        for connections in (self._reading, self._answering):
            while connections:
                first = next(iter(connections.values()))
                if first.ends_at > now:
                    break
                self._close(first)

    def _close_oldest(self) -> None:
        """Make room for one connection (rule 3). What has arrived until now counts: a request may
        have come since the last `select`.
        """
        while self._reading:
            oldest = next(iter(self._reading.values()))
            self._go_on(oldest)
            if oldest.client not in self._answering:
                self._close(oldest)
                return
        self._close(next(iter(self._answering.values())))

    def _close(self, connection: HttpConnection) -> None:
        """Close it, unless it is closed."""
        known = self._reading.pop(connection.client, None)
        known = self._answering.pop(connection.client, known)
        if known is not None:
            if connection.watched:
                self._selector.unregister(connection.client)
            connection.client.close()


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ConfigurationError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if os.name == "posix":  # on Windows, it would let two processes use one port
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(WAITING_TO_CONNECT)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error}; choose another address with --http"
        ) from None
    return listener


def _request_line(received: bytes) -> tuple[str, str]:
    """Method and path of a request, without its query; ("", "") if it is none."""
    words = received.partition(b"\n")[0].decode("latin-1").split()
    if len(words) != 3 or not words[2].startswith("HTTP/"):
        return "", ""
    return words[0], words[1].partition("?")[0]
