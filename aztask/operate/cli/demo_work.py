"""The work of ``aztask demo``: examine one file.

The worker runs it as a task. The demo computes the same directly and compares.
"""

from __future__ import annotations

import os
import stat
import symtable
import warnings
from collections.abc import Iterator
from hashlib import blake2b, sha256
from typing import Any

from aztask.app import App
from aztask.context import Context
from aztask.retry import RetryPolicy
from aztask.task import Task

APP = "aztask.operate.cli.demo_tasks:app"
QUEUE = "demo"
FAIL_ONE_IN = 20
RETRY = RetryPolicy(max_retries=3, delay=0.4, backoff=1.0)
SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages"})
"""Not part of the standard library, or written by Python while the demo runs."""

Name = str | bytes
Facts = dict[str, Any]


class FirstTryFails(Exception):
    """Raised on purpose by the first run of some tasks, to show their retries."""


def register(app: App) -> Task[[Name, Name], Facts]:
    """Add the demo's task to `app`."""

    @app.task_with_context(name="demo.examine", queue=QUEUE, retry=RETRY)
    def examine(context: Context, root: Name, name: Name) -> Facts:
        """Size, lines, SHA-256 and names of one file."""
        if context.resubmit_count == 0 and fails_first(name):
            raise FirstTryFails("on purpose: the next run succeeds")
        return facts(root, name)

    return examine


def fails_first(name: Name) -> bool:
    """Whether the first run fails: about one in twenty does, depending on the name only."""
    digest = blake2b(os.fsencode(name), digest_size=4).digest()
    return int.from_bytes(digest, "big") % FAIL_ONE_IN == 0


def facts(root: Name, name: Name) -> Facts:
    """The facts about one file; ``{"error": ...}`` if it cannot be read."""
    path = os.path.join(os.fsencode(root), os.fsencode(name))  # noqa: PTH118  # names are bytes
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
            return {"error": "not a regular file"}
        with open(path, "rb") as stream:  # noqa: PTH123
            data = stream.read()
    except OSError as error:
        return {"error": type(error).__name__}
    found: Facts = {
        "size": len(data),
        "lines": data.count(b"\n"),
        "sha256": sha256(data).hexdigest(),
    }
    if path.endswith(b".py"):
        found["names"] = count_names(data)
    return found


def count_names(source: bytes) -> int | None:
    """The number of names at the top level of a Python file; None if it does not compile."""
    code: Any = source  # bytes are allowed, and decoded as the file itself says
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return len(symtable.symtable(code, "demo", "exec").get_identifiers())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def files_under(root: str) -> Iterator[str]:
    """The names of the files under `root`, relative to it, sorted; pipes and devices skipped."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in sorted(names):
            path = os.path.join(folder, name)  # noqa: PTH118  # os.walk's own kind of path
            if _may_be_read(path):
                yield os.path.relpath(path, root)


def portable(name: str) -> Name:
    """A file name that a message can hold: as bytes if it is not valid text."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return os.fsencode(name)
    return name


def _may_be_read(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116
    except OSError:
        return True  # the worker and the demo will both report why not
