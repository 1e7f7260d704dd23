"""Beats with aztask's scheduler class: real ``celery beat`` processes without a leader."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import azurite
import pytest
from beatsite import EVERY, BeatSite, check_each_once, kill_at_random
from celery import Celery

from aztask import App
from aztask.celery import Scheduler
from aztask.operate.celeryapp import CeleryApp
from aztask.operate.celeryschedules import BeatEntry
from aztask.schedules.triggers import Every


@pytest.fixture
def site(tmp_path: Path) -> Iterator[BeatSite]:
    made = BeatSite(tmp_path)
    yield made
    made.end()


def test_each_occurrence_is_sent_once_while_beats_of_two_versions_die(site: BeatSite) -> None:
    kill_at_random(site, random.Random(4801), kills=8)
    check_each_once(site)


def test_a_beat_ends_with_its_signal_and_another_goes_on(site: BeatSite) -> None:
    first, second = site.beat(1), site.beat(1)
    site.until(lambda: site.waiting() >= 7 and site.started(first) and site.started(second))
    first.terminate()
    assert first.wait(20) == 0, site.log(first)
    assert "Traceback" not in site.log(first), site.log(first)
    there = site.waiting()
    site.until(lambda: site.waiting() >= there + 14)
    assert second.poll() is None


def test_a_second_send_is_dropped_where_the_task_is_known(site: BeatSite) -> None:
    """A beat dies when a task is sent and its occurrence is not closed; another one closes it."""
    dying = site.beat(1, AZTASK_FAILPOINT="occurrence-sent:KILL")
    dying.wait(60)
    assert site.waiting() == 1
    worker = site.start("worker", "-P", "solo", "-l", "info")
    site.until(lambda: site.notes.exists() and site.waiting() == 0)
    second = site.beat(1)
    site.until(lambda: "was sent before" in site.log(second))
    site.until(lambda: len(site.notes.read_text().split("\n")) > 10)
    runs = Counter(site.notes.read_text().split("\n")[:-1])
    assert set(runs.values()) == {1}, runs
    assert worker.poll() is None


def test_a_second_send_has_the_same_ids(site: BeatSite) -> None:
    """No result says that the task was sent; the queue drops the second message."""
    dying = site.beat(1, NO_BACKEND="1", AZTASK_FAILPOINT="occurrence-sent:KILL")
    dying.wait(60)
    second = site.beat(1, NO_BACKEND="1")
    site.until(lambda: "was not sent by" in site.log(second))
    site.until(lambda: site.log(second).count("sent due task") > 3 * EVERY)
    sent = Counter(
        line.rpartition(": ")[2] for line in site.log(second).split("\n") if "due" in line
    )
    assert "was not sent by" in site.log(second)
    second.kill()
    names = [(name, at) for name, at, _ in site.received()]
    assert len(names) == len(set(names))
    assert sent


def test_entries_are_kept_in_azure_tables(tmp_path: Path) -> None:
    """With a name that is no key of Tables; two beats share the entries of code and of run time."""
    with azurite.storing(tmp_path / "azurite") as services:
        account = azurite.account_of(*services)
        setup = App("setup", broker=f"local://{tmp_path}/setup.db", results=account)
        setup.results.create()  # type: ignore[union-attr]
        setup.close()
        celery = Celery("shop", broker=f"aztask+local://{tmp_path}/q.db", set_as_current=False)
        celery.conf.result_backend = "aztask://"
        celery.conf.result_backend_transport_options = {"results": account}
        celery.conf.result_expires = None
        celery.conf.beat_schedule = {"mail/daily #1?": {"task": "shop.mail", "schedule": 1.0}}
        app, beats = CeleryApp(celery), [Scheduler(celery) for _ in range(2)]
        app.schedules.put(BeatEntry("reports\\é", "shop.report", Every(1.0)))
        ids: list[str] = []
        receiver = app.broker.receiver("celery", lease=60)
        ends = time.monotonic() + 90
        while {each.partition("@")[0] for each in ids} != {"mail/daily #1?", "reports\\é"}:
            assert time.monotonic() < ends, ids
            for beat in beats:
                time.sleep(min(0.2, beat.tick()))
            ids += [each.envelope.headers["id"] for each in receiver.receive(32, 0.0)]
        assert len(ids) == len(set(ids))
        for each in (*beats, receiver, app):
            each.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("beat_schedule_filename='celerybeat-schedule', result_backend=None", "no store is named"),
        ("broker_url='memory://'", "broker of this Celery app is memory"),
        ("beat_schedule={'x': {'task': 'x', 'schedule': 0.5}}", "entry 'x': every 0.5 s is too"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(site: BeatSite, change: str, said: str) -> None:
    app = site.folder / "beat_app.py"
    app.write_text(app.read_text() + f"\napp.conf.update({change})\n")
    beat = site.beat(1)
    assert beat.wait(60) != 0
    # Not always the last line: Celery's banner, on the standard output, may come after it.
    lines = [line for line in site.log(beat).split("\n") if "aztask.celery:Scheduler: " in line]
    assert any(said in line for line in lines), site.log(beat)
