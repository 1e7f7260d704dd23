"""A listing of event files, and counts of the files that are skipped."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

LINES: Final = ".jsonl"
PARQUET: Final = ".parquet"

_FOLDER: Final = re.compile(r"date=\d{4,}-\d\d-\d\d/hour=\d\d")


@dataclass(frozen=True, slots=True)
class EventFile:
    """One file with events.

    name: relative to the place, with slashes. size: bytes. appeared: when it got this name, in
    seconds since 1970 by the place's clock: a blob's last modification, a file's status change.
    rows: for streams, the ranges (first row, number of rows) of a compacted file; None: all rows.
    """

    name: str
    size: int
    appeared: float
    rows: tuple[tuple[int, int], ...] | None = None

    @property
    def moment(self) -> int:
        """When it appeared, in microseconds since 1970."""
        return int(self.appeared * 1e6)

    @property
    def folder(self) -> str:
        """The folder of its hour, ``date=.../hour=..``."""
        return self.name.rpartition("/")[0]

    @property
    def compacted(self) -> bool:
        """Whether it is a compacted file, in Parquet format."""
        return self.name.endswith(PARQUET)


@dataclass(slots=True)
class Listing:
    """files: those to read. skipped: how many others were found, by reason."""

    files: list[EventFile] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, size: int, appeared: float) -> None:
        """Add one regular file or blob, or count it as skipped."""
        folder, _, base = name.rpartition("/")
        if base.startswith((".", "_")) or "/." in f"/{folder}":
            self.skipped["hidden name"] += 1
        elif not (_FOLDER.fullmatch(folder) and base.endswith((LINES, PARQUET)) and _is_utf8(name)):
            self.skipped["not an event file"] += 1
        else:
            self.files.append(EventFile(name, size, appeared))


def _is_utf8(name: str) -> bool:
    """Whether Spark and Arrow can handle the name: Linux allows any bytes in one."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
