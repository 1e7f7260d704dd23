"""Randomness and ids: the only source in the package, so that a simulation can replace it.

Rules
1. Nothing here is a secret: these numbers spread load, break ties and name things. Keys come from
   the operating system.
2. One source serves the process. It has no state that a fork would copy: a child that repeats its
   parent's ids would have its messages dropped as duplicates.
3. A simulation replaces the source by a seeded one (`replaced`). Then one seed is one course.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Chance(Protocol):
    """Where random numbers and ids come from."""

    def random(self) -> float:
        """A number from 0.0 up to 1.0, which is not reached."""

    def uniform(self, first: float, last: float, /) -> float:
        """A number between the two."""

    def randrange(self, stop: int, /) -> int:
        """A whole number from 0 up to `stop`, which is not reached."""

    def randbytes(self, count: int, /) -> bytes:
        """`count` random bytes, of which names are made."""

    def shuffle(self, items: list[Any], /) -> None:
        """Bring the items into a random order."""


class SystemChance:
    """The operating system's random bytes for ids, Python's shared generator for the rest.

    Python seeds that generator anew in a forked child.
    """

    def random(self) -> float:
        """A number from 0.0 up to 1.0, which is not reached."""
        return random.random()  # noqa: S311  # no secret

    def uniform(self, first: float, last: float) -> float:
        """A number between the two."""
        return random.uniform(first, last)  # noqa: S311  # no secret

    def randrange(self, stop: int) -> int:
        """A whole number from 0 up to `stop`, which is not reached."""
        return random.randrange(stop)  # noqa: S311  # no secret

    randbytes = staticmethod(os.urandom)

    def shuffle(self, items: list[Any]) -> None:
        """Bring the items into a random order."""
        random.shuffle(items)


_source: list[Chance] = [SystemChance()]


@contextmanager
def replaced(source: Chance) -> Iterator[None]:
    """Take everything from `source` inside the ``with`` block, such as ``random.Random(seed)``."""
    _source.append(source)
    try:
        yield
    finally:
        # The last one: blocks may end in another order than they began.
        del _source[-1 - _source[::-1].index(source)]


def uniform(first: float, last: float) -> float:
    """A number between the two, to spread load."""
    return _source[-1].uniform(first, last)


def share() -> float:
    """A number from 0.0 up to 1.0, which is not reached."""
    return _source[-1].random()


def below(stop: int) -> int:
    """A whole number from 0 up to `stop`, which is not reached."""
    return _source[-1].randrange(stop)


def token(count: int = 16) -> str:
    """`count` random bytes as text, two hexadecimal digits each: a name that nothing else has."""
    return _source[-1].randbytes(count).hex()


def shuffle(items: list[Any]) -> None:
    """Bring the items into a random order, so that no program always begins with the same one."""
    _source[-1].shuffle(items)


# -- new ids of tasks and workflows: random UUIDs (RFC 9562), faster than uuid.uuid4 ---------------
#
# New task ids: random UUIDs (RFC 9562, version 4), several times faster than `uuid.uuid4`.


def new_id() -> str:
    """A random id of 36 characters, for a task or a workflow."""
    return _uuid(token(16))


def new_ids(count: int) -> list[str]:
    """`count` new task ids.

    One system call draws the random numbers of all; one for each would cost more than its text.
    """
    digits = token(16 * count)
    return [_uuid(digits[start : start + 32]) for start in range(0, 32 * count, 32)]


def _uuid(digits: str) -> str:
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
