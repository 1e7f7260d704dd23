"""The periodic tasks of a Django site, from the tables of django_celery_beat, as beat entries.

The models are asked for by name: the package is read where it is installed, and needed nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import django
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import Error
from django.utils import timezone

from aztask.errors import ConfigurationError
from aztask.operate.celerybeat import cron_of
from aztask.operate.celeryschedules import BeatEntry
from aztask.schedules.triggers import SHORTEST_SECONDS, At, Every, Sun, Trigger, next_time

MODELS: Final = "django_celery_beat"
OWN: Final = "celery.backend_cleanup"
"""An entry that every beat makes itself."""

_SENT: Final = ("queue", "exchange", "routing_key", "priority")


@dataclass(frozen=True, slots=True)
class PeriodicTask:
    """A row of the site.

    * `entry`: None if it cannot be carried over.
    * `paused`: whether it is disabled.
    * `note`: why it cannot be carried over, or what is different then.
    """

    name: str
    entry: BeatEntry | None
    paused: bool = False
    note: str = ""


def periodic_tasks() -> Iterator[PeriodicTask]:
    """Every row, by name; one that cannot be read harms no other.

    Raises ConfigurationError: no settings, no such models, a database that does not answer.
    """
    try:
        if not apps.ready:
            django.setup()
        model = apps.get_model(MODELS, "PeriodicTask")
        rows = list(
            model._default_manager.select_related(
                "interval", "crontab", "solar", "clocked"
            ).order_by("name")
        )
    except ImproperlyConfigured as error:
        raise ConfigurationError(
            f"set DJANGO_SETTINGS_MODULE to the site's settings: {error}"
        ) from None
    except LookupError:
        raise ConfigurationError(
            f"this site has no {MODELS} in INSTALLED_APPS: its periodic tasks are not in Django"
        ) from None
    except Error as error:
        raise ConfigurationError(f"the tables of {MODELS} cannot be read: {error}") from None
    yield from map(carried, rows)


def carried(row: Any) -> PeriodicTask:
    """What becomes of one row."""
    try:
        if row.name == OWN:
            raise ConfigurationError("beat makes this entry itself")
        return _carried(row)
    except (ArithmeticError, AttributeError, ConfigurationError, TypeError, ValueError) as error:
        return PeriodicTask(str(row.name), None, note=str(error))


def _carried(row: Any) -> PeriodicTask:
    now, notes = timezone.now().timestamp(), []
    if row.start_time is not None and row.start_time.timestamp() > now:
        raise ConfigurationError(f"it starts at {row.start_time}: import it after that")
    options = {name: value for name in _SENT if (value := getattr(row, name)) is not None}
    if headers := _json(row, "headers", dict):
        options["headers"] = headers
    if row.expires is not None:
        if row.expires.timestamp() <= now:
            raise ConfigurationError(f"it ended at {row.expires}")
        options["expires"] = row.expires
        notes.append(f"workers drop its tasks from {row.expires} on; delete it then")
    elif row.expire_seconds is not None:
        options["expires"] = row.expire_seconds
    trigger = _trigger(row)
    due = next_time(trigger, now)
    if due is None:
        raise ConfigurationError("its time has passed")
    if row.one_off and not isinstance(trigger, At):
        trigger = At(due)
        notes.append("once, at its next time")
    if not row.enabled:
        notes.append("disabled: it is paused")
    entry = BeatEntry(
        row.name, row.task, trigger, _json(row, "args", list), _json(row, "kwargs", dict), options
    )
    return PeriodicTask(row.name, entry, not row.enabled, "; ".join(notes))


def _trigger(row: Any) -> Trigger:
    if row.interval is not None:
        seconds = timedelta(**{row.interval.period: row.interval.every}).total_seconds()
        if seconds < SHORTEST_SECONDS:
            raise ConfigurationError(
                f"every {seconds:g} s is too often: at least {SHORTEST_SECONDS:g} s"
            )
        return Every(seconds)
    if (cron := row.crontab) is not None:
        fields = ("minute", "hour", "day_of_week", "day_of_month", "month_of_year")
        return cron_of({name: getattr(cron, name) for name in fields}, str(cron.timezone))
    if row.solar is not None:
        return Sun(row.solar.event, float(row.solar.latitude), float(row.solar.longitude))
    if row.clocked is not None:
        return At(round(row.clocked.clocked_time.timestamp(), 3))
    raise ConfigurationError("it has no schedule")


def _json(row: Any, name: str, kind: type) -> Any:
    found = json.loads(getattr(row, name) or kind().__repr__())
    if not isinstance(found, kind):
        raise ConfigurationError(f"its {name} are no JSON {kind.__name__}")
    return found
