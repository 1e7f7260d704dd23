"""The tasks of the integration tests. Every run leaves lines in a ledger file.

A line is ``EVENT KEY PID TIME``: written with one O_APPEND write, it survives the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from aztask import (
    App,
    Context,
    Reject,
    Retry,
    RetryPolicy,
    Secret,
    Snooze,
    WaitTimeout,
    current_context,
)
from aztask.hooks import WorkerInfo
from aztask.stores.events import Event
from aztask.worker import pausing
from aztask.worker.upkeep import controlwatch, heartbeat, housekeeping
from aztask.workflows import repair, starting

QUICK = RetryPolicy(max_retries=3, delay=0.05, backoff=1.0, jitter=False, max_snoozes=5)

app = App(
    "ledger",
    broker=os.environ.get("LEDGER_BROKER", "local://"),
    results=os.environ.get("LEDGER_RESULTS", "local://"),
    retry=QUICK,
    unknown_task_grace=float(os.environ.get("LEDGER_GRACE", "300")),
    max_deliveries=int(os.environ.get("LEDGER_MAX_DELIVERIES", "10")),
    retry_strategy=os.environ.get("LEDGER_STRATEGY", "resubmit"),
    max_held=int(os.environ.get("LEDGER_MAX_HELD", "1000")),
    **json.loads(os.environ.get("LEDGER_OPTIONS", "{}")),
)


def note(event: str, key: str) -> None:
    line = f"{event} {key} {os.getpid()} {time.time():.6f}\n".encode()
    fd = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)


@app.task
def work(key: str, seconds: float = 0.0) -> str:
    note("start", key)
    if seconds:
        time.sleep(seconds)
    note("end", key)
    return key


def acted(key: str, step: str) -> str:
    """What a step does: it notes the action with the key that a service would get."""
    context = current_context()
    assert context is not None and context.step_key is not None
    note(f"step-{step}", context.step_key)
    return f"{key}-{step}"


@app.task_with_context
def five_steps(context: Context, key: str) -> list[str]:
    return [
        context.step(name, acted, key, name) for name in ("one", "two", "three", "four", "five")
    ]


@app.task_with_context
def sleeper(context: Context, key: str, seconds: float) -> list[str]:
    """Three actions with a sleep between each two."""
    note("start", key)
    made = []
    for name in ("one", "two", "three"):
        if made:
            context.sleep(seconds)
        made.append(context.step(name, acted, key, name))
    return made


@app.task_with_context
def approval(context: Context, key: str, timeout: float, waits: int = 1) -> list[object]:
    """An action, waits for signals, and another action that depends on what they gave."""
    note("start", key)
    context.step("one", acted, key, "one")
    found: list[object] = []
    for _ in range(waits):
        try:
            found.append(context.wait_for("approved", timeout=timeout))
        except WaitTimeout:
            found.append("late")
    context.step("two", acted, key, "two")
    return found


@app.task_with_context
def long_flow(context: Context, key: str) -> list[object]:
    """Five steps, two waits and one child."""
    note("start", key)
    made: list[object] = [context.step("one", acted, key, "one")]
    made.append(context.wait_for("first", timeout=600))
    made.append(context.step("two", acted, key, "two"))
    made.append(context.call(work, f"{key}-child"))
    made.append(context.step("three", acted, key, "three"))
    made.append(context.wait_for("second", timeout=600))
    made += [context.step(name, acted, key, name) for name in ("four", "five")]
    return made


@app.task_with_context
def rounds(context: Context, key: str, left: int, made: list[str]) -> list[str]:
    """An action in each round, and each round in a history of its own."""
    note("start", key)
    made = [*made, context.step("act", acted, key, f"round-{left}")]
    if left > 1:
        context.continue_with(key, left - 1, made)
    return made


@app.task
def waits_once(key: str) -> str:
    """The first run never ends."""
    note("start", key)
    first = Path(os.environ["LEDGER"]).read_text().count(f"start {key} ") == 1
    while first:
        time.sleep(0.1)
    return key


@app.task
def gather(values: object, key: str) -> object:
    """The body of a chord: returns what it got."""
    note("start", key)
    note("end", key)
    return values


@app.task
def kinds(values: list[object]) -> list[object]:
    """Each value, or the name of the error in its place."""
    return [type(each).__name__ if isinstance(each, Exception) else each for each in values]


@app.task(retry=RetryPolicy(max_retries=0))
def fail_unless(key: str, path: str) -> str:
    """Fail until a file exists, so that a replay succeeds."""
    note("start", key)
    if not Path(path).exists():
        raise ValueError(f"{key} has no file yet")
    note("end", key)
    return key


@app.task
def noop() -> None:
    return None


@app.task_with_context
def flaky(context: Context, key: str, failures: int) -> int:
    note("start", key)
    if context.resubmit_count < failures:
        raise ValueError(f"failure {context.resubmit_count} of {key}")
    note("end", key)
    return context.resubmit_count


@app.task_with_context
def snoozing(context: Context, key: str, times: int, delay: float = 0.05) -> int:
    note("start", key)
    if context.message.snooze_count < times:
        raise Snooze(delay)
    note("end", key)
    return context.message.snooze_count


@app.task
def rejecting(key: str, reason: str) -> None:
    note("start", key)
    raise Reject(reason)


@app.task_with_context
def retry_later(context: Context, key: str, delay: float) -> float:
    note("start", key)
    if context.resubmit_count == 0:
        raise Retry(delay)
    return time.time()


@app.task_with_context
def fails_late(context: Context, key: str, seconds: float, delay: float) -> None:
    note("start", key)
    time.sleep(seconds)
    if context.resubmit_count == 0:
        raise Retry(delay)


@app.task_with_context(retry=RetryPolicy(max_retries=3, delay=0.05, jitter=False))
def chunks(context: Context, key: str, total: int, die_at: int | None = None) -> list[int]:
    done = list(context.saved or [])
    for chunk in range(len(done), total):
        note(f"chunk{chunk}", key)
        if chunk == die_at and context.resubmit_count == 0:
            os._exit(9)
        done.append(chunk)
        context.checkpoint(done)
    return done


@app.task(retry=RetryPolicy(max_retries=1, delay=0.05, jitter=False))
def ending(key: str, how: str) -> str:
    note("start", key)
    if how == "segfault":
        ctypes.string_at(0)
    elif how == "_exit":
        os._exit(3)
    elif how == "SystemExit":
        sys.exit("leaving")
    elif how == "KeyboardInterrupt":
        raise KeyboardInterrupt
    elif how == "MemoryError":
        _ = bytearray(1 << 60)
    elif how == "recursion":
        return ending.function(key, how)
    elif how == "unserialisable":
        return object()  # type: ignore[return-value]
    return how


@app.task_with_context(retry=RetryPolicy(max_retries=0))
def attacked(context: Context, *args: object, **kwargs: object) -> None:
    """What hostile messages run if they run anything: any arguments do."""
    note("attacked", ascii(context.task_id).replace(" ", "_"))
    raise Reject("it ran")


@app.task(retry=RetryPolicy(max_retries=0))
def silent(secret: str, how: str = "", reversed_text: str = "") -> str | None:
    """Take a secret, and show it or not."""
    if how == "fails":
        raise ValueError("the card was refused")
    if how == "quotes":
        raise ValueError(f"the card {secret} was refused")
    return reversed_text[::-1] if how == "returns" else None


@app.task(retry=RetryPolicy(max_retries=1, delay=0.05, jitter=False))
def private(secret: Annotated[str, Secret], how: str = "") -> str:
    """Take an argument that is marked as secret, log it, and quote it in an error."""
    logging.getLogger("ledger").warning("charging %s", secret)
    if how == "rejects":
        raise Reject(f"no {secret}", f"the card {secret} was refused")
    raise ValueError(f"the card {secret} was refused")


@app.task(retry=RetryPolicy(max_retries=1, delay=0.05, jitter=False))
def hostile(key: str, how: str) -> str:
    """End with a value that is hard to write, or from a process that is not the task's own."""
    note("start", key)
    note("end", key)
    if how == "surrogate":
        raise ValueError("a\udc80b")
    if how == "nul":
        raise ValueError("a\0b")
    if how == "reject":
        raise Reject("reason \udc80", "description \udfff\0")
    if how == "text":
        raise Unprintable
    if how == "exits":
        raise Exiting
    if how == "giant":
        raise ValueError("x" * 50_000_000)
    if how == "key":
        return {(1, 2): 3}  # type: ignore[return-value]
    if how == "huge":
        raise ValueError("\udc80" * 100_000)
    child = os.fork()
    if child == 0:
        if how == "fork-raise":
            raise ValueError("in the child")
        if how == "fork-exit":
            sys.exit(7)
        return "from the child"
    _, status = os.waitpid(child, 0)
    return str(os.waitstatus_to_exitcode(status))


