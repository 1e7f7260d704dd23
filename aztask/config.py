"""The settings of an app and of its queues: frozen values that were checked when they were made.

Broker and result addresses, secrets and durations have their own modules; what others need of them
is offered here too, so that ``from aztask.config import ...`` is enough.

Rules
1. A setting that exists was checked: nobody checks it again.
2. A wrong setting is a ConfigurationError that names it, shows the value (never a secret) and says
   what is allowed; an unknown one says "did you mean".
3. Durations are seconds as floats; ``timedelta`` is accepted wherever a duration is given.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Self

from aztask.addresses import (
    BlobAddress,
    BrokerAddress,
    LocalAddress,
    ResultsAddress,
    ServiceBusAddress,
    StorageQueueAddress,
    TablesAddress,
)
from aztask.durations import parse_duration, to_seconds
from aztask.errors import ConfigurationError, did_you_mean
from aztask.lease import NO_RENEWAL
from aztask.leaseadvice import read_bounds
from aztask.masking import Secret, SecretFilter, mask, printable
from aztask.retry import RETRY_STRATEGIES, RetryStrategy, check_strategy
from aztask.urls import parse_broker, parse_container, parse_results

__all__ = [
    "Settings",
    "QueueSettings",
    "read_environment",
    "environment_options",
    # Addresses
    "parse_broker",
    "parse_results",
    "BrokerAddress",
    "ResultsAddress",
    "LocalAddress",
    "ServiceBusAddress",
    "StorageQueueAddress",
    "TablesAddress",
    # Durations
    "parse_duration",
    # Secrets
    "Secret",
    "SecretFilter",
    "mask",
    "printable",
]

LONGEST_LEASE: Final = 7 * 86400.0
"""Seconds: the longest visibility that a Storage queue grants at once, and our limit for all."""

LATEST_RENEWAL: Final = 0.85
"""The part of a lease after which a renewal would leave no room for a retry."""

SERIALIZERS: Final = ("msgpack", "json")
"""What messages are written in. Pickle and yaml run code when read: they are never accepted."""

SHORTEST_KEY: Final = 16
"""Characters of a signing key: fewer can be guessed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for a whole app. Every duration is in seconds.

    lease_seconds: how long a delivery is held before it must be renewed. max_lease_seconds: how
    long one run may hold its message in all, renewals included; longer than the lease.
    renew_at: the part of the current lease after which a renewal is due, 1 for none at all: then a
    task that takes longer than its lease is stopped, unless it extends the lease itself;
    renew_from: the part from which it may be made earlier, to batch it with others.
    max_deliveries: deliveries that were started but never finished, after which a message is
    dead-lettered. unknown_task_grace_seconds: how long a message with an unknown task name is put
    back, for rolling deploys.
    result_retention_seconds: how long results are kept. serializer: what messages are written in;
    accept: what is read. signing_keys: the first signs, all verify; empty: messages are not signed.
    poll_ceiling_seconds: the longest pause between two looks at an empty queue. retry_strategy:
    how messages that shall run again wait meanwhile, for tasks that do not say it themselves.
    max_held: messages that one worker holds at once for the strategy ``hold``; more of them wait
    until their leases lapse. events: the directory of lifecycle events, None for none.
    events_container: where workers upload the closed event files, ``blob://ACCOUNT/CONTAINER``
    (Entra ID) or ``CONTAINER`` in the account whose connection string is events_account.
    events_keep: files stay in the directory after upload, else they are removed. events_max_bytes:
    what may wait in the directory while the container is away; beyond it the oldest files are
    dropped. lease_advice: where workers and senders share what they learn about leases: ``auto``, a
    file's path or a container; None: leases stay as configured. lease_advice_account: the
    connection string of the container's account. adaptive: whether leases follow that advice;
    (least, most): in seconds, between what.
    """

    lease_seconds: float = 60.0
    max_lease_seconds: float = 3600.0
    renew_at: float = 0.7
    renew_from: float = 0.5
    max_deliveries: int = 10
    unknown_task_grace_seconds: float = 300.0
    result_retention_seconds: float = 7 * 86400.0
    serializer: str = "msgpack"
    accept: tuple[str, ...] = SERIALIZERS
    signing_keys: tuple[Secret, ...] = ()
    poll_ceiling_seconds: float = 1.0
    default_queue: str = "default"
    retry_strategy: RetryStrategy = RETRY_STRATEGIES[0]
    max_held: int = 1000
    events: str | None = None
    events_container: str | None = None
    events_account: Secret | None = None
    events_keep: bool = False
    events_max_bytes: int = 1 << 30
    lease_advice: str | None = None
    lease_advice_account: Secret | None = None
    adaptive: bool | tuple[float, float] = True

    def __post_init__(self) -> None:
        _set_seconds(self, "unknown_task_grace_seconds", "result_retention_seconds")
        _set_seconds(self, "lease_seconds", "max_lease_seconds", "poll_ceiling_seconds", least=0.01)
        _check_leases(self.lease_seconds, self.max_lease_seconds)
        _check_renewal(self.renew_from, self.renew_at)
        _check_count(self.max_deliveries, "max_deliveries")
        _check_serializers(self.serializer, self.accept)
        object.__setattr__(self, "accept", tuple(self.accept))
        object.__setattr__(self, "signing_keys", _keys(self.signing_keys))
        _check_text(self.default_queue, "default_queue")
        check_strategy(self.retry_strategy)
        _check_count(self.max_held, "max_held")
        if self.events is not None:
            object.__setattr__(self, "events", _directory(self.events))
        if isinstance(self.events_account, str):
            object.__setattr__(self, "events_account", Secret(self.events_account))
        _check_upload(self)
        if isinstance(self.lease_advice_account, str):
            object.__setattr__(self, "lease_advice_account", Secret(self.lease_advice_account))
        if self.lease_advice is None and self.lease_advice_account is not None:
            raise ConfigurationError(
                "lease_advice_account is given without lease_advice; name the container, or auto"
            )
        object.__setattr__(self, "adaptive", read_bounds(self.adaptive, self.max_lease_seconds))

    @property
    def events_target(self) -> BlobAddress | None:
        """The container that event files are uploaded to, None for none."""
        if self.events_container is None:
            return None
        account = self.events_account
        return parse_container(self.events_container, account.reveal() if account else None)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """The settings that keyword options give; ``lease`` may stand for ``lease_seconds``.

        Raises ConfigurationError on an unknown option or a value that is not allowed.
        """
        return cls(**_fields_of(cls, options, "the app"))


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """What holds for one queue. None: as the app's settings, or as the service has it.

    lease_seconds, max_lease_seconds, max_deliveries, adaptive: as in `Settings`.
    duplicate_window_seconds: within it a message id is stored once, 0 switches detection off.
    time_to_live_seconds: after it a message is dropped or dead-lettered by the service. sessions:
    messages of one session are received in order, by one receiver at a time.
    """

    name: str
    lease_seconds: float | None = None
    max_lease_seconds: float | None = None
    max_deliveries: int | None = None
    duplicate_window_seconds: float | None = None
    time_to_live_seconds: float | None = None
    sessions: bool | None = None
    adaptive: bool | tuple[float, float] | None = None

    def __post_init__(self) -> None:
        _check_text(self.name, "a queue's name")
        _set_seconds(self, "lease_seconds", "max_lease_seconds", "time_to_live_seconds", least=0.01)
        _set_seconds(self, "duplicate_window_seconds")
        if self.lease_seconds is not None and self.max_lease_seconds is not None:
            _check_leases(self.lease_seconds, self.max_lease_seconds)
        if self.max_deliveries is not None:
            _check_count(self.max_deliveries, "max_deliveries")
        if not isinstance(self.sessions, bool | None):
            raise ConfigurationError(f"sessions is True or False, not {_shown(self.sessions)}")
        if self.adaptive is not None:
            longest = self.max_lease_seconds
            object.__setattr__(self, "adaptive", read_bounds(self.adaptive, longest))

    @classmethod
    def from_options(cls, name: str, options: Mapping[str, Any]) -> Self:
        """The settings that ``app.queue(name, **options)`` gives. Raises ConfigurationError."""
        given = _fields_of(cls, options, f"the queue {_shown(name)}")
        return cls(**{**given, "name": name})

    def over(self, settings: Settings) -> Settings:
        """The app's settings with this queue's in their place.

        Raises ConfigurationError where together they make no sense, such as a queue's lease longer
        than the app's limit for all renewals.
        """
        own = {
            name: value
            for name in ("lease_seconds", "max_lease_seconds", "max_deliveries", "adaptive")
            if (value := getattr(self, name)) is not None
        }
        return replace(settings, **own)


def read_environment(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The value of the variable `name`, or the content of the file that ``NAME_FILE`` names.

    One line break at the file's end is dropped: secrets that an orchestrator mounts often have one.
    None when neither is set. Raises ConfigurationError when both are, or the file cannot be read.
    """
    value, file = environ.get(name), environ.get(f"{name}_FILE")
    if value and file:
        raise ConfigurationError(f"{name} and {name}_FILE are both set; unset one of them")
    if not file:
        return value or None
    try:
        with Path(file).open(encoding="utf-8") as stream:
            return stream.read(65536).removesuffix("\n")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a UTF-8 text file"
        raise ConfigurationError(
            f"the file {printable(file)} that {name}_FILE names cannot be read: {why}"
        ) from None


