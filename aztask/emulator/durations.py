"""ISO 8601 durations, as the service writes them: ``P14DT3H``, ``PT1M30.5S``."""

from __future__ import annotations

import re

from aztask.errors import ConfigurationError

MAX_DURATION = 922_337_203_685.0
"""Seconds of .NET's largest TimeSpan, with which the service writes "never"."""

_PATTERN = re.compile(
    r"P(?:(?P<weeks>\d+(?:\.\d+)?)W)?(?:(?P<days>\d+(?:\.\d+)?)D)?"
    r"(?:T(?:(?P<hours>\d+(?:\.\d+)?)H)?(?:(?P<minutes>\d+(?:\.\d+)?)M)?"
    r"(?:(?P<seconds>\d+(?:\.\d+)?)S)?)?\Z"
)
_SECONDS = {"weeks": 604800.0, "days": 86400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}


def parse_duration(text: str) -> float:
    """Return the seconds of a duration, at most `MAX_DURATION`. Raises ConfigurationError."""
    found = _PATTERN.match(text.strip())
    if found is None or not any(found.groups()):
        raise ConfigurationError(f"{text[:60]!r} is not a duration such as PT1M or P14D")
    total = sum(float(value) * _SECONDS[name] for name, value in found.groupdict("0").items())
    return min(total, MAX_DURATION)


def format_duration(seconds: float | None) -> str:
    """Write a duration of `seconds`; None is the service's "never"."""
    if seconds is None or seconds >= MAX_DURATION:
        return "P10675199DT2H48M5.4775807S"
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    parts = [(hours, "H"), (minutes, "M"), (round(rest, 7), "S")]
    time = "".join(f"{value:.15g}{unit}" for value, unit in parts if value)
    date = f"{days:.0f}D" if days else ""
    return f"P{date}{'T' + time if time else ''}" if date or time else "PT0S"
