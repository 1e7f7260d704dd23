"""Runs pytest in forked processes of this one, which has imported the libraries but not aztask.

A fork costs milliseconds, where a new interpreter would import the SDKs again for every mutant.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest

LIBRARIES = (
    *("pytest", "hypothesis", "hypothesis.stateful", "coverage", "msgpack", "click.testing"),
    *("kombu", "kombu.transport.virtual", "azure.servicebus", "azure.servicebus.management"),
    *("azure.storage.queue", "azure.data.tables", "azure.storage.blob", "azure.identity"),
    *("asyncio", "sqlite3", "multiprocessing.connection", "xml.etree.ElementTree"),
)
MEMORY = 6 * 2**30
"""Bytes of address space: a mutant that allocates without end fails alone."""


@dataclass
class Run:
    """A forked process. code: its exit code, None while it runs; -9 after it was killed."""

    pid: int
    output: Path
    until: float
    code: int | None = None
    slow: bool = field(default=False)

    def text(self) -> str:
        """What it wrote."""
        return self.output.read_text(encoding="utf-8", errors="replace")


def warm_up() -> None:
    """Import what every process needs, and pytest's plugins."""
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        silent = Path(folder, "out")
        run = start(lambda: pytest.main(["--version"]), silent, 60.0)
        list(finished([run]))
    assert not any(name.partition(".")[0] == "aztask" for name in sys.modules)


def start(work: Callable[[], int], output: Path, seconds: float) -> Run:
    """Fork; the child does `work`, writes into `output` and exits with what `work` returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_child(work, output)
    return Run(pid, output, time.monotonic() + seconds)


def _be_child(work: Callable[[], int], output: Path) -> NoReturn:
    code = 99
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for target in (1, 2):
            os.dup2(handle, target)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = int(work())
    except BaseException:  # noqa: BLE001  # whatever it is, the parent must learn of it
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def finished(runs: Iterable[Run]) -> Iterator[Run]:
    """Each run as it ends. One that is too slow is killed with all that it started."""
    running = list(runs)
    while running:
        for run in list(running):
            if poll(run):
                running.remove(run)
                yield run
        time.sleep(0.01)


def poll(run: Run) -> bool:
    """Whether it has ended."""
    pid, status = os.waitpid(run.pid, os.WNOHANG)
    if pid == 0 and time.monotonic() < run.until:
        return False
    if pid == 0:
        run.slow = True
        _kill_group(run.pid)
        _, status = os.waitpid(run.pid, 0)
    _kill_group(run.pid)  # what its tests started, and a failure left behind
    run.code = os.waitstatus_to_exitcode(status)
    return True


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
