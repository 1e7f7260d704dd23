"""Forks beside threads that send: run as a program, or preloaded by a web server.

As a program it prints one line of JSON: what was sent, and how each child ended.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from typing import Any

from ledger_app import app, work

CHILD_SECONDS = 60.0  # a child that takes longer hangs

sent: list[str] = []
_stop = threading.Event()


def send_on(name: str, pause: float = 0.0) -> None:
    """Send until told to stop."""
    number = 0
    while not _stop.wait(pause):
        number += 1
        sent.append(work.with_options(task_id=f"{name}-{number}").delay("k").id)


def start_senders(count: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=send_on, args=(f"p{n}",)) for n in range(count)]
    for thread in threads:
        thread.start()
    while len(sent) < count:
        time.sleep(0.01)
    return threads


def child(number: int, sent_once: Any = None, parent_closed: Any = None) -> None:
    """Send, and send once more after the parent has closed its app."""
    work.with_options(task_id=f"c{number}").delay("k")
    if sent_once is not None:
        sent_once.set()
        parent_closed.wait(CHILD_SECONDS)
        work.with_options(task_id=f"c{number}-later").delay("k")


def main(children: int) -> None:
    """Fork one child after the other beside senders, and one that outlives the parent's app."""
    context = multiprocessing.get_context("fork")
    threads = start_senders(3)
    ends = []
    for number in range(children):
        process = context.Process(target=child, args=(number,))
        process.start()
        ends.append(end_of(process))
    once, closed = context.Event(), context.Event()
    last = context.Process(target=child, args=(children, once, closed))
    last.start()
    once.wait(CHILD_SECONDS)
    _stop.set()
    for thread in threads:
        thread.join()
    app.close()
    closed.set()
    ends.append(end_of(last))
    print(json.dumps({"sent": len(sent) + children + 2, "ends": ends}))


def end_of(process: BaseProcess) -> int | str:
    process.join(CHILD_SECONDS)
    if process.is_alive():
        process.kill()
        return "hangs"
    return process.exitcode or 0


def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    """A WSGI application that sends a task for each request."""
    found = work.delay("k")
    start("200 OK", [("Content-Type", "text/plain")])
    return [f"{os.getpid()} {found.id}".encode()]


if __name__ == "__main__":
    main(int(sys.argv[1]))
elif os.environ.get("FORKING_PRELOAD"):
    # As an application does that is preloaded: it sends, and a thread of it goes on sending.
    work.delay("k")
    if os.environ["FORKING_PRELOAD"] == "threads":
        threading.Thread(target=send_on, args=("preloaded", 0.005), daemon=True).start()
