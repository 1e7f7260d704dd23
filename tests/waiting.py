"""Waiting for what happens on other threads and in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for `condition`; AssertionError with `what` when it does not come true."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)
