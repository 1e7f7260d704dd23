"""Another app with a broker of its own on the same result store, whose rows nothing may change."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from harness import Site

from aztask import App, chain
from aztask.schedules.stored import Made, Schedule
from aztask.schedules.view import View
from aztask.settlement import Complete
from aztask.stores.records.base import (
    Finish,
    Outcome,
    ResultStore,
    RunKey,
    Start,
    State,
    WorkerRecord,
)
from aztask.stores.records.schedules import ScheduleStore, schedules_of
from aztask.stores.records.workflows import ROOT, WorkflowStore, workflows_of

LONG_AGO = 365 * 86400.0
"""Much longer than any retention, also that of rows without an owner."""

SCHEDULE: Final = "ledger.tick"
"""A schedule of the site has the same name."""


class Neighbour:
    """The other app: runs in every state, a cancellation, an open workflow and one that ended.

    And a schedule that is late by a year, with an occurrence that was made and not sent.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        broker = f"local://{site.folder}/neighbour.db"
        self.app = App("ledger", broker=broker, results=site.results)
        store, workflows = self.app.results, workflows_of(self.app.results)
        schedules = schedules_of(self.app.results)
        assert store is not None
        assert workflows is not None
        assert schedules is not None
        self.store: ResultStore = store
        self.workflows: WorkflowStore = workflows
        self.schedules: ScheduleStore = schedules
        self._write()
        self.before = self._rows()

    def _write(self) -> None:
        now, old = time.time(), time.time() - LONG_AGO

        @self.app.task
        def visit(number: int) -> int:
            return number

        self.store.heartbeat(WorkerRecord("neighbour", now, now, ("default",), 0, 0))
        for number, state in enumerate((State.SUCCEEDED, State.FAILED, State.RETRYING)):
            key = RunKey(f"neighbour-{number}")
            self.store.start([Start(key, "visit", "default", 1, "lease", "neighbour", old)])
            outcome = Outcome(state, Complete(), b"\x01", at=old)
            assert self.store.record([Finish(key, "lease", outcome)]) == [True]
        running = Start(RunKey("neighbour-runs"), "visit", "default", 1, "l", "neighbour", old)
        self.store.start([running])
        self.app.send(visit.name, [1], task_id="neighbour-sent")
        self.store.cancel("neighbour-cancelled", old, running=True)
        self.store.cancel("t1", old, running=True)  # the id of a task of the site
        chain(visit.s(1), visit.si(2)).delay(workflow_id="neighbour-open")
        (listed,) = self.workflows.open_workflows(10)
        chain(visit.s(1), visit.si(2)).delay(workflow_id="neighbour-ended")
        self.workflows.close_workflow("neighbour-ended", old, old)
        assert listed.workflow == "neighbour-open"
        self.app.schedules.create("tick", visit.s(1), every=1, missed="all", max_missed=1000)

        def late(view: View) -> tuple[Schedule, list[Made]]:
            at = float(int(old))
            return replace(view.schedule, watermark=at), [Made(at, f"{SCHEDULE}@open", at, by="x")]

        assert self.app.schedules.engine.transact(SCHEDULE, late)

    def _rows(self) -> dict[str, Any]:
        """All that it can see of its rows."""
        names = [*(f"neighbour-{number}" for number in range(3)), "neighbour-runs"]
        names += ["neighbour-sent", "neighbour-cancelled"]
        documents = self.workflows.read([(f"neighbour-{each}", ROOT) for each in ("open", "ended")])
        return {
            "runs": [(self.store.get(name), self.store.history(name)) for name in names],
            "recent": sorted(run.key.task_id for run in self.store.recent()),
            "to stop": self.store.to_stop([*names, "t1"]),
            "open": self.workflows.open_workflows(10),
            "ended": self.workflows.ended_workflows(10),
            "documents": [None if each is None else each.data for each in documents],
            "schedule": self.schedules.read(SCHEDULE),
            "occurrences": self.schedules.newest(SCHEDULE, 10),
            "queue": self.app.broker.stats("default").living,
        }

    def check(self) -> None:
        """Assert that nothing has changed, also by a purge by the site."""
        results = self._site.app().results
        assert results is not None
        results.purge(time.time() - 86400.0)
        assert self._rows() == self.before


@contextmanager
def neighbour_of(site: Site, *, check: bool = True) -> Iterator[Neighbour]:
    """A neighbour. check: at the end, its rows must be as they were."""
    neighbour = Neighbour(site)
    try:
        yield neighbour
        if check:
            neighbour.check()
    finally:
        neighbour.app.close()
