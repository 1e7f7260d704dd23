"""The app that `coroutines.py` measures."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx

from aztask import App

app = App("bench", broker=os.environ["BENCH_BROKER"], results=os.environ["BENCH_BROKER"])
# For every request httpx looks at each idle connection: more of them make it slower. The client is
# made when the module is imported: a process of a pool gets it ready, for reading the certificates
# takes longer than all else that such a process does before its first task.
limits = httpx.Limits(max_connections=200, max_keepalive_connections=20)
client = httpx.AsyncClient(limits=limits, timeout=60.0)


@app.lifespan
async def http() -> AsyncIterator[None]:
    """One client for all tasks of the process."""
    async with client:
        with suppress(httpx.ConnectError):
            await client.get("http://127.0.0.1:1/")  # imports what httpx imports at its first call
        yield


@app.task
async def nap(seconds: float) -> None:
    """Sleep without blocking the loop."""
    await asyncio.sleep(seconds)


@app.task
async def block(seconds: float) -> None:
    """Sleep and block the loop."""
    time.sleep(seconds)


@app.task
async def get(url: str) -> int:
    """Make one call through the shared client."""
    return (await client.get(url)).status_code
