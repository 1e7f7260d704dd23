"""Waiting for what happens on other threads and in other processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

PATIENCE = 3.0 if os.environ.get("AZTASK_PORTABLE") == "1" else 1.0
"""How much longer all waits may take: pool processes that are new interpreters use ten times the
processor time of forked ones until they are ready, in each of the tests that run side by side."""


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for `condition`; AssertionError with `what` when it does not come true."""
    seconds *= PATIENCE
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)
