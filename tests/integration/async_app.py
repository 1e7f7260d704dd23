"""The `async def` tasks of the integration tests, with a client that belongs to its event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar

import httpx
from ledger_app import app, note

from aztask import Context, RetryPolicy, current_context

client: httpx.AsyncClient | None = None


@app.lifespan
async def http() -> AsyncIterator[None]:
    global client
    # httpx keeps as many idle connections as you allow and looks at each of them for every request.
    limits = httpx.Limits(max_connections=200, max_keepalive_connections=20)
    async with httpx.AsyncClient(limits=limits, timeout=60.0) as client:
        note("lifespan-opens", "async")
        yield
    note("lifespan-closes", "async")


@app.lifespan
def plain() -> Iterator[None]:
    note("lifespan-opens", "plain")
    yield
    note("lifespan-closes", "plain")


IN_ASYNC: ContextVar[str] = ContextVar("in-async", default="none")
IN_PLAIN: ContextVar[str] = ContextVar("in-plain", default="none")


@app.lifespan
async def variables() -> AsyncIterator[None]:
    IN_ASYNC.set("async")
    yield


@app.lifespan
def plain_variables() -> Iterator[None]:
    IN_PLAIN.set("plain")
    yield


@app.task
async def seen_later(key: str) -> list[str]:
    found = [IN_ASYNC.get(), IN_PLAIN.get()]
    IN_ASYNC.set("a task's own")
    return found


@app.task
def seen(key: str) -> list[str]:
    found = [IN_ASYNC.get(), IN_PLAIN.get()]
    IN_PLAIN.set("a task's own")
    return found


@app.task
async def fetch(key: str, url: str) -> str:
    assert client is not None
    response = await client.get(url)
    return f"{key} {response.text} {id(asyncio.get_running_loop())}"


@app.task
async def nap(key: str, seconds: float) -> str:
    note("start", key)
    assert current_context().task_id == key
    await asyncio.sleep(seconds)
    assert current_context().task_id == key
    note("end", key)
    return key


@app.task
async def block(key: str, seconds: float) -> str:
    note("start", key)
    time.sleep(seconds)
    note("end", key)
    return key


@app.task(soft_time_limit=0.5, retry=RetryPolicy(max_retries=0))
async def soft_later(key: str, how: str) -> None:
    try:
        if how == "await":
            await asyncio.sleep(60)
        else:
            time.sleep(60)
    finally:
        note("cleanup", key)


@app.task
async def group(key: str) -> None:
    note("start", key)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(60))
            group.create_task(asyncio.sleep(60))
    except BaseException as error:
        note(type(error).__name__, key)
        raise


@app.task(time_limit=1.0, retry=RetryPolicy(max_retries=0))
async def ignores(key: str) -> None:
    while True:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            note("ignored", key)


@app.task_with_context
async def saves_later(context: Context, key: str) -> list[object]:
    before = context.saved
    if before is None:
        await context.acheckpoint({"page": 7})
        raise ValueError("once")
    await context.lease.aextend(20.0)
    return [before, context.lease.remaining_seconds > 15.0]


@app.task
def plain_pid(key: str) -> int:
    return os.getpid()
