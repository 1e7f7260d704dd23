"""When a schedule is due: by a cron expression, every so many seconds, once, or with the sun.

Times are UTC epoch seconds. Daylight saving is that of Debian's cron, which `cronsim` follows: a
time in the hour that is skipped is due right after it, a time in the hour that is repeated is due
once, and expressions whose minute or hour begins with ``*`` go by the elapsed time (cron(8),
"Notes"). A common name of a time, such as ``@daily``, is the expression that it stands for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib import import_module
from itertools import takewhile
from math import floor
from typing import Any, Final, Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from aztask.errors import ConfigurationError, did_you_mean
from aztask.stores.records.damage import Damaged
from aztask.support.checks import shown
from aztask.support.durations import to_epoch_seconds, to_seconds
from aztask.support.late import install_command

NAMES: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
"""The common names of times, as in crontab(5). A definition holds the expression: workers of an
earlier release read it, and a name and its expression are one definition."""

SHORTEST_SECONDS: Final = 1.0
SPAN_SECONDS: Final = 2 * 86400.0
_DAY: Final = timedelta(days=1)
_LATEST: Final = 2.5e11
"""Epoch seconds near the year 9900: `datetime` cannot go on behind it."""


class Trigger(Protocol):
    """Says at which times the occurrences of a schedule are due."""

    def after(self, at: float) -> Iterator[float]:
        """The times after `at`, in order."""
        ...

    def packed(self) -> list[Any]:
        """The trigger as plain values; `read_trigger` reads them."""
        ...


@dataclass(frozen=True)
class Cron:
    """Times by a cron expression of five fields, or six with seconds first, in a time zone.

    One of `NAMES` becomes its expression.

    * `days`: only on these days of the month, too. An expression that names days of the month and
      of the week is due on either; Celery's crontab is due where both match.
    """

    expression: str
    tz: str = "UTC"
    days: tuple[int, ...] = field(default=(), repr=False)
    zone: ZoneInfo = field(init=False, repr=False, compare=False)
    _iterate: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises ConfigurationError: a wrong expression, an unknown zone, a missing library."""
        if isinstance(self.expression, str) and self.expression.strip().startswith("@"):
            object.__setattr__(self, "expression", _named(self.expression.strip()))
        object.__setattr__(self, "zone", zone_of(self.tz))
        cronsim = _library()
        object.__setattr__(self, "_iterate", cronsim.CronSim)
        try:
            next(cronsim.CronSim(self.expression, datetime(2026, 1, 1, tzinfo=UTC)))
            if self.days:  # `after` would look for the 30th of February without end
                minute, hour, _, month, _ = self.expression.split()
                both = f"{minute} {hour} {','.join(map(str, self.days))} {month} *"
                next(cronsim.CronSim(both, datetime(2026, 1, 1, tzinfo=UTC)))
        except StopIteration:
            raise ConfigurationError(f"cron {shown(self.expression)} is never due") from None
        except (cronsim.CronSimError, AttributeError, TypeError, ValueError) as error:
            raise ConfigurationError(
                "cron takes five fields such as '0 2 * * *', not "
                f"{shown(self.expression)}: {error}; or a name such as '@daily'"
            ) from None

    def after(self, at: float) -> Iterator[float]:
        """The times after `at`. Near a change of the clocks, it begins a day earlier.

        `cronsim` moves from one local time to the next, and a start within the repeated hour would
        leave open which of the two it is.
        """
        start = datetime.fromtimestamp(at, self.zone)
        if (start - _DAY).utcoffset() != (start + _DAY).utcoffset():
            start = (start - _DAY).replace(hour=0, minute=0, second=0, microsecond=0)
        last = at
        for each in self._iterate(self.expression, start):
            due = each.timestamp()
            if due > last and (not self.days or each.day in self.days):
                last = due
                yield due

    def packed(self) -> list[Any]:
        """A list: ``["cron", expression, zone]``, and the days if there are any."""
        found = ["cron", self.expression, self.tz]
        return [*found, list(self.days)] if self.days else found

    def __str__(self) -> str:
        days = f" on days {','.join(map(str, self.days))}" if self.days else ""
        return f"{self.expression} {self.tz}{days}"


@dataclass(frozen=True)
class Every:
    """Times that are multiples of some seconds since 1970-01-01 00:00 UTC."""

    seconds: float

    def after(self, at: float) -> Iterator[float]:
        """The multiples after `at`, in order."""
        number = floor(at / self.seconds) + 1
        while number * self.seconds < _LATEST:
            due = round(number * self.seconds, 3)
            if due > at:
                yield due
            number += 1

    def packed(self) -> list[Any]:
        """The list ``["every", seconds]``, as `read_trigger` takes it."""
        return ["every", self.seconds]

    def __str__(self) -> str:
        return f"every {self.seconds:g} s"


@dataclass(frozen=True)
class At:
    """One time, after which nothing is due."""

    at: float

    def after(self, at: float) -> Iterator[float]:
        """The time itself, if it is after `at`."""
        if self.at > at:
            yield self.at

    def packed(self) -> list[Any]:
        """The list ``["at", time]``, as `read_trigger` takes it."""
        return ["at", self.at]

    def __str__(self) -> str:
        return f"at {datetime.fromtimestamp(self.at, UTC):%Y-%m-%d %H:%M:%SZ}"


