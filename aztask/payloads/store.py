"""Where payloads are stored: the protocol of the stores, and the names of payloads.

Rules
1. A payload is written once, under a name that no other one has, before the message or the record
   that refers to it. It appears completely or not at all. So writing it again after a lost answer
   does no harm.
2. A name is ``KIND/HOUR/ID``. The hour in which it was written says how old a payload is, so that
   old ones are found without reading them.
3. A message owns its payload: only its own last settlement removes it.
4. A store raises PayloadMissing and PayloadDamaged for one payload, and BrokerUnavailable if the
   store itself cannot be used now.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final, Protocol

from aztask.message.payload import StoredValue

_HOUR: Final = "%Y%m%d%H"
NAME: Final = re.compile(r"[a-z]{1,16}/([0-9]{10})/[0-9a-f]{32}(\.part)?", re.ASCII)
"""A payload's name; with ``.part`` at its end, it was not written completely."""


class Kind(StrEnum):
    """What a payload is: the first part of its name."""

    ARGUMENTS = "args"
    CHECKPOINT = "saved"
    RESULT = "results"
    VALUE = "values"
    """Stored by `App.put`. The hour in its name is that in which its lifetime ends."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A payload that is stored. at: the hour in its name, UTC epoch seconds; size: bytes."""

    name: str
    size: int
    at: float

    @property
    def kind(self) -> str:
        """The first part of its name, one of `Kind`."""
        return self.name.partition("/")[0]


class PayloadStore(Protocol):
    """Stores payloads. Any thread may call; a forked child opens its own."""

    @property
    def remote(self) -> bool:
        """True if calls wait for a network."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Store `data`. Raises BrokerUnavailable: then it may be stored or not."""
        ...

    def read(self, stored: StoredValue) -> bytes:
        """The bytes, which are verified. Never reads more than `stored` says."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove these; missing ones are skipped. Raises BrokerUnavailable."""
        ...

    def list(self) -> Iterator[Listed]:
        """All payloads; files and blobs with other names are skipped. Raises BrokerUnavailable."""
        ...

    def close(self) -> None:
        """Close idle connections; the store stays usable."""
        ...


def new_name(kind: Kind, at: float | None = None) -> str:
    """A new payload's name. at: UTC epoch seconds, by default now."""
    hour = datetime.fromtimestamp(time.time() if at is None else at, UTC).strftime(_HOUR)
    return f"{kind}/{hour}/{os.urandom(16).hex()}"


def listed(name: str, size: int) -> Listed | None:
    """The payload of this name; None if it is not a payload's name."""
    found = NAME.fullmatch(name)
    if found is None:
        return None
    try:
        at = datetime.strptime(found[1], _HOUR).replace(tzinfo=UTC)
    except ValueError:
        return None
    return Listed(name, size, at.timestamp())
