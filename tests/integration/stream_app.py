"""Tasks that emit, for the integration tests. They write the ledger of `ledger_app`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from ledger_app import app, note

from aztask import Context, RetryPolicy

__all__ = ["app", "count", "emit_at_first", "fail_once", "pause_and_count"]


@app.task(name="stream.count")
def count(key: str, parts: int, pause: float) -> Iterator[str]:
    note("start", key)
    for number in range(1, parts + 1):
        yield f"{os.getpid()}-{number}"
        time.sleep(pause)
    note("end", key)
    return key


@app.task_with_context(name="stream.pause_and_count")
def pause_and_count(context: Context, key: str) -> str:
    note("start", key)
    context.emit("one")
    context.emit("two")
    context.sleep(0.5)
    for number in range(20):
        context.emit(f"{number}")
        time.sleep(0.1)
    return key


@app.task_with_context(
    name="stream.fail_once", retry=RetryPolicy(max_retries=1, delay=0.3, jitter=False)
)
def fail_once(context: Context, key: str, pause: float) -> str:
    """Its first attempt behind the pause fails, once readers have seen its second part."""
    context.emit("one")
    if pause:
        context.sleep(pause)
    context.emit("two")
    if not context.resubmit_count:
        time.sleep(1.5)
        raise OSError("the model is away")
    context.emit("three")
    return key


@app.task_with_context(name="stream.emit_at_first")
def emit_at_first(context: Context, key: str) -> str:
    """Its first start emits, and does not end by itself; the next one emits nothing."""
    note("start", key)
    if Path(os.environ["LEDGER"]).read_text().count(f"start {key} ") > 1:
        return key
    for number in range(1000):
        context.emit(f"{os.getpid()}-{number + 1}")
        time.sleep(0.1)
    return key
