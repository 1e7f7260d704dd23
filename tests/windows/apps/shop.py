"""The app of these tests, imported by a Python of Windows."""

import ctypes
import os
from pathlib import Path

from aztask import App

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
