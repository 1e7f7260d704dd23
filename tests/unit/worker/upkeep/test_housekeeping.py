"""How soon a worker looks again for old results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from runtimes import make_runtime

from aztask.brokers.base import Capabilities
from aztask.support.clock import Clock
from aztask.worker.upkeep.housekeeping import (
    PURGE_AGAIN_SECONDS,
    PURGE_SECONDS,
    PURGED_MANY,
    Housekeeping,
)


class Purging:
    """A result store that says how much it deleted."""

    def __init__(self, deleted: int) -> None:
        self.deleted = deleted
        self.asked: list[float] = []

    def purge(self, before: float) -> int:
        self.asked.append(before)
        return self.deleted

    def heartbeat(self, worker: object) -> None:
        """Nothing to do."""


@pytest.mark.parametrize(
    ("deleted", "pause"),
    [(0, PURGE_SECONDS), (PURGED_MANY - 1, PURGE_SECONDS), (PURGED_MANY, PURGE_AGAIN_SECONDS)],
)
def test_much_that_was_old_brings_the_next_look_forward(deleted: int, pause: float) -> None:
    now = [1000.0]
    store = Purging(deleted)
    app: Any = SimpleNamespace(
        results=store,
        broker=SimpleNamespace(capabilities=Capabilities("made up", remote=False)),
        settings=SimpleNamespace(result_retention_seconds=50.0),
    )
    clock = Clock(monotonic=lambda: now[0], wall=lambda: 2000.0)
    record: Any = object
    runtime = make_runtime(app, clock=clock, queues=("q",))
    chores, mailbox = Housekeeping(runtime), runtime.mailbox

    def tick(at: float) -> int:
        now[0] = at
        chores.tick(at, record, list, lambda ids: None)
        while len(chores._lane):
            mailbox.run()
        return len(store.asked)

    assert tick(1000.0 + PURGE_SECONDS) == 1
    assert store.asked == [1950.0]
    assert tick(1000.0 + PURGE_SECONDS + pause - 0.1) == 1
    assert tick(1000.0 + PURGE_SECONDS + pause) == 2
    chores.stop()
