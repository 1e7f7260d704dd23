"""A Redis server for one run, which holds Celery's results."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 10.0


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """Start a server on a free port of 127.0.0.1, which keeps nothing; yields the port."""
    program = shutil.which("redis-server")
    if program is None:
        sys.exit("redis-server is missing: install it (Debian: apt-get install redis-server)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder))
    with (folder / "redis.log").open("wb") as log:
        server = subprocess.Popen([program, "--port", str(port), *options], stdout=log, stderr=log)
    try:
        _wait_for(port)
        yield port
    finally:
        server.terminate()
        server.wait(START_SECONDS)


def _wait_for(port: int) -> None:
    ends_at = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(0.05)