def environment_options(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The settings of an app that the environment gives: where events and lease advice go."""
    named = {
        "events": "AZTASK_EVENTS",
        "events_container": "AZTASK_EVENTS_CONTAINER",
        "events_account": "AZTASK_EVENTS_ACCOUNT",
        "lease_advice": "AZTASK_LEASE_ADVICE",
        "lease_advice_account": "AZTASK_LEASE_ADVICE_ACCOUNT",
    }
    found = {option: read_environment(name, environ) for option, name in named.items()}
    return {option: value for option, value in found.items() if value is not None}


def _fields_of(kind: Any, options: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Options as field names: a duration may leave out the ``_seconds`` at its end."""
    known = {field.name for field in fields(kind)} - {"name"}
    short = {name.removesuffix("_seconds"): name for name in known}
    given: dict[str, Any] = {}
    for option, value in options.items():
        name = option if option in known else short.get(option)
        if name is None:
            hint = did_you_mean(option, [*short, *known])
            raise ConfigurationError(f"{what} has no option {printable(option)}.{hint}")
        if name in given:
            raise ConfigurationError(f"{what} is given {name} twice; keep one of them")
        given[name] = value
    return given


def _set_seconds(settings: object, *names: str, least: float = 0.0) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is None and isinstance(settings, QueueSettings):
            continue
        number = to_seconds(value, name)
        if number < least:
            raise ConfigurationError(f"{name} is {number:g}; it must be at least {least:g} seconds")
        object.__setattr__(settings, name, number)


def _check_upload(settings: Settings) -> None:
    if not isinstance(settings.events_keep, bool):
        raise ConfigurationError(
            f"events_keep is True or False, not {_shown(settings.events_keep)}"
        )
    _check_count(settings.events_max_bytes, "events_max_bytes", most=1 << 50)
    if settings.events_target is None:
        if settings.events_account is not None:
            raise ConfigurationError(
                "events_account is given without events_container; name the container"
            )
    elif settings.events is None:
        raise ConfigurationError(
            "events_container needs a directory that the events are written to first: give "
            "events=DIRECTORY or AZTASK_EVENTS"
        )


def _check_leases(lease: float, max_lease: float) -> None:
    if lease > LONGEST_LEASE:
        raise ConfigurationError(
            f"lease_seconds is {lease:g}; no service holds a message for more than 7 days at once"
        )
    if max_lease <= lease:
        raise ConfigurationError(
            f"max_lease_seconds ({max_lease:g}) must be longer than lease_seconds ({lease:g}): "
            "it limits the lease with all its renewals; raise it or shorten the lease"
        )


def _check_renewal(renew_from: float, renew_at: float) -> None:
    for value, name in ((renew_from, "renew_from"), (renew_at, "renew_at")):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigurationError(f"{name} is a part of the lease, not {_shown(value)}")
        if name == "renew_at" and value == NO_RENEWAL:
            continue
        if not 0.05 <= value <= LATEST_RENEWAL:  # false for nan too
            raise ConfigurationError(
                f"{name} is {_shown(value)}; give a part of the lease, 0.05 to {LATEST_RENEWAL}"
                + (f", or {NO_RENEWAL:g} for no renewals" if name == "renew_at" else "")
            )
    if renew_from > renew_at:
        raise ConfigurationError(
            f"renew_from ({renew_from:g}) comes after renew_at ({renew_at:g}); lower renew_from"
        )


def _check_count(value: object, name: str, *, most: int = 1_000_000) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError(f"{name} is a whole number, not {_shown(value)}")
    if not 1 <= value <= most:
        raise ConfigurationError(f"{name} is {_shown(value)}; give 1 to {most:,}")


def _check_serializers(serializer: object, accept: object) -> None:
    if isinstance(accept, str) or not isinstance(accept, Sequence) or not accept:
        raise ConfigurationError(f"accept is a list of serializers, not {_shown(accept)}")
    for name in (serializer, *accept):
        if name not in SERIALIZERS:
            hint = did_you_mean(str(name), SERIALIZERS)
            raise ConfigurationError(
                f"{_shown(name)} is not a serializer for messages.{hint} Use msgpack or json."
            )


def _keys(given: object) -> tuple[Secret, ...]:
    """Signing keys, wrapped. No message here shows one."""
    if isinstance(given, str | bytes | Secret) or not isinstance(given, Sequence):
        raise ConfigurationError("signing_keys is a list of keys; write [key]")
    keys = []
    for number, key in enumerate(given, start=1):
        wrapped = Secret(key) if isinstance(key, str) else key
        if not isinstance(wrapped, Secret):
            raise ConfigurationError(f"signing key {number} is not text")
        if len(wrapped.reveal()) < SHORTEST_KEY:
            raise ConfigurationError(
                f"signing key {number} is shorter than {SHORTEST_KEY} characters; make one with "
                "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        keys.append(wrapped)
    return tuple(keys)


def _check_text(value: object, name: str) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{name} is a text that is not empty, not {_shown(value)}")


def _directory(value: object) -> str:
    if not isinstance(value, str | os.PathLike):
        raise ConfigurationError(f"events is the path of a directory, not {_shown(value)}")
    path = os.fspath(value)
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigurationError(f"events is the path of a directory, not {_shown(value)}")
    return path


def _shown(value: object) -> str:
    """Any wrong value, short, on one line, without secrets; also an integer of 5,000 digits."""
    if isinstance(value, int) and value.bit_length() > 128:  # repr() would raise ValueError
        return "a number of more than 38 digits"
    return printable(value, 60) if isinstance(value, str) else printable(repr(value), 60)[1:-1]
