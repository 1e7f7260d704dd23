"""`aztask migrate schedules` on a Django site, with django_celery_beat's own tables, and the sun.

`tox -e celery-redis` installs django_celery_beat and ephem; elsewhere these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import pytest

from aztask.errors import ConfigurationError
from aztask.schedules.triggers import SUN_EVENTS, Sun, read_trigger

pytest.importorskip("django_celery_beat")
solar = pytest.importorskip("celery.schedules").solar

ROWS = """
    import django; django.setup()
    import datetime as d
    from django.core.management import call_command
    call_command("migrate", verbosity=0)
    from django_celery_beat.models import *
    every = lambda n, p: IntervalSchedule.objects.create(every=n, period=p)
    five, tiny = every(5, "minutes"), every(1, "microseconds")
    cron = CrontabSchedule.objects.create(
        minute="0", hour="7", day_of_month="1-7", day_of_week="mon", timezone="Europe/Berlin")
    sun = SolarSchedule.objects.create(event="sunset", latitude="52.5", longitude="13.4")
    at = lambda year: ClockedSchedule.objects.create(
        clocked_time=d.datetime(year, 1, 1, tzinfo=d.timezone.utc))
    def row(name, **more):
        return PeriodicTask.objects.create(name=name, task="shop.tick", **more)
    row("five", interval=five, args='[1, "two"]', kwargs='{"k": null}', queue="mail", priority=3,
        headers='{"tenant": "a"}', expire_seconds=60)
    row("tiny", interval=tiny)
    row("monday", crontab=cron)
    row("sunset", solar=sun)
    row("once", clocked=at(2100), one_off=True)
    row("past", clocked=at(2001), one_off=True)
    row("off", interval=five, enabled=False)
    row("next", crontab=cron, one_off=True)
    row("later", interval=five, start_time=d.datetime(2100, 1, 1, tzinfo=d.timezone.utc))
    row("ends", interval=five, expires=d.datetime(2100, 1, 1, tzinfo=d.timezone.utc))
    row("code", interval=five)
    broken = row("broken", interval=five)
    PeriodicTask.objects.filter(pk=broken.pk).update(args="[1")
    lines = row("lines", interval=five)
    PeriodicTask.objects.filter(pk=lines.pk).update(name="two" + chr(10) + "lines")
    bare = row("bare", interval=five)
    PeriodicTask.objects.filter(pk=bare.pk).update(interval=None)
"""
SETTINGS = """
    SECRET_KEY = "x"
    INSTALLED_APPS = ["django_celery_beat"]
    DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "site.db"}}
    USE_TZ = True
"""
APP = """
    import os
    from celery import Celery

    here = f"aztask+local://{os.getcwd()}"
    app = Celery("shop", broker=f"{here}/queues.db", backend=f"{here}/results.db")
    app.conf.beat_scheduler = "aztask.celery:Scheduler"
    app.conf.beat_schedule = {"code": {"task": "shop.tick", "schedule": 300}}
