"""Lists the queues of a service, and tells which of them aztask can use.

An account or a namespace may hold queues of other programs. Their names may be longer than aztask
allows, or end like the names of dead-letter queues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aztask.errors import InvalidQueueName


@dataclass(frozen=True, slots=True)
class Listing:
    """Sorted names of queues.

    queues: those that aztask can use.
    foreign: queues of other programs, whose names aztask never uses. aztask does not read, change
    or delete them.
    """

    queues: tuple[str, ...]
    foreign: tuple[str, ...] = ()


def listing(names: Iterable[str], check: Callable[[str], None]) -> Listing:
    """Sort the names into a `Listing`. check: raises InvalidQueueName for a foreign name."""
    known = sorted(names)
    foreign = tuple(name for name in known if not _allowed(name, check))
    return Listing(tuple(name for name in known if name not in foreign), foreign)


def _allowed(name: str, check: Callable[[str], None]) -> bool:
    try:
        check(name)
    except InvalidQueueName:
        return False
    return True
