"""The app of the drains under load: fast, slow, careful and stubborn tasks, and slow closings."""

import asyncio
import os
import time
from pathlib import Path

from aztask import App, RetryPolicy, WorkerStopping

HERE = Path(__file__).parent
RESULTS = f"local:///{HERE}/results.db"
app = App(
    "drain",
    broker=os.environ["DRAIN_BROKER"],
    results=RESULTS,
    retry=RetryPolicy(max_retries=0),
    max_deliveries=1000,
)
if lease := os.environ.get("DRAIN_LEASE"):
    app.queue("default", lease=float(lease))


def note(kind, key):
    with (HERE / "notes").open("a") as notes:
        notes.write(f"{kind} {key} {os.getpid()}\n")


@app.lifespan
def client():
    yield
    note("closing", "-")
    time.sleep(float(os.environ["DRAIN_CLOSING"]))
    note("closed", "-")


@app.task
def work(key, seconds, *, stubborn=False):
    note("started", key)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            time.sleep(min(0.05, max(0.0, end - time.monotonic())))
        except WorkerStopping:
            note("told", key)
            if not stubborn:
                raise
    note("done", key)
    return key


@app.task
async def wait(key, seconds):
    note("started", key)
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        note("told", key)
        raise
    note("done", key)
    return key
