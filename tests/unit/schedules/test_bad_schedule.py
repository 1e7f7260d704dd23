"""One schedule that cannot be made or sent is put aside alone, and health shows why."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

from aztask import App
from aztask.stores.records.schedules import schedules_of
from aztask.support.parts import Part
from aztask.worker.upkeep.scheduling import Scheduling


def an_app(folder: Path) -> App:
    app = App("bad", broker=f"local://{folder}/q.db", results=f"local://{folder}/q.db")

    @app.task
    def report() -> None:
        """Nothing."""

    app.schedule("good", report.s(), every=3600)
    return app


def boom() -> None:
    raise TypeError("unsupported operand type(s)")


def test_the_others_are_made_and_the_reason_is_shown(tmp_path: Path) -> None:
    app, part = an_app(tmp_path), Part("test schedules", listed=False)
    runner = app.schedules.runner("w", part)
    runner._declared["bad.bad"] = SimpleNamespace(name="bad.bad", release=0, define=boom)
    store = schedules_of(app.results)
    give_up_at = time.monotonic() + 20
    while not store.any() and time.monotonic() < give_up_at:
        time.sleep(min(0.1, runner.turn()))
    assert store.any(), "the good one is made"
    assert [(each.part, each.reason) for each in part.failures] == [
        ("schedule bad.bad", "TypeError: unsupported operand type(s)")
    ]
    assert part.failure is None
    app.close()


def test_whatever_a_turn_raises_the_thread_goes_on(tmp_path: Path, monkeypatch) -> None:
    app = an_app(tmp_path)
    scheduling = Scheduling(app, "w")
    turns = []

    def turn() -> float:
        turns.append(scheduling.part.failure)
        if len(turns) < 3:
            raise TypeError("no")
        return 0.01

    monkeypatch.setattr(scheduling, "_turn", turn)
    monkeypatch.setattr("aztask.support.parts.FIRST_PAUSE", 0.01)
    scheduling.start()
    give_up_at = time.monotonic() + 20
    while len(turns) < 5 and time.monotonic() < give_up_at:
        time.sleep(0.01)
    scheduling.stop()
    assert turns[0] is None
    assert turns[1] is not None, "health shows it meanwhile"
    assert turns[4] is None
    app.close()
