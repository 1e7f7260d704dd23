"""A share of the long suites, which a commit draws: ``TESTS_SHARE=24`` runs one in 24.

`.ci/run` checks every change, and kills, services, applications, features, other platforms, random
faults and Spark together take longer than that. It runs one in 24 of each, and a third of emulator
and dashboard, drawn by the commit's hash, so that a few changes run everything; the environments
themselves run whole without the variable.

Each file keeps its share, rounded by chance, so that no file is passed over for long.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable
from fractions import Fraction
from typing import Protocol

SHARE, SEED = "TESTS_SHARE", "TESTS_SEED"


class Test(Protocol):
    """What is drawn: a test of pytest."""

    nodeid: str


def drawn(tests: Iterable[Test], one_in: int, seed: str) -> list[Test]:
    """One in so many of the tests of each file, in their order.

    Every process of a run draws the same ones: nothing but the names and the seed decides.
    """
    files: dict[str, list[Test]] = defaultdict(list)
    for test in tests:
        files[test.nodeid.partition("::")[0]].append(test)
    kept = []
    for file, its in files.items():
        whole, rest = divmod(len(its), one_in)
        count = whole + (_chance(seed, file) < Fraction(rest, one_in))
        first = sorted(its, key=lambda test: _chance(seed, test.nodeid))[:count]
        kept += [test for test in its if test in first]
    return kept


def share_of_environment() -> tuple[int, str] | None:
    """One in how many tests runs, and the seed; None: all of them. Raises ValueError."""
    text = os.environ.get(SHARE, "")
    if not text:
        return None
    seed = os.environ.get(SEED, "")
    if not text.isdecimal() or int(text) < 1 or not seed:
        raise ValueError(f"{SHARE}={text} is not a number from 1 on, or {SEED} is not set")
    return int(text), seed


def _chance(seed: str, name: str) -> Fraction:
    """A number from 0 to below 1 that the two decide."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return Fraction(int.from_bytes(digest[:8]), 1 << 64)
