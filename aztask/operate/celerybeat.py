"""A scheduler class for Celery's beat that has no leader.

::

    app.conf.beat_scheduler = "aztask.celery:Scheduler"

The entries of `beat_schedule` are kept in a result store of aztask, as the schedules of an aztask
app are. Two or more beats run side by side, of one release or of two: each makes the occurrences
that no other one has made (`aztask.schedules.runner`). No file and no lock is kept.

The store is that of `beat_schedule_filename`, if it is an address such as
``aztask+tables://ACCOUNT``, else that of `result_backend`, else that of
`result_backend_transport_options`, else AZTASK_RESULTS.

Rules
1. An occurrence is a row, made if it is absent by one transaction that moves the schedule's
   watermark. So no two beats make it, and one that comes back makes none again.
2. Its task is sent afterwards, under an id that is made of the entry's name and the occurrence's
   time, by Celery itself. For the crash window see `aztask.operate.celeryschedules`.
3. While beats with different code run, the definition counts whose first beat started last. An
   entry that no code has any longer ends ten minutes after the last beat that had it.
4. An interval is counted from 1970-01-01 00:00 UTC, not from the start of beat, so that all beats
   agree. A crontab is due by local time as Debian's cron has it (`aztask.schedules.triggers`).
5. Of the times that passed while no beat ran, the latest is sent; with
   `beat_cron_starting_deadline` only if it is no later than that.
6. Entries that were made at run time (`aztask migrate schedules`) are sent, too.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from datetime import UTC
from typing import Any, Final

from celery import beat
from celery.exceptions import ImproperlyConfigured
from celery.schedules import ParseException, crontab, schedule, solar

from aztask.config import mask
from aztask.errors import ConfigurationError
from aztask.operate.celeryapp import CeleryApp
from aztask.operate.celeryschedules import BeatEntry
from aztask.schedules.rules import Rules
from aztask.schedules.triggers import SHORTEST_SECONDS, Cron, Every, Sun, Trigger
from aztask.support import chance
from aztask.worker.upkeep.scheduling import Scheduling

STEPS: Final = re.compile(r"\*(?:/([0-9]+))?")
"""A field that goes by the elapsed time where the clocks change, see `Cron`."""


class Scheduler(beat.Scheduler):  # type: ignore[misc]
    """Beat's schedule in a result store; beat calls `tick` without end."""

    def __init__(self, app: Any, *args: Any, lazy: bool = False, **kwargs: Any) -> None:
        """Called by beat; `lazy` for its banner alone. Connects to nothing.

        Raises ImproperlyConfigured in one line: no store, another broker, an entry that cannot be.
        """
        try:
            self._app = CeleryApp(app, entries=kwargs.get("schedule_filename"))
            self._address = self._app.entries_address()
        except ConfigurationError as error:
            raise ImproperlyConfigured(f"aztask.celery:Scheduler: {error}") from None
        name = f"celerybeat@{socket.gethostname()}-{os.getpid()}-{chance.token(2)}"
        self._scheduling = Scheduling(self._app, name)
        self._ticking = False
        super().__init__(app, *args, lazy=lazy, **kwargs)

    def setup_schedule(self) -> None:
        """Take the entries of `beat_schedule`, and Celery's own."""
        self.merge_inplace(self.app.conf.beat_schedule)
        self.install_default_entries(self.schedule)
        found, wrong = [], []
        for entry in sorted(self.schedule.values(), key=lambda each: str(each.name)):
            try:
                found.append(entry_of(entry, self.app.conf.beat_cron_starting_deadline))
            except ConfigurationError as error:
                wrong.append(f"entry {entry.name!r}: {error}")
        if wrong:
            raise ImproperlyConfigured(f"aztask.celery:Scheduler: {'; '.join(wrong)}")
        self._app.schedules.declare_entries(found)

    def tick(self, *_: Any, **__: Any) -> float:
        """Make and send what is due; returns the seconds until the next call.

        Never raises for a store or a broker that is unreachable: the reason is logged once, and it
        is tried again.
        """
        self._ticking = True
        try:
            return min(self._scheduling.step(), float(self.max_interval))
        finally:
            self._ticking = False

    def close(self) -> None:
        """Close the connections.

        Not within `tick`: beat's handler of SIGTERM calls this between any two of its statements,
        and calls it once more when the handler's SystemExit has left `tick`.
        """
        super().close()
        if not self._ticking:
            self._app.close()

    @property
    def info(self) -> str:
        """A line of beat's banner."""
        return f"    . store -> {mask(self._address)}"


def entry_of(entry: Any, deadline: float | None = None) -> BeatEntry:
    """The entry of Celery as the store keeps it. Raises ConfigurationError.

    * `deadline`: Celery's `beat_cron_starting_deadline`, which is for crontabs alone.
    """
    trigger = trigger_of(entry.schedule)
    late = deadline if isinstance(trigger, Cron) else None
    return BeatEntry(
        entry.name,
        entry.task,
        trigger,
        entry.args or (),
        entry.kwargs or {},
        entry.options or {},
        Rules(grace=None if late is None else float(late)),
    )


def trigger_of(when: Any) -> Trigger:
    """The times of one of Celery's schedules. Raises ConfigurationError."""
    kind = type(when)
    if kind not in (crontab, schedule, solar):
        raise ConfigurationError(
            f"it takes crontab, solar, timedelta and seconds, not {kind.__module__}."
            f"{kind.__qualname__}: its times are known to that class alone"
        )
    if when.nowfun is not None:
        raise ConfigurationError("its schedule has a nowfun: beats go by the store's time")
    if kind is solar:
        return Sun(when.event, float(when.lat), float(when.lon))
    if kind is crontab:
        return _cron(when, _zone(when.tz))
    seconds = when.run_every.total_seconds()
    if seconds < SHORTEST_SECONDS:
        raise ConfigurationError(
            f"every {seconds:g} s is too often: at least {SHORTEST_SECONDS:g} s"
        )
    return Every(seconds)


def cron_of(fields: Mapping[str, str], tz: str) -> Cron:
    """The times of Celery's crontab with these fields. Raises ConfigurationError."""
    try:
        return _cron(crontab(**fields), tz)
    except (ParseException, ValueError) as error:
        raise ConfigurationError(f"its crontab is wrong: {error}") from None


def _cron(when: Any, tz: str) -> Cron:
    fields: Mapping[str, set[int]] = {
        "day_of_month": when.day_of_month,
        "month_of_year": when.month_of_year,
        "day_of_week": when.day_of_week,
    }
    month, week = len(fields["day_of_month"]) < 31, len(fields["day_of_week"]) < 7
    both = month and week
    parts = [
        _field(when.minute, 60, str(when._orig_minute)),
        _field(when.hour, 24, str(when._orig_hour)),
        "*" if both else _field(fields["day_of_month"], 31),
        _field(fields["month_of_year"], 12),
        _field(fields["day_of_week"], 7),
    ]
    days = tuple(sorted(fields["day_of_month"])) if both else ()
    return Cron(" ".join(parts), tz, days)


def _field(values: set[int], whole: int, written: str = "") -> str:
    if (steps := STEPS.fullmatch(written)) and 0 < int(steps[1] or 1) < whole:
        return written
    return "*" if len(values) == whole else ",".join(map(str, sorted(values)))


def _zone(tz: Any) -> str:
    if tz is UTC:
        return "UTC"
    name = getattr(tz, "key", None)
    if not isinstance(name, str):
        raise ConfigurationError(
            f"its time zone {tz!s:.40} has no name: set timezone, such as 'Europe/Berlin'"
        )
    return name
