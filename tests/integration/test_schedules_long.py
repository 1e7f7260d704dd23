"""Schedules over a long time: kills for minutes, a day on a clock file, clocks that are wrong.

By default each test is short. ``tox -e schedules-long`` takes the real times:

* SCHEDULES_SECONDS: how long workers are killed, and how long the day on the clock file takes. With
  600, the clock file passes 24 hours.
* SCHEDULES_SEED: draws other kills.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import azurite
import pytest
from clockfile import ClockFile
from harness import Site, Worker, site_in, wait_until
from neighbour import neighbour_of

from aztask import App
from aztask.schedules.stored import Made, read_made
from aztask.stores.records.base import State
from aztask.stores.records.schedules import schedules_of

SECONDS = float(os.environ.get("SCHEDULES_SECONDS", "8"))
SEED = int(os.environ.get("SCHEDULES_SEED", "23"))
WORKERS = 5
SPEED = 144.0
"""24 hours in 10 minutes."""

ARGUMENTS = ("-c", "1", "--pool", "threads", "--lease", "3s", "--max-lease", "60s")
HOUR = 3600.0
START = 1_793_404_800.0
"""2026-10-31 00:00 UTC."""

STORES = ["local", pytest.param("tables", marks=pytest.mark.kills)]
pytestmark = pytest.mark.timeout(8 * SECONDS + 300)


@contextmanager
def site_on(where: str, folder: Path, schedules: dict[str, Any], **extra: str) -> Iterator[Site]:
    options: dict[str, Any] = {
        "module": "schedule_app",
        "extra": {"SCHEDULES": json.dumps(schedules), **extra},
    }
    if where == "local":
        with site_in(folder / "site", **options) as site, neighbour_of(site):
            yield site
        return
    with azurite.storing(folder / "azurite") as services:
        results = azurite.account_of(*services)
        with site_in(folder / "site", results=results, **options) as site:
            site.app().results.create()  # type: ignore[union-attr]
            with neighbour_of(site):
                yield site


def occurrences(app: App, name: str) -> list[Made]:
    """All occurrences, the oldest first."""
    store = schedules_of(app.results)
    assert store is not None
    return [read_made(row) for row in store.newest(f"ledger.{name}", 100_000)][::-1]


def all_ended(app: App, names: list[str]) -> bool:
    made = [each for name in names for each in occurrences(app, name)]
    return all(each.state == "sent" for each in made) and all(
        app.result(each.task_id).ready() for each in made
    )


def recorded_once(site: Site, name: str, interval: float) -> list[float]:
    """No time is missing between the first and the last, and each has one outcome."""
    app = site.app()
    made = occurrences(app, name)
    times = [each.at for each in made]
    assert times == [times[0] + number * interval for number in range(len(times))]
    assert len({each.task_id for each in made}) == len(made)
    for each in made:
        runs = app.results.history(each.task_id)  # type: ignore[union-attr]
        succeeded = [run for run in runs if run.state is State.SUCCEEDED]
        assert len(succeeded) == 1, (each, runs)
        assert len({run.key.generation for run in runs}) == 1
        value = succeeded[0].outcome.value  # type: ignore[union-attr]
        assert app.codec.decode_value(value or b"") == each.at
    return times


def under_kills(
    start: Callable[[], Worker], seconds: float, pause: tuple[float, float]
) -> tuple[list[Worker], int]:
    """Five workers for so long; now and then one is killed and replaced. Returns the kills too."""
    dice, kills = random.Random(SEED), 0
    workers = [start() for _ in range(WORKERS)]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(dice.uniform(*pause))
        victim = dice.randrange(WORKERS)
        workers[victim].kill()
        workers[victim].wait()
        workers[victim] = start()
        kills += 1
    return workers, kills


@pytest.mark.parametrize("where", STORES)
def test_five_workers_under_random_kills(where: str, tmp_path: Path) -> None:
    schedules = {"tick": {"every": 1, "missed": "all", "max_missed": 1000}}
    with site_on(where, tmp_path, schedules) as site:
        app = site.app()
        workers, kills = under_kills(lambda: site.worker(*ARGUMENTS), SECONDS, (1.0, 4.0))
        wait_until(lambda: len(occurrences(app, "tick")) >= SECONDS / 2, 120, "they have begun")
        assert app.schedules.pause("tick")
        wait_until(lambda: all_ended(app, ["tick"]), 240, "all have run")
        times = recorded_once(site, "tick", 1.0)
        print(f"{where}: {len(times)} occurrences, {kills} kills of workers, each recorded once")
        assert len(times) >= SECONDS / 2
        assert any(worker.process.poll() is None for worker in workers)


@pytest.mark.parametrize("where", STORES)
def test_a_day_on_a_clock_file(where: str, tmp_path: Path) -> None:
    """The store's time passes 144 times as fast; in ten minutes it is 24 hours."""
    clock = ClockFile(tmp_path / "clock", START)
    schedules = {
        "minute": {"every": 60, "missed": "all", "max_missed": 1000},
        "fives": {"cron": "*/5 * * * *", "tz": "Europe/Berlin", "missed": "all"},
    }
    names = list(schedules)
    extra = {
        "SCHEDULE_CLOCK": str(clock.path),
        "SCHEDULE_RESEND": "300",
        "SCHEDULE_STAGGER": "[72, 288]",
    }
    with site_on(where, tmp_path, schedules, **extra) as site:
        app = site.app()
        first = site.worker(*ARGUMENTS)
        wait_until(lambda: app.schedules.view("minute") is not None, 60, "a worker has begun")
        wait_until(lambda: app.schedules.view("fives") is not None, 60, "both are made")
        clock.go(SPEED)
        workers, kills = under_kills(lambda: site.worker(*ARGUMENTS), SECONDS, (1.5, 5.0))
        clock.go(1.0)
        end = clock.now
        wait_until(
            lambda: (
                all(view and view.schedule.watermark >= end - 60.0 for view in views(app, names))
                and all_ended(app, names)
            ),
            240,
            "all have run",
        )
        times = recorded_once(site, "minute", 60.0)
        assert START < times[0] <= START + 120.0
        assert end - 60.0 <= times[-1] <= clock.now
        fives = recorded_once(site, "fives", 300.0)
        assert times[0] <= fives[0] <= START + 300.0
        hours = (end - START) / HOUR
        print(f"{where}: {hours:.1f} hours, {len(times) + len(fives)} occurrences, {kills} kills")
        assert first.process.poll() is None
        assert len(workers) == WORKERS


