"""Inspects local queues, and the file system that holds their file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from aztask.errors import QueueNotFound
from aztask.queues.base import Permission, QueueFacts
from aztask.queues.engine import IN_MEMORY, Engine
from aztask.queues.engine.filesystem import MOUNTINFO, file_bytes, file_system
from aztask.queues.local.kind import KIND
from aztask.support.display import byte_text
from aztask.support.finding import Finding, fine, warning

FULL: Final = 2
"""SQLite's value of ``synchronous`` for a sync after every commit."""

LEAST_ROOM: Final = 256 * 1024 * 1024
MIB: Final = 1024 * 1024
PLACE: Final = "file"


class LocalInspector:
    """Inspects the queues of the file. A missing queue is no problem: it is created on use."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def facts(self, queue: str) -> QueueFacts:
        """The queue's settings. A lease is set by the receiver, not by the queue.

        Raises InvalidQueueName.
        """
        KIND.check_name(queue)
        try:
            known = self._engine.queue(queue)
        except QueueNotFound:
            return QueueFacts(queue, exists=False, made_on_use=True)
        return QueueFacts(
            queue,
            exists=True,
            made_on_use=True,
            duplicate_window=known.duplicate_window,
            sessions=known.sessions,
            max_deliveries=known.max_deliveries,
            dead_letters=True,
            active=True,
        )

    def rights(self, queue: str) -> list[Permission]:
        """Always granted: a process that opened the file may read and write it."""
        return [Permission("read and write")]

    def clock_offset(self, queue: str) -> float | None:
        """Always None: the queue uses this machine's clock."""
        return None

    def surroundings(self) -> list[Finding]:
        """The file system, its free space, and what an accepted message survives."""
        path = self._engine.database.path
        if path == IN_MEMORY:
            return [
                warning(
                    "broker",
                    PLACE,
                    "the queues are in the memory of one process, so no worker can reach them",
                    "give the app a file, for example local://",
                )
            ]
        return [_placed(path), _sized(path), _room(path), self._durability()]

    def _durability(self) -> Finding:
        with self._engine.database.read() as connection:
            (mode,) = connection.execute("PRAGMA synchronous").fetchone()
        if mode == FULL:
            return fine("broker", "durability", "accepted messages survive a loss of power")
        return fine(
            "broker",
            "durability",
            "accepted messages survive the death of every process; a loss of power may lose the "
            "last moments (?durable=full protects against that too)",
        )


def _placed(path: str) -> Finding:
    kind = ""
    directory = str(Path(path).parent)
    if MOUNTINFO.exists():
        with MOUNTINFO.open(encoding="utf-8", errors="surrogateescape") as lines:
            kind = file_system(directory, lines)
    where = f"{path} is on a file system of type {kind}" if kind else f"the file is {path}"
    if not os.access(path, os.W_OK):
        return warning(
            "broker",
            PLACE,
            f"{where} and cannot be written by this user",
            "check its owner and permissions",
        )
    return fine("broker", PLACE, where)


def _sized(path: str) -> Finding:
    return fine("broker", "size", f"the queue file has {byte_text(file_bytes(path) or 0)}")


def _room(path: str) -> Finding:
    free = shutil.disk_usage(Path(path).parent).free
    text = f"{free // MIB:,} MiB are free for the file"
    if free < LEAST_ROOM:
        return warning(
            "broker", "room", text, "free some space: on a full disk every send is refused"
        )
    return fine("broker", "room", text)
