"""The pace of workers that have nothing to do: in a world they look around less often.

A worker that waits takes some twenty steps each second, and a world of decades would take no
others. None of these times is part of a promise; `docs/discussions/simulation.md` lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import aztask.schedules.runner
import aztask.worker.core
import aztask.worker.pool.attempt
import aztask.worker.runtime
import aztask.worker.upkeep.controlwatch
import aztask.worker.upkeep.housekeeping

SLOWER: Final[tuple[tuple[Any, str, float], ...]] = (
    (aztask.worker.core, "TICK_SECONDS", 1.0),
    (aztask.worker.core, "IDLE_TICK_SECONDS", 4.0),
    (aztask.worker.upkeep.controlwatch, "READ_SECONDS", 20.0),
    (aztask.worker.upkeep.housekeeping, "HEARTBEAT_SECONDS", 20.0),
    (aztask.worker.upkeep.housekeeping, "GRAPH_SECONDS", 30.0),
    (aztask.worker.upkeep.housekeeping, "DEAD_SECONDS", 300.0),
    (aztask.worker.upkeep.housekeeping, "QUIET_SECONDS", 5.0),
    (aztask.schedules.runner, "LONGEST_PAUSE", 30.0),
    (aztask.schedules.runner, "LOOK_SECONDS", 60.0),
)
LEFT: Final[tuple[tuple[Any, str, Any], ...]] = (
    (aztask.worker.core, "watch_parts", lambda: None),
    (aztask.worker.runtime, "Recorder", lambda clock: None),
    (aztask.worker.pool.attempt, "traceback_of", lambda error: f"{type(error).__name__}: {error}"),
)
"""What costs time and cannot differ here: threads that stand still, long texts, and the history,
which no task depends on."""

POLL: Final = 5.0
"""Seconds between two receives from an empty queue; a message that is sent ends the wait."""


@contextmanager
def slower() -> Iterator[None]:
    """Set these inside the ``with`` block."""
    changes = (*SLOWER, *LEFT)
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
