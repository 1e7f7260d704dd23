"""An app with everything on, whose processes can be told to raise or block in any thread.

Each process that imports it, the supervisor and the pool processes, answers on the Unix socket
``PARTS_SOCKETS/PID``. A request is one line of JSON, and so is the answer:

* ``{"do": "list"}``: the process's threads: name, native id, part.
* ``{"do": "raise" or "block", "threads": [...]}``: the next call of a function of aztask in each of
  these threads raises `Injected`, or blocks until the file ``PARTS_SOCKETS/go`` exists.
* ``{"do": "stacks"}``: writes what each thread does to its standard error.
* ``{"do": "failures"}``: what the process's health reports.

The injector is a trace function: it needs nothing in aztask, and reaches every thread of Python.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import aztask
from aztask import App, CircuitBreaker, RetryPolicy, chain
from aztask.support import parts

SOCKETS = Path(os.environ["PARTS_SOCKETS"])
PACKAGE = str(Path(aztask.__file__).parent)
SUPERVISION = parts.__file__
"""The supervision itself is what catches errors: it is not interrupted."""

STILL = 0.5
"""In these tests, a step that takes longer than so many seconds stands still."""

armed: dict[str, str] = {}
hits: list[tuple[str, str]] = []


class Injected(Exception):
    """The error that no thread expects."""


def trace(frame: FrameType, event: str, value: object) -> None:
    name = threading.current_thread().name if armed else ""
    if name not in armed or not frame.f_code.co_filename.startswith(PACKAGE):
        return
    caller = frame.f_back
    if frame.f_code.co_filename == SUPERVISION or caller is None:
        return
    if not caller.f_code.co_filename.startswith(PACKAGE):
        return  # a callback of a library: its error would be the library's
    kind = armed.pop(name)
    where = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_code.co_name}"
    hits.append((name, f"{kind} {where}"))
    if kind == "raise":
        raise Injected(where)
    part = parts.part_of(threading.current_thread())
    if between := part is not None and not part._busy:
        part.begin()
    give_up_at = time.monotonic() + 30
    while not (SOCKETS / "go").exists() and time.monotonic() < give_up_at:
        time.sleep(0.05)
    if between:
        part.idle()


def answer(request: dict[str, Any]) -> Any:
    if request["do"] == "list":
        return [
            [each.name, each.native_id, part.name if (part := parts.part_of(each)) else ""]
            for each in threading.enumerate()
        ]
    if request["do"] == "stacks":
        faulthandler.dump_traceback()
        return None
    if request["do"] == "failures":
        return [[each.part, each.reason] for each in parts.failures()]
    if request["do"] == "hits":
        return [list(armed.items()), hits]
    for part in parts.all_parts():
        part.longest = STILL if request["do"] == "block" else parts.LONGEST_STEP
    armed.clear()
    armed.update(dict.fromkeys(request["threads"], request["do"]))
    return None


def serve() -> None:
    path = SOCKETS / str(os.getpid())
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        while True:
            with server.accept()[0] as connection, connection.makefile("rw") as file:
                file.write(json.dumps(answer(json.loads(file.readline()))) + "\n")


threading.Thread(target=serve, name="test-injector", daemon=True).start()
threading.settrace(trace)  # type: ignore[arg-type]
sys.settrace(trace)  # type: ignore[arg-type]

app = App(
    "parts",
    broker=os.environ["LEDGER_BROKER"],
    results=os.environ["LEDGER_RESULTS"],
    retry=RetryPolicy(max_retries=20, delay=0.2, backoff=1.0, jitter=False),
    lease=20,
)
app.limit("wide", rate="1000/s")
app.limit("few", concurrency=50)
if os.environ.get("PARTS_SESSIONS"):
    app.queue("ordered", sessions=True, lease=20)

    @app.task(queue="ordered")
    def in_session(number: int) -> int:
        return number


@app.task(breaker=CircuitBreaker(share=0.99, minimum=1000))
def plain(number: int) -> int:
    return number


@app.task
async def coroutine(number: int) -> int:
    await asyncio.sleep(0)
    return number


@app.task(limits=["wide", "few"])
def limited(number: int) -> int:
    return number


@app.task(unique="arguments", until="finished", on_conflict="return")
def unique(number: int) -> int:
    return number


@app.task
def large(number: int) -> bytes:
    """Its value is stored apart."""
    return bytes(100_000 + number)


@app.task
def measured(value: bytes) -> int:
    return len(value) - 100_000


@app.task
def flow(number: int) -> int:
    """Starts a workflow: its first member's value is an argument of the second."""
    chain(large.s(number), measured.s()).delay(workflow_id=f"flow-{number}")
    return number


@app.task
def add(first: int, second: int) -> int:
    return first + second


@app.task
def occurrence() -> None:
    return None


app.schedule("often", occurrence.s(), every=1)
