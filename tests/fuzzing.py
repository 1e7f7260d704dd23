"""How long the tests with random input run, and from which seed.

AZTASK_FUZZ_SECONDS is the time of each, AZTASK_FUZZ_SEED repeats a run. Without either, each runs
shortly and draws the same input each time.
"""

from __future__ import annotations

import os

SEED = 20260101


def seconds() -> float | None:
    """How long one test runs, None for a short run of fixed length."""
    text = os.environ.get("AZTASK_FUZZ_SECONDS")
    return float(text) if text else None


def seed() -> int:
    """The seed of this run. A long run draws a new one, which the failure of a test names."""
    text = os.environ.get("AZTASK_FUZZ_SEED")
    if text:
        return int(text)
    return SEED if seconds() is None else int.from_bytes(os.urandom(6))
