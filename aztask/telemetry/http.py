"""A small HTTP server for metrics and probes.

Rules
1. It answers GET and HEAD of fixed paths and nothing else. It reads no body and no query.
2. At most `MOST_CONNECTIONS` requests at a time, each for at most `SECONDS`: a client that is slow
   or hostile cannot hold more. Further connections are closed at once.
3. An error of a page is one line in the log, and 500 for the client.
4. The threads are a part (`aztask.support.parts`): accepting goes on whatever fails.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple

from aztask.errors import ConfigurationError
from aztask.support.parts import Part

logger = logging.getLogger(__name__)

SECONDS: Final = 5.0
MOST_CONNECTIONS: Final = 16
LONGEST_ANSWER: Final = 30.0
"""Seconds after which a page that does not answer counts as a part that stands still."""

TEXT: Final = "text/plain; charset=utf-8"


class Answer(NamedTuple):
    """The answer to a request. status: of HTTP."""

    status: int
    body: bytes
    content_type: str = TEXT


class PageServer(ThreadingHTTPServer):
    """Serves `pages`, each a function, on threads of its own."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        host: str,
        port: int,
        pages: Mapping[str, Callable[[], Answer]],
        *,
        seconds: float = SECONDS,
    ) -> None:
        """Listen. Raises ConfigurationError if the address is taken or is not ours.

        seconds: how long a request may take.
        """
        self.pages = pages
        self._seconds = seconds
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, UnicodeError, OverflowError) as error:
            raise ConfigurationError(
                f"cannot listen on {host}:{port}: {error}; choose another address with --http"
            ) from None
        self.part = Part("http", longest=LONGEST_ANSWER)
        self._thread = self.part.thread(self.serve_forever, "aztask-http")

    @property
    def url(self) -> str:
        """The address that it listens on."""
        host, port = self.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{shown}:{port}"

    def start(self) -> None:
        """Start the thread that accepts connections."""
        self._thread.start()

    def stop(self) -> None:
        """Close the port; requests that are being answered are not waited for."""
        self.part.stop()
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Bind, without the reverse look-up of the host's name that the base class makes."""
        super(ThreadingHTTPServer, self).server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a new thread, if there is room (rule 2)."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            self.part.once(
                self.process_request_thread, "aztask-http-request", request, client_address
            ).start()
        except RuntimeError:  # no thread can be started
            self._room.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection, then make room for another one."""
        try:
            ending = self.part.alarm(self._seconds, _end, request)
            try:
                super().process_request_thread(request, client_address)
            finally:
                ending.cancel()
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that go away; everything else is logged by the handler."""


def _end(connection: socket.socket) -> None:
    """End a connection that has taken too long; its thread notices at once."""
    with suppress(OSError):  # it has ended in the meantime
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """One request, then the connection closes."""

    server_version = "aztask"
    sys_version = ""
    server: PageServer

    def do_GET(self) -> None:  # the base class's name
        """Answer with the page's body."""
        self._answer(body=True)

    def do_HEAD(self) -> None:
        """Answer with the headers of the page alone."""
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        try:
            answer = page() if page is not None else Answer(404, b"not found\n")
        except Exception:
            logger.exception("the page %s failed", self.path.partition("?")[0])
            answer = Answer(500, b"error, see the log\n")
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if body:
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:  # the base class's name
        """Log nothing: probes come every few seconds."""
