"""The app of these tests, imported by a Python of Windows."""

import asyncio
import ctypes
import os
import sys
from pathlib import Path

from aztask import App, Context

app = App("shop")


@app.task
def add(a: int, b: int) -> int:
    return a + b


@app.task
def hold(seconds: float) -> None:
    """Be in one call of C all the time, which keeps the interpreter's lock."""
    ctypes.PyDLL("kernel32").Sleep(int(1000 * seconds))


@app.task
def die_once(mark: str) -> str:
    """End this process at the first run."""
    path = Path(mark)
    if path.exists():
        return "again"
    path.touch()
    os.kill(os.getpid(), 9)
    return "still there"


@app.task_with_context
async def order(context: Context, mode: str) -> str:
    """Wait for a signal; in mode "connects", `steps --check` sees it call out between two steps."""
    charge = context.step("charge", len, mode)
    if mode == "connects" and "aztask.operate.stepcheck" in sys.orig_argv:
        await asyncio.open_connection("127.0.0.1", 9)
    context.wait_for("approved")
    return str(charge)
