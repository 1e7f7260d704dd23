"""The local result store's own: how it clears very many rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aztask.engine import Database
from aztask.results.base import Finish, Outcome, RunKey, Start, State
from aztask.results.local import PURGE_WINDOW, LocalResults
from aztask.settlement import Complete


@pytest.fixture
def results(tmp_path: Path) -> Iterator[LocalResults]:
    database = Database(str(tmp_path / "results.db"))
    yield LocalResults(database)
    database.close()


def a_start(owner: str, position: int, key: RunKey) -> Start:
    return Start(key, "shop.resize", "default", position, owner, "worker", 1000.0)


def ended(at: float) -> Outcome:
    return Outcome(State.SUCCEEDED, Complete(), b"\x01", at=at, duration=0.5)


def test_purging_clears_what_is_old_over_many_windows_and_leaves_the_rest(
    results: LocalResults,
) -> None:
    count = 2 * PURGE_WINDOW + 100
    keys = [RunKey(f"t{n}") for n in range(count)]
    results.start([a_start("one", n, key) for n, key in enumerate(keys)])
    old = keys[: PURGE_WINDOW + 50]
    results.record([Finish(key, "one", ended(10.0)) for key in old])
    results.record([Finish(key, "one", ended(100.0)) for key in keys[len(old) : -1]])
    assert results.purge(50.0) == len(old)
    assert results.purge(50.0) == 0
    assert results.get(keys[-1].task_id) is not None, "what has not ended is never cleared"
    assert len(results.recent(limit=count)) == count - len(old)
