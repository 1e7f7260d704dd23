"""Going on as another command: a reload, and Django's command that becomes a worker.

Unix puts the new program into the same process. On Windows the functions of that name start another
process and end the first one, so that a terminal or a service manager believes that the worker has
ended. There the command runs as a child instead, and rules hold:
1. The first process waits for the child and ends with its exit code.
2. A child that wants to begin anew says so by its exit code (`AGAIN`), and the first process starts
   it again: the processes do not pile up.
3. The child ends with the first process (`aztask.worker.pool.watcher`). Ctrl-C reaches both; the
   child alone decides what it means.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Final, NoReturn

from aztask.worker.platform import HAS_GROUPS
from aztask.worker.pool.watcher import WatchingProcess, start_python
from aztask.worker.stopsignals import DRAIN, handle

CHILD: Final = "AZTASK_CHILD"
"""Set for the child of a process that waits for it."""

AGAIN: Final = 75
"""The exit code of a child that is to be started again (EX_TEMPFAIL of sysexits.h)."""

LOOK_SECONDS: Final = 0.2
"""A handler of a signal runs only between two waits, on Windows."""


def become(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> NoReturn:
    """Go on as this interpreter with these arguments. Nothing of this process is used afterwards.

    environment: by default the one of this process.
    """
    given = os.environ if environment is None else environment
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if HAS_GROUPS:
        command = [sys.executable, *arguments]
        os.execve(sys.executable, command, dict(given))  # noqa: S606  # without a shell
    elif CHILD in os.environ:
        sys.exit(AGAIN)
    else:
        sys.exit(_code_of_child(arguments, {**given, CHILD: "1"}))


def _code_of_child(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command until it does not ask to be started again; its exit code."""
    handle(_nothing, *DRAIN)
    watching = WatchingProcess()
    code = AGAIN
    while code == AGAIN:
        child = start_python(arguments, environment=environment)
        watching.watch(child)
        code = _wait(child)
        watching.forget(child.pid)
    watching.close()
    return code


def _wait(child: subprocess.Popen[bytes]) -> int:
    while True:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(LOOK_SECONDS)


def _nothing(signum: int, frame: FrameType | None) -> None:
    """A handler, because a child would inherit that a signal is ignored."""
