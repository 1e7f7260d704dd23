"""Which systems can run a worker: those with the calls of the Linux kernel that it needs.

Every module of `aztask.worker` can be imported anywhere, so that ``aztask worker --help`` and the
line below work on macOS and Windows.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
from typing import Any, Final

from aztask.errors import ConfigurationError

NEEDED: Final[tuple[tuple[Any, str], ...]] = (
    (os, "fork"),
    (os, "eventfd"),
    (os, "memfd_create"),
    (os, "pidfd_open"),
    (signal, "pidfd_send_signal"),
    (socket, "SOCK_SEQPACKET"),
    (socket, "send_fds"),
)
"""Modules, and what the worker uses of each that only Linux has."""


def require_linux(what: str) -> None:
    """Raise ConfigurationError if no worker can run on this system.

    * `what`: the command that needs a worker, for the error.
    """
    missing = [f"{module.__name__}.{name}" for module, name in NEEDED if not hasattr(module, name)]
    if not missing:
        return
    if platform.system() == "Linux":
        raise ConfigurationError(
            f"{what} needs {missing[0]}, which this build of Python lacks; use another build, such "
            "as your distribution's or the image python:3.13-slim"
        )
    raise ConfigurationError(
        f"{what} needs Linux: run it in Docker or in WSL. Sending tasks, reading results and the "
        "other commands work here"
    )
