"""Event files as they are found, and what is passed over."""

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
    """name: relative to the place, with slashes. appeared: when it got this name, by the place's
    clock, in seconds since 1970: a blob's last modification, a file's change of status.
    """

    name: str
    size: int
    appeared: float

    @property
    def folder(self) -> str:
        """``date=.../hour=..``."""
        return self.name.rpartition("/")[0]

    @property
    def compacted(self) -> bool:
        """Whether it is Parquet."""
        return self.name.endswith(PARQUET)


@dataclass(slots=True)
class Listing:
    """files: those to read, by name. skipped: how many others there are, by reason."""

    files: list[EventFile] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, size: int, appeared: float) -> None:
        """One regular file or blob."""
        folder, _, base = name.rpartition("/")
        if base.startswith((".", "_")) or "/." in f"/{folder}":
            self.skipped["hidden name"] += 1
        elif not (_FOLDER.fullmatch(folder) and base.endswith((LINES, PARQUET)) and _is_utf8(name)):
            self.skipped["not an event file"] += 1
        else:
            self.files.append(EventFile(name, size, appeared))


def _is_utf8(name: str) -> bool:
    """Whether the name can be written down: Linux allows any bytes, Spark and Arrow do not."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
