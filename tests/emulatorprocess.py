"""An emulator in a process of its own, started as the command line starts it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def start(*arguments: str, **environment: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """The process and its first line of JSON."""
    ports = () if "--port" in arguments else ("--port", "0")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "aztask",
            "emulator",
            *ports,
            "--admin-port",
            "0",
            "--json",
            *arguments,
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), **environment},
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the emulator ended with {process.wait()}"
    return process, json.loads(line)


def stop(process: subprocess.Popen[str]) -> int:
    """Ask it to stop; its exit code."""
    process.terminate()
    code = process.wait(20)
    if process.stdout:
        process.stdout.close()
    return code


def kill(process: subprocess.Popen[str]) -> None:
    """As kill -9 does."""
    process.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()


@contextlib.contextmanager
def running(*arguments: str, **environment: str) -> Iterator[dict[str, Any]]:
    """A process for the block; what it said when it was ready."""
    process, ready = start(*arguments, **environment)
    try:
        yield ready
    finally:
        stop(process)