def views(app: App, names: list[str]) -> list[Any]:
    return [app.schedules.view(name) for name in names]


@pytest.mark.parametrize(
    ("day", "late_job"),
    # Debian's cron(8): jobs of the skipped hour run right after it, those of the repeated hour run
    # once; jobs with * in the hour or minute follow the elapsed time.
    [((2026, 3, 29), (1, 0)), ((2026, 10, 25), (0, 30))],
    ids=["the skipped hour", "the repeated hour"],
)
def test_both_daylight_saving_days_as_debians_cron(
    day: tuple[int, int, int], late_job: tuple[int, int], tmp_path: Path
) -> None:
    """A real worker through the night of Berlin, in steps of ten minutes."""
    midnight = datetime(*day, tzinfo=UTC).timestamp() - 2 * HOUR
    clock = ClockFile(tmp_path / "clock", midnight + 60.0)
    berlin = {"tz": "Europe/Berlin", "missed": "all", "max_missed": 1000}
    schedules = {
        "once": {"cron": "30 2 * * *", **berlin},
        "half": {"cron": "*/30 * * * *", **berlin},
    }
    extra = {"SCHEDULE_CLOCK": str(clock.path), "SCHEDULE_STAGGER": "[1, 2]"}
    with site_on("local", tmp_path, schedules, **extra) as site:
        app = site.app()
        worker = site.worker(*ARGUMENTS)
        for name in schedules:
            wait_until(lambda name=name: app.schedules.view(name) is not None, 60, "it is made")
        for _ in range(36):
            clock.set(clock.now + 600.0)
            time.sleep(0.1)  # a worker turns about twice in this time
        wait_until(
            lambda: (
                all(view.schedule.watermark >= clock.now - 1800.0 for view in views(app, ["half"]))
                and all_ended(app, list(schedules))
            ),
            60,
            "all have run",
        )
        (once,) = occurrences(app, "once")
        assert once.at == datetime(*day, *late_job, tzinfo=UTC).timestamp()
        halves = recorded_once(site, "half", 1800.0)
        assert halves[0] == midnight + 1800.0
        assert len(halves) >= 11
        assert worker.stop() == 0, worker.log


