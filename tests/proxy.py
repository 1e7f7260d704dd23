"""A TCP proxy in a thread, between a client and one server, that can be told to misbehave.

It knows nothing of the protocol but what `requests` is told to look for. Modes, for connections as
they are and for those to come:

* ``pass``: forward.
* ``reset``: end connections with RST, new ones too.
* ``blackhole``: take what comes and forward nothing, either way.
* ``drop-reply``: forward the client's bytes, and reset the connection instead of the answer.
* ``forbid``: answer HTTP requests with status 403, in place of the server.

``delay`` puts off each answer by so many seconds. `hook` decides for each request on its own.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

HTTP_REQUEST = re.compile(rb"(?:^|\r\n|\n)?(GET|PUT|POST|PATCH|DELETE|HEAD) (\S+) HTTP/1\.1\r\n")
PIECE = 65536
FORBIDDEN = (
    b"HTTP/1.1 403 Forbidden\r\nx-ms-error-code: AuthorizationFailure\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)


class Proxy:
    """Listens on a free port of 127.0.0.1 and forwards to `target`, a port of 127.0.0.1."""

    def __init__(self, target: int, *, requests: re.Pattern[bytes] = HTTP_REQUEST) -> None:
        """requests: finds the requests in what a client sends, for `counts` and `hook`."""
        self.target = target
        self.mode = "pass"
        self.delay = 0.0
        self.counts: Counter[str] = Counter()
        self.hook: Callable[[bytes, int], str | float | None] | None = None
        self._requests = requests
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def total(self) -> int:
        """How many requests were seen."""
        return sum(self.counts.values())

    def seen(self, data: bytes) -> str | float | None:
        """Count the requests in `data`; what the hook wants for the last one.

        The hook gets the first line and the number of such requests so far, and gives a mode, a
        delay in seconds, or None.
        """
        wish = None
        for match in self._requests.finditer(data):
            kind = match[1].decode()
            with self._lock:
                self.counts[kind] += 1
                number = self.counts[kind]
            if self.hook is not None:
                wish = self.hook(match[0].strip(), number)
        return wish

    def reset_all(self) -> None:
        """Reset the connections that are open now; new ones are taken."""
        for link in list(self._links):
            link.reset()

    def half_close(self) -> None:
        """End the server's direction of each open connection, leaving the client's open."""
        for link in list(self._links):
            link.half_close()

    def set(self, mode: str) -> None:
        """Change the mode; ``reset`` also ends what is open."""
        self.mode = mode
        if mode == "reset":
            self.reset_all()

    def close(self) -> None:
        """Stop listening and end what is open."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()
        self.reset_all()
        for link in list(self._links):
            link.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            if self.mode == "reset":
                _abort(client)
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
            except OSError:
                _abort(client)
                continue
            server.settimeout(None)
            link = _Link(self, client, server)
            with self._lock:
                self._links.add(link)
            link.start()

    def forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)


class _Link:
    """One connection through the proxy: a thread each way."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._wish: str | float | None = None
        self._forbidden = False
        self._threads = [
            threading.Thread(target=self._up, daemon=True),
            threading.Thread(target=self._down, daemon=True),
        ]
        self._open = 2
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(5)

    def reset(self) -> None:
        for end in (self._client, self._server):
            _linger(end)
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._end()

    def half_close(self) -> None:
        with suppress(OSError):
            self._client.shutdown(socket.SHUT_WR)

    def _up(self) -> None:
        with suppress(OSError):
            while data := self._client.recv(PIECE):
                if self._forbidden:
                    continue  # the rest of a request that has its answer
                wish = self._proxy.seen(data)
                if wish is not None:
                    self._wish = wish
                if "forbid" in (self._proxy.mode, self._wish):
                    self._forbidden = True
                    self._client.sendall(FORBIDDEN)
                    continue
                if "blackhole" in (self._proxy.mode, self._wish):
                    continue
                if self._wish == "reset":
                    self._end()
                    break
                self._server.sendall(data)
            else:
                self._server.shutdown(socket.SHUT_WR)
        self._done()

    def _down(self) -> None:
        with suppress(OSError):
            while data := self._server.recv(PIECE):
                wish, self._wish = self._wish, None
                if isinstance(wish, float):
                    time.sleep(wish)
                if self._proxy.delay:
                    time.sleep(self._proxy.delay)
                if "blackhole" in (self._proxy.mode, wish):
                    continue
                if "drop-reply" in (self._proxy.mode, wish):
                    self._end()
                    break
                self._client.sendall(data)
            else:
                self._client.shutdown(socket.SHUT_WR)
        self._done()

    def _done(self) -> None:
        with self._proxy._lock:
            self._open -= 1
            last = self._open == 0
        if last:
            self._end()
            self._proxy.forget(self)

    def _end(self) -> None:
        for end in (self._client, self._server):
            _linger(end)
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def _linger(end: socket.socket) -> None:
    """Make its closing a reset."""
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _abort(end: socket.socket) -> None:
    _linger(end)
    end.close()


@contextmanager
def proxied(target: int, **options: object) -> Iterator[Proxy]:
    """A proxy that is closed at the end."""
    proxy = Proxy(target, **options)  # type: ignore[arg-type]
    try:
        yield proxy
    finally:
        proxy.close()