"""
CARRIED = {
    "code": "in beat_schedule: beat takes it from the code",
    "ends": "every 300 s: shop.tick (workers drop its tasks from 2100-01-01 00:00:00+00:00 on; "
    "delete it then)",
    "five": "every 300 s: shop.tick",
    "monday": "0 7 * * 1 Europe/Berlin on days 1,2,3,4,5,6,7: shop.tick",
    "off": "every 300 s: shop.tick (disabled: it is paused)",
    "once": "at 2100-01-01 00:00:00Z: shop.tick",
    "sunset": "sunset at 52.5, 13.4: shop.tick",
}
LEFT = {
    "bare": "it has no schedule",
    "broken": "Expecting",
    "celery.backend_cleanup": "beat makes this entry itself",
    "later": "it starts at 2100-01-01 00:00:00+00:00: import it after that",
    "past": "its time has passed",
    "tiny": "every 1e-06 s is too often: at least 1 s",
}


class Site:
    """A Django site with periodic tasks, and its Celery app."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "site_settings.py").write_text(textwrap.dedent(SETTINGS))
        (folder / "site_app.py").write_text(textwrap.dedent(APP))

    def run(self, *words: str, code: int = 0) -> str:
        """Run Python in the site; returns its output."""
        root = str(Path(__file__).parents[2])
        ended = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env={
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "site_settings",
                "PYTHONPATH": os.pathsep.join([str(self.folder), root]),
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout if code == 0 else ended.stdout + ended.stderr

    def aztask(self, *words: str, code: int = 0) -> str:
        return self.run("-m", "aztask", "-A", "site_app:app", *words, code=code)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    made.run("-c", textwrap.dedent(ROWS))
    return made


def test_each_row_says_what_becomes_of_it(site: Site) -> None:
    said = site.aztask("migrate", "schedules", code=1)
    for name, text in CARRIED.items():
        assert f"{name}: {text}\n" in said
    for name, text in LEFT.items():
        if name != "celery.backend_cleanup":
            assert f"{name}: not carried over: {text}" in said
    assert "next: at 20" in said and "(once, at its next time)" in said
    assert "has an unprintable character" in said
    assert not (site.folder / "results.db").exists()

    site.aztask("migrate", "schedules", "--write", code=1)
    site.aztask("migrate", "schedules", "--write", code=1)
    listed = [json.loads(line) for line in site.aztask("schedule", "list", "--json").splitlines()]
    found = {each["name"]: each for each in listed}
    assert set(found) == {*CARRIED, "next"} - {"code"}
    assert {name for name, each in found.items() if each["state"] == "paused"} == {"off"}
    assert found["monday"]["next"][0]["local"][11:] in ("07:00:00+01:00", "07:00:00+02:00")
    assert (found["five"]["queue"], found["five"]["origin"]) == ("mail", "run time")

    site.aztask("schedule", "trigger", "five")
    seen = site.aztask("queues", "peek", "mail", "--json")
    assert "shop.tick" in seen and "five@" in seen


MOVED = """
    import os
    from aztask import App

    here = f"local://{os.getcwd()}"
    app = App("shop", broker=f"{here}/queues.db", results=f"{here}/results.db")

    @app.task(name="shop.tick")
    def tick(*args: object, **kwargs: object) -> None:
        pass

    app.schedule("shop.code", tick.s(), every=300)
"""


def test_an_aztask_app_takes_them_as_schedules_of_its_tasks(site: Site) -> None:
    (site.folder / "site_app.py").write_text(textwrap.dedent(MOVED))
    site.run(
        "-c",
        "import django; django.setup()\n"
        "from django_celery_beat.models import *\n"
        "PeriodicTask.objects.filter(name='next').update(task='shop.unknown')\n"
        "PeriodicTask.objects.filter(name='code').update(name='shop.code')",
    )
    said = site.aztask("migrate", "schedules", code=1)
    assert "five: every 300 s: shop.tick (without its headers; without its priority)\n" in said
    assert "those of aztask do not expire then" in said
    assert "next: not carried over: the app has no task shop.unknown" in said
    assert "later: not carried over: it starts at" in said
    assert not (site.folder / "results.db").exists()

    said = site.aztask("migrate", "schedules", "--write", code=1)
    assert "shop.code: not carried over: schedule shop.code is one of the code" in said
    again = site.aztask("migrate", "schedules", "--write", code=1)
    assert again == said
    listed = [json.loads(line) for line in site.aztask("schedule", "list", "--json").splitlines()]
    found = {each["name"]: each for each in listed}
    names = {"ends", "five", "monday", "off", "once", "sunset"}
    assert {f"shop.{name}" for name in names} <= set(found)
    assert found["shop.off"]["state"] == "paused"
    assert found["shop.five"]["queue"] == "mail"

    site.aztask("schedule", "trigger", "five")
    assert "shop.tick" in site.aztask("queues", "peek", "mail", "--json")


def test_a_site_without_them_is_told_so(site: Site) -> None:
    (site.folder / "site_settings.py").write_text('SECRET_KEY = "x"\n')
    said = site.aztask("migrate", "schedules", code=4)
    assert "has no django_celery_beat in INSTALLED_APPS" in said


@pytest.mark.parametrize("event", SUN_EVENTS)
@pytest.mark.parametrize("place", [(52.5, 13.4), (69.6, 18.9), (-33.9, 151.2)])
def test_the_sun_is_that_of_celery(event: str, place: tuple[float, float]) -> None:
    trigger, start = Sun(event, *place), datetime(2026, 4, 20, tzinfo=UTC)
    assert read_trigger(trigger.packed()) == trigger
    times = list(islice(trigger.after(start.timestamp()), 40))
    assert len(set(times)) == 40
    for before, after in zip([start.timestamp(), *times], times, strict=False):
        moment = datetime.fromtimestamp(before + 60, UTC)
        theirs = solar(event, *place, nowfun=lambda moment=moment: moment)
        expected = moment + theirs.remaining_estimate(moment)
        assert abs(expected.timestamp() - after) < 5
    again = next(trigger.after(times[7] + 0.05))
    assert again == times[8]


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="sunrise"):
        Sun("sunrise", 91.0, 0.0)