@pytest.mark.parametrize("where", STORES)
def test_all_workers_down_for_three_hours(where: str, tmp_path: Path) -> None:
    clock = ClockFile(tmp_path / "clock", START + 600.0)
    schedules = {missed: {"every": 3600, "missed": missed} for missed in ("skip", "latest", "all")}
    extra = {"SCHEDULE_CLOCK": str(clock.path), "SCHEDULE_STAGGER": "[1, 2]"}
    with site_on(where, tmp_path, schedules, **extra) as site:
        app = site.app()
        workers = [site.worker(*ARGUMENTS) for _ in range(2)]
        for name in schedules:
            wait_until(lambda name=name: app.schedules.view(name) is not None, 60, "it is made")
        clock.set(START + HOUR + 1.0)
        for name in schedules:
            wait_until(lambda name=name: len(occurrences(app, name)) == 1, 60, "the first")
        for worker in workers:
            worker.kill()
            worker.wait()
        clock.set(START + 4 * HOUR + 600.0)
        again = site.worker(*ARGUMENTS)
        for name in schedules:
            wait_until(
                lambda name=name: app.schedules.view(name).schedule.watermark >= clock.now - 60.0,
                60,
                "what was missed is decided",
            )
        wait_until(lambda: all_ended(app, list(schedules)), 60, "all have run")
        hours = {
            name: [round((each.at - START) / HOUR) for each in occurrences(app, name)]
            for name in schedules
        }
        assert hours == {"skip": [1], "latest": [1, 4], "all": [1, 2, 3, 4]}
        assert again.stop() == 0, again.log


def test_clocks_that_are_an_hour_apart(tmp_path: Path) -> None:
    """Three workers, one an hour behind and one an hour ahead; time is the services' time."""
    schedules = {"tick": {"every": 1, "missed": "all", "max_missed": 1000}}
    with azurite.running(tmp_path / "queue", service="queue") as queue:
        broker = queue.connection_string
        with azurite.storing(tmp_path / "azurite") as services:
            results = azurite.account_of(*services)
            options: dict[str, Any] = {"broker": broker, "results": results}
            extra = {"SCHEDULES": json.dumps(schedules)}
            with site_in(tmp_path / "site", module="schedule_app", extra=extra, **options) as site:
                app = site.app()
                app.results.create()  # type: ignore[union-attr]
                app.broker.declare("default")
                workers = [
                    site.worker(*ARGUMENTS, SCHEDULE_SKEW=str(skew)) for skew in (-HOUR, 0.0, HOUR)
                ]
                wait_until(
                    lambda: len(occurrences(app, "tick")) >= max(8.0, SECONDS / 10), 180, "some"
                )
                assert app.schedules.pause("tick")
                wait_until(lambda: all_ended(app, ["tick"]), 120, "all have run")
                recorded_once(site, "tick", 1.0)
                for each in occurrences(app, "tick"):
                    assert each.at <= each.made_at <= each.at + 60.0
                    assert time.time() - each.made_at < 900.0
                for line in site.lines("end"):  # stamped by one of three clocks
                    late = [line.at - skew - float(line.key) for skew in (-HOUR, 0.0, HOUR)]
                    assert any(-1.0 <= each <= 120.0 for each in late), line
                for worker in workers:
                    assert worker.stop() == 0, worker.log
