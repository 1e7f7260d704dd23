"""A web server that takes messages, as Teams and Slack do, and keeps them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hook:
    """The server. status: of its answers. hold: set; clear it, and it answers no request."""

    url: str = ""
    status: int = 200
    location: str = ""
    bodies: list[Any] = field(default_factory=list)
    gets: list[str] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)

    def lines(self) -> list[tuple[str, str]]:
        """(state, rule) of all notices in messages of plain JSON, in order."""
        return [(n["state"], n["rule"]) for each in self.bodies for n in each["notices"]]


@contextmanager
def serving() -> Iterator[Hook]:
    """A server on a free port of this machine."""
    hook = Hook()
    hook.hold.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            hook.hold.wait(60)
            hook.bodies.append(json.loads(data))
            self.answer()

        def do_GET(self) -> None:
            hook.gets.append(self.path)
            self.answer()

        def answer(self) -> None:
            try:
                self.send_response(hook.status)
                if hook.location:
                    self.send_header("location", hook.location)
                self.send_header("content-length", "0")
                self.end_headers()
            except OSError:
                return  # the client was killed

        def log_message(self, *given: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hook.url = f"http://127.0.0.1:{server.server_port}/services/T000/B000/verysecret"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hook
    finally:
        hook.hold.set()
        server.shutdown()
        thread.join()
        server.server_close()