class Unprintable(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text\udc80")


class Exiting(Exception):
    """An error whose text ends the program."""

    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


@app.task_with_context(retry=RetryPolicy(max_retries=1, delay=0.05, jitter=False))
def saves(context: Context, key: str, size: int) -> int:
    """Store a checkpoint of `size` bytes, then fail once."""
    note("start", key)
    if context.saved is not None:
        return len(context.saved)
    context.checkpoint(b"x" * size)
    raise ValueError("once")


@app.task
def hold_gil(key: str, seconds: float, how: str) -> str:
    """Keep the GIL for `seconds`.

    * `how`: "re" and "sleep" take as long on a busy machine, "sleep" without using a processor.
      "pow" is calls that no signal ends; the last one may take a multiple of `seconds`.
    """
    note("start", key)
    began = time.monotonic()
    if how == "re":
        size = 18
        while time.monotonic() - began < seconds:
            re.match(r"(a+)+$", "a" * size + "b")
            size = min(size + 1, 25)  # a second on a quiet machine
    elif how == "sleep":
        while (left := seconds - (time.monotonic() - began)) > 0:
            ctypes.PyDLL(None).usleep(int(min(left, 60.0) * 1e6))
    else:
        bits = 20_000
        while time.monotonic() - began < seconds:
            pow(3, (1 << bits) - 1, (1 << bits) - 3)
            bits = int(bits * 1.4)
    note("end", key)
    return key


@app.task(time_limit=1.0, retry=RetryPolicy(max_retries=1, delay=0.05, jitter=False))
def endless(key: str) -> None:
    note("start", key)
    while True:
        pass


@app.task(soft_time_limit=0.5, retry=RetryPolicy(max_retries=0))
def soft(key: str) -> str:
    note("start", key)
    try:
        while True:
            time.sleep(0.05)
    finally:
        note("cleanup", key)


@app.task(max_lease=2.5, lease=1.0, retry=RetryPolicy(max_retries=1, delay=0.05))
def too_long(key: str) -> str:
    note("start", key)
    try:
        for _ in range(400):
            time.sleep(0.05)
    finally:
        note("stopped", key)
    return "never"


@app.task
def steps(key: str, seconds: float) -> str:
    note("start", key)
    give_up_at = time.monotonic() + seconds
    try:
        while time.monotonic() < give_up_at:
            time.sleep(0.02)
    finally:
        note("stopped", key)
    return key


@app.task(name="ledger.stubborn-too-long", max_lease=3.0, lease=1.0, retry=RetryPolicy(0))
def stubborn_too_long(key: str) -> str:
    return stubborn.function(key, 20.0)


@app.task
def stubborn(key: str, seconds: float) -> str:
    """Go on for `seconds`, whatever is raised in it."""
    note("start", key)
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at:
        with contextlib.suppress(BaseException):
            time.sleep(0.02)
            note("tick", key)
    return key


@app.task_with_context
def fenced(context: Context, key: str, seconds: float) -> str:
    note("start", key)
    time.sleep(seconds)
    context.lease.ensure()
    note("effect", key)
    return key


@app.task_with_context
def extending(context: Context, key: str) -> float:
    context.lease.extend(20.0)
    return context.lease.remaining_seconds


@app.task(delivery="at-most-once")
def once(key: str, seconds: float = 0.0) -> str:
    note("start", key)
    time.sleep(seconds)
    note("end", key)
    return key


@app.task
async def awaiting(key: str) -> str:
    note("start", key)
    await asyncio.sleep(0.01)
    return key


@app.task
def big(size: int) -> bytes:
    return b"x" * size


@app.task
def weigh(key: str, data: bytes) -> int:
    """Take a large argument."""
    note("start", key)
    note("end", key)
    return len(data)


@app.task
async def weigh_later(key: str, data: bytes) -> int:
    note("start", key)
    return len(data)


@app.task(retry=RetryPolicy(max_retries=0))
def weigh_if(key: str, path: str, data: bytes) -> int:
    """Fail until a file exists, so that a replay succeeds."""
    note("start", key)
    if not Path(path).exists():
        raise ValueError(f"{key} has no file yet")
    note("end", key)
    return len(data)


@app.task
def double(key: str, data: bytes) -> bytes:
    """Take a large argument and return a large result."""
    note("start", key)
    note("end", key)
    return data + data


@app.task
def echo(value: object) -> object:
    return value


SEEN: contextvars.ContextVar[str] = contextvars.ContextVar("seen", default="")


@app.task
def set_variable(value: str) -> str:
    """Set a context variable, and return its former value."""
    before = SEEN.get()
    SEEN.set(value)
    return before


if os.environ.get("LEDGER_GRAPH_SECONDS"):  # the times of housekeeping, shorter for tests
    seconds = float(os.environ["LEDGER_GRAPH_SECONDS"])
    for module in (starting, repair):
        module.LEASE_SECONDS = seconds  # type: ignore[misc]
    for name in ("EMPTY_SECONDS", "SWEEP_SECONDS", "ROOTLESS_SECONDS"):
        setattr(repair, name, seconds)
    housekeeping.GRAPH_SECONDS = housekeeping.REMOTE_GRAPH_SECONDS = seconds / 2
    housekeeping.IDLE_GRAPH_SECONDS = housekeeping.DEAD_SECONDS = seconds / 2
    heartbeat.SILENT_SECONDS = seconds + housekeeping.HEARTBEAT_SECONDS  # type: ignore[misc]

if os.environ.get("LEDGER_HOOKS"):
    TENANT: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="none")

    @app.around_worker
    def worker_hook(worker: WorkerInfo) -> Iterator[None]:
        note("worker-begins", worker.queues[0])
        yield
        note("worker-ends", worker.queues[0])

    @app.around_process
    def process_hook(process: WorkerInfo) -> Iterator[None]:
        note("process-begins", process.name.partition("-")[0])
        yield
        note("process-ends", process.name.partition("-")[0])

    @app.around_run
    def tenant_hook(context: Context) -> Iterator[None]:
        if context.message.extra.get("tenant") == "banned":
            raise PermissionError("this tenant may not run anything")
        token = TENANT.set(str(context.message.extra.get("tenant", "none")))
        note("run-begins", context.task_id)
        try:
            yield
        except ValueError:
            note("run-failed", context.task_id)
            raise
        finally:
            note("run-ends", context.task_id)
            TENANT.reset(token)

    @app.on_event
    def listen(event: Event) -> None:
        if event.event in ("succeeded", "failed", "resubmitted"):
            note(f"heard-{event.event}", event.task_id)

    @app.task
    def tenant(key: str) -> str:
        return TENANT.get()

    @app.task
    async def tenant_later(key: str) -> str:
        await asyncio.sleep(0)
        return TENANT.get()


# the same tasks under each of these strategies, for the tests of the strategies
for strategy in filter(None, os.environ.get("LEDGER_STRATEGIES", "").split(",")):
    for each in (flaky, snoozing, retry_later):
        named = app.task_with_context(name=f"{each.name}-{strategy}", retry_strategy=strategy)
        named(each.function)

if "LEDGER_PAUSE" in os.environ:  # pauses are read often and put-offs come back soon
    controlwatch.READ_SECONDS = float(os.environ["LEDGER_PAUSE"])  # type: ignore[misc]
    pausing.FIRST_DELAY = pausing.LONGEST_DELAY = float(os.environ["LEDGER_PAUSE"])  # type: ignore[misc]