@dataclass(frozen=True)
class Sun:
    """Times of an event of the sun at a place, see `SUN_EVENTS`; degrees north and east.

    Where the event does not happen on a day, as in a polar night, the next one counts.
    """

    event: str
    latitude: float
    longitude: float
    _ephem: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises ConfigurationError: an unknown event or place, a missing library."""
        if self.event not in SUN_EVENTS or abs(self.latitude) > 90 or abs(self.longitude) > 180:
            raise ConfigurationError(
                f"an event of the sun is one of {', '.join(SUN_EVENTS)}, at -90 to 90 degrees "
                f"north and -180 to 180 east, not {shown(self.event)} at {self.latitude:g}, "
                f"{self.longitude:g}"
            )
        try:
            object.__setattr__(self, "_ephem", import_module("ephem"))
        except ImportError:
            raise ConfigurationError(
                "a schedule by the sun needs a package that is missing (ephem); install it with: "
                "pip install ephem"
            ) from None

    def after(self, at: float) -> Iterator[float]:
        """The times that are more than a second after `at`, in whole seconds."""
        method, horizon, centre = SUN_EVENTS[self.event]
        place = self._ephem.Observer()
        place.lat, place.lon, place.horizon = str(self.latitude), str(self.longitude), horizon
        place.elev, place.pressure = 0, 0  # as the almanacs have it
        options = {"use_center": True} if centre else {}
        start = self._ephem.Date(datetime.fromtimestamp(at, UTC).replace(tzinfo=None))
        # From another start, ephem finds the event of `at` again, a fraction of a second later.
        last = at + 1.5
        while last < _LATEST:
            try:
                found = getattr(place, method)(self._ephem.Sun(), start=start, **options)
            except self._ephem.CircumpolarError:
                start = place.next_antitransit(self._ephem.Sun(), start=start)
                continue
            due = float(round(found.datetime().replace(tzinfo=UTC).timestamp()))
            start = self._ephem.Date(found + self._ephem.minute)
            if due > last:
                last = due
                yield due

    def packed(self) -> list[Any]:
        """The list ``["sun", event, latitude, longitude]``, as `read_trigger` takes it."""
        return ["sun", self.event, self.latitude, self.longitude]

    def __str__(self) -> str:
        return f"{self.event} at {self.latitude:g}, {self.longitude:g}"


SUN_EVENTS: Final = {
    "dawn_astronomical": ("next_rising", "-18", True),
    "dawn_nautical": ("next_rising", "-12", True),
    "dawn_civil": ("next_rising", "-6", True),
    "sunrise": ("next_rising", "-0:34", False),
    "solar_noon": ("next_transit", "0", False),
    "sunset": ("next_setting", "-0:34", False),
    "dusk_civil": ("next_setting", "-6", True),
    "dusk_nautical": ("next_setting", "-12", True),
    "dusk_astronomical": ("next_setting", "-18", True),
}
"""The events by Celery's names: the method of ephem's observer, the height of the horizon in
degrees, and whether the centre of the sun counts instead of its edge."""


def trigger_of(
    where: str, cron: str | None, every: object | None, at: object | None, tz: str
) -> Trigger:
    """The trigger of these options, of which exactly one is given. Raises ConfigurationError.

    * `where`: the schedule, for the errors.
    """
    if sum(each is not None for each in (cron, every, at)) != 1:
        raise ConfigurationError(f"{where} takes one of cron=, every= and at=")
    if cron is not None:
        return Cron(cron, tz)
    zone_of(tz)
    if every is not None:
        return Every(to_seconds(every, f"{where}: every", minimum=SHORTEST_SECONDS))
    return At(round(to_epoch_seconds(at, f"{where}: at"), 3))


def read_trigger(packed: object) -> Trigger:
    """The trigger that `Trigger.packed` gave. Raises Damaged, and ConfigurationError."""
    match packed:
        case ["cron", str() as expression, str() as tz]:
            return Cron(expression, tz)
        case ["cron", str() as expression, str() as tz, [*days]] if days:
            return Cron(expression, tz, tuple(day for day in days if isinstance(day, int)))
        case ["every", int() | float() as seconds] if seconds >= SHORTEST_SECONDS:
            return Every(seconds)
        case ["at", int() | float() as at] if 0 <= at < _LATEST:
            return At(at)
        case ["sun", str() as event, int() | float() as north, int() | float() as east]:
            return Sun(event, north, east)
    raise Damaged("its times are unknown; a newer aztask may know them")


def _named(name: str) -> str:
    expression = NAMES.get(name)
    if expression is None:
        hint = " Write every=300 for every five minutes." if name.startswith("@every") else ""
        raise ConfigurationError(
            f"cron has no name {shown(name)}.{did_you_mean(name, tuple(NAMES))}{hint} It has: "
            f"{', '.join(NAMES)}."
        )
    return expression


def zone_of(name: str) -> ZoneInfo:
    """The time zone of that name. Raises ConfigurationError."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError):
        raise ConfigurationError(
            f"tz takes the name of a time zone, such as 'Europe/Berlin', not {shown(name)}; if the "
            "name is right, install the system's time zones or: pip install tzdata"
        ) from None


def next_time(trigger: Trigger, after: float) -> float | None:
    """The first time after `after`; None if there is none."""
    return next(trigger.after(after), None)


def latest_times(trigger: Trigger, after: float, until: float, limit: int) -> list[float]:
    """The last `limit` times that are after `after` and not after `until`, in order.

    It looks back step by step, so that a watermark of last year costs no more than one of
    yesterday.
    """
    span = SPAN_SECONDS
    while True:
        start = max(after, until - span)
        found = deque(takewhile(lambda due: due <= until, trigger.after(start)), maxlen=limit)
        if start == after or len(found) == limit:
            return list(found)
        span *= 8


class _Library(Protocol):
    """The parts of `cronsim` that are used here."""

    CronSim: Any
    CronSimError: type[Exception]


def _library() -> _Library:
    try:
        found: Any = import_module("cronsim")
    except ImportError:
        raise ConfigurationError(
            "a schedule with cron= needs a package that is missing (cronsim); install it with: "
            f"{install_command('schedules')}"
        ) from None
    library: _Library = found
    return library
