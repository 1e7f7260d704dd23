"""Checks of settings: each takes a setting's name and a value, and returns the value to keep.

A wrong value raises a ConfigurationError that names the setting, shows the value (never a secret)
and says what is allowed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from aztask.errors import ConfigurationError, did_you_mean
from aztask.support.display import Secret, one_line, printable
from aztask.support.durations import to_seconds

_MAKE_A_KEY: Final = "make one with python -c 'import secrets; print(secrets.token_urlsafe(32))'"

_MODULE: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\Z")

Check: TypeAlias = Callable[[str, Any], Any]


def seconds(*, least: float = 0.0) -> Check:
    """Check a duration: a number of seconds or a timedelta, at least `least` seconds."""

    def check(name: str, value: Any) -> float:
        number = to_seconds(value, name)
        if number < least:
            raise ConfigurationError(f"{name} is {number:g}; it must be at least {least:g} seconds")
        return number

    return check


def count(*, most: int = 1_000_000) -> Check:
    """Check a whole number from 1 to `most`."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigurationError(f"{name} is a whole number, not {shown(value)}")
        if not 1 <= value <= most:
            raise ConfigurationError(f"{name} is {shown(value)}; give 1 to {most:,}")
        return value

    return check


def whole_number(value: str) -> int:
    """The number in the text of a variable. Raises ConfigurationError."""
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise ConfigurationError(f"{shown(value)} is not a whole number; write digits alone")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """Return the value if it is True or False."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} is True or False, not {shown(value)}")
    return value


def text(name: str, value: Any) -> str:
    """Return the value if it is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{name} is a text that is not empty, not {shown(value)}")
    return value


def shown(value: object) -> str:
    """A wrong value for an error: short, on one line, without secrets; also a huge integer."""
    if isinstance(value, int) and value.bit_length() > 128:  # repr() would raise ValueError
        return "a number of more than 38 digits"
    return printable(value, 60) if isinstance(value, str) else one_line(repr(value), 60)


def part(least: float, most: float, *, never: float) -> Check:
    """Check a share of the lease from `least` to `most`; `never` is allowed, too."""

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigurationError(f"{name} is a part of the lease, not {shown(value)}")
        if value != never and not least <= value <= most:  # true for nan too
            raise ConfigurationError(
                f"{name} is {shown(value)}; give a part of the lease, {least:g} to {most:g}, or "
                f"{never:g} for no renewals"
            )
        return value

    return check


def one_of(choices: Sequence[str], what: str) -> Check:
    """Check that the value is one of `choices`. `what` says what they are, for the error."""

    def check(name: str, value: Any) -> str:
        if value not in choices:
            hint = did_you_mean(str(value), choices)
            raise ConfigurationError(
                f"{shown(value)} is not {what}.{hint} Use {' or '.join(choices)}."
            )
        return str(value)

    return check


def names(name: str, value: object) -> tuple[str, ...]:
    """A list of texts, which may be empty."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigurationError(f"{name} is a list of names, not {shown(value)}")
    return tuple(text(name, each) for each in value)


def some_of(choices: Sequence[str], what: str) -> Check:
    """Check a list of at least one of `choices`. `what` says what they are, for the error."""
    one = one_of(choices, what)

    def check(name: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence) or not value:
            raise ConfigurationError(f"{name} is a list of serializers, not {shown(value)}")
        return tuple(one(name, each) for each in value)

    return check


def secret(name: str, value: Any) -> Secret:
    """Wrap a text as a `Secret`."""
    return value if isinstance(value, Secret) else Secret(text(name, value))


def key(shortest: int) -> Check:
    """Check one key of at least `shortest` characters and wrap it; no error shows it."""

    def check(name: str, value: Any) -> Secret:
        if not isinstance(value, str | Secret):
            raise ConfigurationError(f"{name} is not text")
        wrapped = Secret(value) if isinstance(value, str) else value
        if len(wrapped.reveal()) < shortest:
            raise ConfigurationError(f"{name} is shorter than {shortest} characters; {_MAKE_A_KEY}")
        return wrapped

    return check


def keys_of(variable: str) -> Callable[[str], list[Secret]]:
    """Read the keys in the text of a variable or its file, separated by white space.

    Raises ConfigurationError if there is none: an empty file must not switch keys off.
    """

    def read(text: str) -> list[Secret]:
        keys = [Secret(each) for each in text.split()]
        if not keys:
            raise ConfigurationError(
                f"{variable} or its file holds no key; write a key, or unset the variable"
            )
        return keys

    return read


def switch_of(variable: str) -> Callable[[str], bool]:
    """Read a variable that is 1 or 0. Raises ConfigurationError for anything else."""

    def read(text: str) -> bool:
        if text.strip() not in ("0", "1"):
            raise ConfigurationError(f"{variable} is 1 or 0, not {shown(text)}")
        return text.strip() == "1"

    return read


def secrets(shortest: int, what: str = "signing key") -> Check:
    """Check a list of keys of at least `shortest` characters and wrap each as a `Secret`.

    No error shows a key.
    """

    def check(name: str, value: Any) -> tuple[Secret, ...]:
        if isinstance(value, str | bytes | Secret) or not isinstance(value, Sequence):
            raise ConfigurationError(f"{name} is a list of keys; write [key]")
        one = key(shortest)
        return tuple(one(f"{what} {n}", each) for n, each in enumerate(value, start=1))

    return check


def directory(name: str, value: Any) -> str:
    """Return the path of a directory as text."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigurationError(f"{name} is the path of a directory, not {shown(value)}")
    return path


def module_names(name: str, value: Any) -> tuple[str, ...]:
    """Return a list of dotted module names as a tuple."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigurationError(
            f'{name} takes a list of module names, such as ["shop.images"], not {value!r}'
        )
    for each in value:
        if not isinstance(each, str) or not _MODULE.match(each):
            raise ConfigurationError(
                f'{name} takes module names, such as "shop.images", not {each!r}'
            )
    return tuple(value)


def check_upload(directory: str | None, container: object, account: object) -> None:
    """Check that the three settings of an upload of events belong together."""
    if container is None:
        if account is not None:
            raise ConfigurationError(
                "events_account is given without events_container; name the container"
            )
    elif directory is None:
        raise ConfigurationError(
            "events_container needs a directory that the events are written to first: give "
            "events=DIRECTORY or AZTASK_EVENTS"
        )
