"""Schedules with real workers, which die by real signals between any two steps."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import azurite
import pytest
from harness import Site, site_in, wait_until
from neighbour import neighbour_of

from aztask import App
from aztask.schedules.stored import Made, read_made
from aztask.stores.records.base import State
from aztask.stores.records.schedules import schedules_of
from aztask.stores.tables.client import TimeBudget

SECONDS = 12.0
ARGUMENTS = ("-c", "1", "--pool", "threads", "--lease", "2s", "--max-lease", "60s")


@contextmanager
def site_on(where: str, folder: Path) -> Iterator[Site]:
    if where == "local":
        with site_in(folder / "site", module="schedule_app") as site:
            yield site
        return
    with azurite.storing(folder / "azurite") as services:
        account = azurite.account_of(*services)
        with site_in(folder / "site", module="schedule_app", results=account) as site:
            site.app().results.create()  # type: ignore[union-attr]
            yield site


def occurrences(app: App) -> list[Made]:
    """All occurrences, the oldest first."""
    store = schedules_of(app.results)
    assert store is not None
    return [read_made(row) for row in store.newest("ledger.tick", 1000)][::-1]


def recorded_once(site: Site, *, least: int) -> None:
    """No second is missing between the first and the last, and each has one outcome."""
    app = site.app()
    made = occurrences(app)
    times = [round(each.at) for each in made]
    assert times == list(range(times[0], times[0] + len(times)))
    assert len(times) >= least
    assert {each.state for each in made} == {"sent"}
    for each in made:
        runs = app.results.history(each.task_id)  # type: ignore[union-attr]
        assert [run.state for run in runs] == [State.SUCCEEDED], each
        value = runs[0].outcome.value  # type: ignore[union-attr]
        assert app.codec.decode_value(value or b"") == each.at


def is_done(site: Site) -> bool:
    app = site.app()
    made = occurrences(app)
    return all(each.state == "sent" and app.result(each.task_id).ready() for each in made)


def pause(site: Site) -> None:
    """Let what was made be sent and run, and make no more."""
    assert site.app().schedules.pause("tick")


@pytest.mark.parametrize("step", ["occurrence-made", "occurrence-sent"])
def test_another_worker_completes_what_one_that_died_began(step: str, tmp_path: Path) -> None:
    with site_on("local", tmp_path) as site:
        first = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=f"{step}:KILL:2")
        assert first.wait(60) == -signal.SIGKILL, first.log
        assert [each.state for each in occurrences(site.app())] == ["sent", "due"]
        second = site.worker(*ARGUMENTS)
        wait_until(lambda: len(occurrences(site.app())) >= 5, 60, "five occurrences")
        pause(site)
        wait_until(lambda: is_done(site), 60, "all have run")
        recorded_once(site, least=5)
        assert "was not sent by" in second.log
        assert second.stop() == 0, second.log


@pytest.mark.parametrize("step", ["occurrence-made", "occurrence-sent", "graph-root"])
def test_workflows_of_a_schedule_never_overlap(step: str, tmp_path: Path) -> None:
    """A worker dies at its second occurrence; another one goes on, and starts none twice."""
    with site_on("local", tmp_path) as site:
        given = {"SCHEDULES": "{}", "SCHEDULE_OVERLAP": "skip"}
        first = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=f"{step}:KILL:2", **given)
        assert first.wait(60) == -signal.SIGKILL, first.log
        site.worker(*ARGUMENTS, **given)
        wait_until(lambda: len(site.lines("end")) >= 4, 60, "four workflows")
        assert site.app().schedules.pause("flow")
        wait_until(lambda: len(site.lines("start")) == len(site.lines("end")), 60, "all end")
        told = [(line.event, line.key) for line in site.lines()]
        begun = [key for event, key in told if event == "start"]
        assert told == [(event, key) for key in begun for event in ("start", "end")]
        assert len(set(begun)) == len(begun)
        store = schedules_of(site.app().results)
        assert store is not None
        made = [read_made(row) for row in store.newest("ledger.flow", 100)]
        assert {each.state for each in made} == {"sent", "skipped"}
        (why,) = {each.why.partition("@")[2][20:] for each in made if each.state == "skipped"}
        assert why == " has not ended"
        for each in made:
            if each.state == "sent":
                value = f"{each.at:.0f}"
                assert site.app().workflows.result(each.task_id).get(timeout=10) == value


@pytest.mark.kills
@pytest.mark.parametrize("where", ["local", "tables"])
def test_workers_that_are_killed_lose_no_occurrence(where: str, tmp_path: Path) -> None:
    """Three workers, one of which is killed each second or so and replaced."""
    dice = random.Random(7)
    with site_on(where, tmp_path) as site, neighbour_of(site):
        workers = [site.worker(*ARGUMENTS) for _ in range(3)]
        wait_until(lambda: len(occurrences(site.app())) >= 2, 60, "they have begun")
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            time.sleep(dice.uniform(0.3, 1.5))
            victim = dice.randrange(3)
            workers[victim].kill()
            workers[victim].wait()
            workers[victim] = site.worker(*ARGUMENTS)
        wait_until(lambda: len(occurrences(site.app())) >= SECONDS, 90, "they go on")
        pause(site)
        wait_until(lambda: is_done(site), 90, "all have run")
        recorded_once(site, least=int(SECONDS))


def test_what_a_look_and_an_occurrence_cost_in_azure_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of docs/how-to/basics/schedules.md, in requests to the table."""
    counted = 0
    request = TimeBudget.request

    def count(self: TimeBudget, *arguments: Any, **options: Any) -> Any:
        nonlocal counted
        counted += 1
        return request(self, *arguments, **options)

    with site_on("tables", tmp_path) as site:
        app = site.app()

        @app.task
        def tick() -> None: ...

        app.broker.declare("default")
        app.schedule("tick", tick.s(), every=6)
        runner = app.schedules.runner("worker")

        def has_made_one() -> bool:
            runner.turn()
            view = app.schedules.view("tick")
            return view is not None and view.schedule.made > 0

        wait_until(has_made_one, 60, "the first occurrence, so that the next is seconds away")
        monkeypatch.setattr(TimeBudget, "request", count)
        runner._look_at = 0.0
        runner.turn()
        assert counted == 2
        counted, store = 0, app.schedules.engine.store
        runner._look_at = 1e12
        wait_until(lambda: (runner.turn(), counted)[1], 30, "an occurrence is made")
        assert counted == 5
        counted = 0
        assert store.any()
        assert counted == 1


def test_the_scheduler_alone_and_workers_without(tmp_path: Path) -> None:
    with site_on("local", tmp_path) as site:
        worker = site.worker(*ARGUMENTS, "--no-schedules")
        command = [sys.executable, "-m", "aztask", "-A", "schedule_app", "scheduler"]
        with (
            (site.folder / "scheduler.log").open("w+") as log,
            subprocess.Popen(
                command, env=site.environment, cwd=site.folder, stderr=log
            ) as scheduler,
        ):
            try:
                wait_until(lambda: len(site.lines("end")) >= 3, 60, "three runs")
            finally:
                scheduler.terminate()
            assert scheduler.wait(30) == 0
        made = occurrences(site.app())
        assert {each.by.partition("-")[0] for each in made} == {"scheduler"}
        wait_until(lambda: is_done(site), 60, "all have run")
        recorded_once(site, least=3)
        assert len(set(itertools.chain(site.counts("end")))) == len(made)
        assert worker.stop() == 0, worker.log
