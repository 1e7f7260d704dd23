"""Beat's entries in the result store: their times, their calls, and whose they are."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.beat import BeatLazyFunc
from celery.exceptions import ImproperlyConfigured
from celery.schedules import crontab, schedule

from aztask.app import App
from aztask.celery import Scheduler
from aztask.errors import ConfigurationError
from aztask.operate.celeryapp import CeleryApp
from aztask.operate.celerybeat import cron_of, trigger_of
from aztask.operate.celeryschedules import BeatEntry
from aztask.schedules.triggers import Cron, Every, read_trigger

START = datetime(2026, 11, 29, tzinfo=UTC).timestamp()  # a Sunday


@pytest.fixture
def celery(tmp_path: Path) -> Iterator[Celery]:
    made = Celery("shop", broker=f"aztask+local://{tmp_path}/q.db", set_as_current=False)
    made.conf.result_backend = f"aztask+local://{tmp_path}/r.db"
    made.conf.result_expires = None
    yield made
    made.close()


def days(trigger: Any, count: int) -> list[str]:
    times = islice(trigger.after(START), count)
    return [datetime.fromtimestamp(each, UTC).strftime("%a %d %H:%M") for each in times]


def test_a_crontab_with_both_kinds_of_days_is_due_where_both_match(celery: Celery) -> None:
    when = crontab(minute=0, hour=6, day_of_month="1-7", day_of_week="mon", app=celery)
    trigger = trigger_of(when)
    assert days(trigger, 3) == ["Mon 07 06:00", "Mon 04 06:00", "Mon 01 06:00"]
    assert read_trigger(trigger.packed()) == trigger
    assert str(trigger) == "0 6 * * 1 UTC on days 1,2,3,4,5,6,7"


@pytest.mark.parametrize(
    ("fields", "expression"),
    [
        ({}, "* * * * *"),
        ({"minute": "*/15", "hour": "3-5"}, "*/15 3,4,5 * * *"),
        ({"minute": "*/75", "hour": 7}, "0 7 * * *"),
        ({"minute": 0, "hour": 0, "day_of_week": "sun,sat"}, "0 0 * * 0,6"),
        ({"minute": "5", "hour": "22-1", "month_of_year": "*/6"}, "5 0,1,22,23 * 1,7 *"),
        ({"minute": 0, "hour": 4, "day_of_month": "31,1"}, "0 4 1,31 * *"),
    ],
)
def test_a_crontab_is_the_same_expression(
    celery: Celery, fields: dict[str, Any], expression: str
) -> None:
    assert trigger_of(crontab(**fields, app=celery)) == Cron(expression)


def test_its_time_zone_is_that_of_the_app(celery: Celery) -> None:
    celery.conf.timezone = "Europe/Berlin"
    assert trigger_of(crontab(app=celery)) == Cron("* * * * *", "Europe/Berlin")


def test_an_interval_is_a_multiple(celery: Celery) -> None:
    assert trigger_of(schedule(timedelta(minutes=5), app=celery)) == Every(300.0)


def test_days_that_never_come_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Bad day-of-month"):
        Cron("0 0 * 2 *", "UTC", (30,))
    with pytest.raises(ConfigurationError, match="crontab is wrong"):
        cron_of({"minute": "seven"}, "UTC")


class Own(schedule):  # type: ignore[misc]
    """A schedule class of an application."""


@pytest.mark.parametrize(
    ("when", "said"),
    [
        (Own(10), "Own: its times are known to that class alone"),
        (crontab(nowfun=datetime.now), "nowfun"),
        (0.2, "every 0.2 s is too often"),
    ],
)
def test_every_entry_that_cannot_be_is_named_at_once(celery: Celery, when: Any, said: str) -> None:
    celery.conf.beat_schedule = {
        "bad": {"task": "a", "schedule": when},
        "good": {"task": "a", "schedule": 10},
        "worse": {"task": "a", "schedule": 0.1},
    }
    with pytest.raises(ImproperlyConfigured, match=r"'bad': .*; entry 'worse': ") as caught:
        Scheduler(celery)
    assert said in str(caught.value) and "good" not in str(caught.value)


def test_the_store_is_the_named_one_and_its_secrets_are_not_in_the_banner(celery: Celery) -> None:
    key = "c2VjcmV0"
    secret = f"DefaultEndpointsProtocol=https;AccountName=account1;AccountKey={key};"
    celery.conf.result_backend = None
    celery.conf.result_backend_transport_options = {"results": secret}
    assert key not in Scheduler(celery, lazy=True).info
    named = Scheduler(celery, lazy=True, schedule_filename="aztask+tables://other")
    assert "tables://other" in named.info
    celery.conf.result_backend_transport_options = {}
    with pytest.raises(ImproperlyConfigured, match="no store is named for the entries of beat"):
        Scheduler(celery, lazy=True)


def sent(app: CeleryApp) -> list[tuple[Any, ...]]:
    receiver = app.broker.receiver("celery", lease=60)
    return [(each.envelope.headers["id"], each.envelope) for each in receiver.receive(10, 0.0)]


def test_an_entry_of_run_time_is_sent_with_its_options_by_any_beat(celery: Celery) -> None:
    app = CeleryApp(celery)
    entry = BeatEntry(
        "mail/daily é", "shop.mail", Every(1.0), ((1, 2), b"x"), {"k": START}, {"priority": 3}
    )
    assert app.schedules.put(entry) and app.schedules.put(entry)
    task_id = app.schedules.trigger("mail/daily é")
    assert task_id is not None and task_id.startswith("mail/daily é@")
    ((found, envelope),) = sent(app)
    assert (found, envelope.message_id) == (task_id, task_id)
    assert envelope.properties["priority"] == 3
    assert envelope.headers["celery_beat_task"] is True
    assert b"[1, 2]" in envelope.body
    app.close()


def test_the_code_wins_over_an_entry_of_run_time(celery: Celery) -> None:
    celery.conf.beat_schedule = {"mail": {"task": "shop.mail", "schedule": 10}}
    app = CeleryApp(celery)
    assert app.schedules.put(BeatEntry("mail", "shop.other", Every(1.0)))
    beat = Scheduler(celery)
    for _ in range(400):
        beat.tick()
        view = app.schedules.view("mail")
        if view is not None and view.schedule.of_code:
            break
    assert not app.schedules.put(BeatEntry("mail", "shop.other", Every(1.0)))
    beat.close()
    app.close()


def test_a_paused_entry_is_made_paused(celery: Celery) -> None:
    app = CeleryApp(celery)
    app.schedules.put(BeatEntry("off", "shop.mail", Every(1.0)), paused=True)
    view = app.schedules.view("off")
    assert view is not None and view.state_at(app.schedules.engine.store.now()) == "paused"
    app.close()


def test_lazy_arguments_stay_in_the_code_of_the_beat_that_has_them(celery: Celery) -> None:
    app, other = CeleryApp(celery), CeleryApp(celery)
    entry = BeatEntry("lazy", "shop.mail", Every(1.0), (BeatLazyFunc(lambda: 42),))
    app.schedules.declare_entries([entry])
    app.schedules.put(entry)
    with pytest.raises(Exception, match="in the code of another beat"):
        other.schedules.trigger("lazy")
    assert sent(app) == []
    assert app.schedules.trigger("lazy") is not None
    ((_, envelope),) = sent(app)
    assert b"[42]" in envelope.body
    app.close()
    other.close()


def test_a_long_name_has_a_message_id_that_every_service_takes(celery: Celery) -> None:
    app = CeleryApp(celery)
    app.schedules.put(BeatEntry("n" * 200, "shop.mail", Every(1.0)))
    app.schedules.trigger("n" * 200)
    ((task_id, envelope),) = sent(app)
    assert len(task_id) > 200 and len(envelope.message_id) == 64
    app.close()


def test_an_aztask_app_of_the_same_name_has_other_schedules(celery: Celery, tmp_path: Path) -> None:
    app = CeleryApp(celery)
    app.schedules.put(BeatEntry("shop.mail", "shop.mail", Every(1.0)))
    ours = App("shop", broker=f"local://{tmp_path}/q.db", results=f"local://{tmp_path}/r.db")
    assert ours.schedules.view("shop.mail") is None
    (other,) = ours.schedules.engine.others()
    assert str(other[2]).startswith("shop (beat) on local://")
    ours.close()
    app.close()
