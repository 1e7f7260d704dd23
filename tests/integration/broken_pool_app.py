"""Tasks that break the pool process which runs them."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

from aztask import App, RetryPolicy

app = App(
    "broken",
    broker=os.environ.get("LEDGER_BROKER", "local://"),
    results=os.environ.get("LEDGER_RESULTS", "local://"),
    retry=RetryPolicy(max_retries=0),
)


@app.task
def closes() -> None:
    os.closerange(3, 500)


@app.task
async def closes_on_the_loop() -> None:
    os.closerange(3, 500)


@app.task
def traced() -> int:
    def trace(frame: FrameType, event: str, value: object) -> Any:
        return trace

    sys.settrace(trace)
    return 1


@app.task
def plain(number: int) -> int:
    return number
