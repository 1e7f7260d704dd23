"""Which queues a service has, and which of them aztask can use.

An account or a namespace may hold queues of other programs. Their names may be longer than aztask
allows, or end as the names of dead-letter queues do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aztask.errors import InvalidQueueName


@dataclass(frozen=True, slots=True)
class Listing:
    """Names of queues, sorted.

    queues: those that aztask can use. foreign: those whose names it never uses. They belong to
    other programs: aztask does not read, change or delete them.
    """

    queues: tuple[str, ...]
    foreign: tuple[str, ...] = ()


def listing(names: Iterable[str], check: Callable[[str], None]) -> Listing:
    """The names, sorted out. check: raises InvalidQueueName for one that aztask does not use."""
    known = sorted(names)
    foreign = tuple(name for name in known if not _allowed(name, check))
    return Listing(tuple(name for name in known if name not in foreign), foreign)


def _allowed(name: str, check: Callable[[str], None]) -> bool:
    try:
        check(name)
    except InvalidQueueName:
        return False
    return True
