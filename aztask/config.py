"""The settings of an app and of its queues: frozen values that are checked when they are made.

Addresses, secrets and durations live in modules of their own. The names that other modules need are
exported here too, so that ``from aztask.config import ...`` is enough.

Rules
1. Every setting is checked once, when it is made. No other code checks it again.
2. A wrong setting raises a ConfigurationError that names it, shows the value (never a secret) and
   says what is allowed. An unknown one says "did you mean".
3. Durations are seconds as floats; ``timedelta`` is accepted wherever a duration is given.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from aztask.address.addresses import (
    BlobAddress,
    BrokerAddress,
    LocalAddress,
    ResultsAddress,
    ServiceBusAddress,
    StorageQueueAddress,
    TablesAddress,
)
from aztask.address.priorities import check_priorities
from aztask.address.shards import check_shards
from aztask.address.urls import parse_broker, parse_container, parse_payloads, parse_results
from aztask.errors import ConfigurationError
from aztask.message.bounds import MessageLimits
from aztask.message.encryption import ContentCodec, check_codec
from aztask.queues.lease.bounds import check_leases, read_bounds
from aztask.queues.lease.state import NO_RENEWAL
from aztask.retry import RETRY_STRATEGIES, RetryStrategy, check_strategy
from aztask.support.checks import (
    check_upload,
    count,
    directory,
    flag,
    key,
    keys_of,
    names,
    one_of,
    part,
    seconds,
    secret,
    secrets,
    shown,
    some_of,
    switch_of,
    text,
    whole_number,
)
from aztask.support.display import Secret, SecretFilter, mask, printable
from aztask.support.durations import parse_duration
from aztask.support.settings import (
    check_all,
    fields_of,
    inherited,
    options_of,
    read_environment,
    setting,
    table_of,
)

__all__ = [
    "Settings",
    "QueueSettings",
    "read_environment",
    "environment_options",
    "parse_broker",
    "parse_results",
    "BrokerAddress",
    "ResultsAddress",
    "LocalAddress",
    "ServiceBusAddress",
    "StorageQueueAddress",
    "TablesAddress",
    "parse_duration",
    "Secret",
    "SecretFilter",
    "mask",
    "printable",
]

EARLIEST_RENEWAL: Final = 0.05
LATEST_RENEWAL: Final = 0.85
"""The latest share of a lease at which to renew it: later leaves no time to retry a renewal."""

SERIALIZERS: Final = ("msgpack", "json")
"""The formats of messages. Pickle and yaml are never accepted: reading them can run code."""

SHORTEST_KEY: Final = 16
"""Characters that a signing key must have at least: a shorter one can be guessed."""

SHORTEST_ENCRYPTION_KEY: Final = 32
"""Characters that an encryption key must have at least: it is guessed without asking a service."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of an app, as ``app.settings``. docs/reference/settings.md describes each one.

    Give them to `App` as keyword options; a duration leaves out ``_seconds`` there.
    """

    owner: str | None = setting(
        None,
        "str",
        text,
        "The name under which this broker's rows are kept in the result store. If you leave it "
        "out, it is made from the broker's address: the namespace's host, the storage account, or "
        "an id inside the local file. Give the same name to every program that uses the broker "
        "under another address, such as a private host name.",
        example='"shop-prod"',
        variable="AZTASK_OWNER",
    )
    lease_seconds: float = setting(
        60.0,
        "float | timedelta",
        seconds(least=0.01),
        "How long a worker holds a delivery before it must renew the lease. If you leave it out, "
        "a Storage queue gets 5 minutes, and a Service Bus queue what its lock says.",
        example="30.0",
    )
    max_lease_seconds: float = setting(
        3600.0,
        "float | timedelta",
        seconds(least=0.01),
        "How long one run may hold its message in all, renewals included. Longer than the lease.",
        example="7200.0",
    )
    renew_at: float = setting(
        0.7,
        "float",
        part(EARLIEST_RENEWAL, LATEST_RENEWAL, never=NO_RENEWAL),
        "The part of the current lease after which it is renewed, 0.05 to 0.85. 1 switches "
        "renewals off: a task that takes longer than its lease is then stopped, unless it extends "
        "the lease itself.",
        example="0.6",
    )
    max_deliveries: int = setting(
        10,
        "int",
        count(),
        "How often a message may be started without ever finishing. After that it is "
        "dead-lettered with the reason `delivery-limit`.",
        example="5",
    )
    max_steps: int = setting(
        1000, "int", count(most=100_000), "How many steps one task may record.", example="200"
    )
    max_wait_seconds: float = setting(
        90 * 86400.0, "float | timedelta", seconds(), "The longest `context.sleep`.", example="60.0"
    )
    unknown_task_grace_seconds: float = setting(
        300.0,
        "float | timedelta",
        seconds(),
        "How long a message with an unknown task name is put back, for rolling deploys, before it "
        "is dead-lettered.",
        example="600.0",
    )
    result_retention_seconds: float = setting(
        7 * 86400.0, "float | timedelta", seconds(), "How long results are kept.", example="86400.0"
    )
    serializer: str = setting(
        SERIALIZERS[0],
        "str",
        one_of(SERIALIZERS, "a serializer for messages"),
        "The format in which messages are written: `msgpack` or `json`.",
        example='"json"',
    )
    accept: tuple[str, ...] = setting(
        SERIALIZERS,
        "Sequence[str]",
        some_of(SERIALIZERS, "a serializer for messages"),
        "The formats that are read. Pickle and yaml are never among them.",
        example='["json"]',
    )
    signing_keys: tuple[Secret, ...] = setting(
        (),
        "Sequence[str | Secret]",
        secrets(SHORTEST_KEY),
        "Keys that sign messages: the first signs, all verify. Without keys nothing is signed. The "
        "variable holds one key, or several with spaces or line breaks between them.",
        example="[key]",
        variable="AZTASK_SIGNING_KEYS",
        from_text=keys_of("AZTASK_SIGNING_KEYS"),
    )
    id_key: Secret | None = setting(
        None,
        "str | Secret",
        key(SHORTEST_KEY),
        "Makes message ids that strangers cannot guess. Do not rotate it with the signing keys.",
        example="key",
        variable="AZTASK_ID_KEY",
    )
    encryption_keys: tuple[Secret, ...] = setting(
        (),
        "Sequence[str | Secret]",
        secrets(SHORTEST_ENCRYPTION_KEY, "encryption key"),
        "Keys that decrypt what other programs have encrypted: the first also encrypts, if "
        "`encrypt` is True. Give them to all programs before that.",
        example="[key]",
        variable="AZTASK_ENCRYPTION_KEYS",
        from_text=keys_of("AZTASK_ENCRYPTION_KEYS"),
    )
    encrypt: bool = setting(
        False,
        "bool",
        flag,
        "Encrypt what is sent and stored. The variable is 1 or 0.",
        example="False",
        variable="AZTASK_ENCRYPT",
        from_text=switch_of("AZTASK_ENCRYPT"),
    )
    content_codec: ContentCodec | None = setting(
        None, "ContentCodec", check_codec, "Encrypts in place of keys.", example="VaultCodec()"
    )
    old_signatures: bool = setting(
        True,
        "bool",
        flag,
        "Also take the signatures of aztask 0.1, and obey unsigned rows. aztask 0.3 refuses both.",
        example="False",
    )
    signature_max_age_seconds: float = setting(
        0.0,
        "float | timedelta",
        seconds(),
        "Refuse signed messages that could first be received longer ago than this; 0 for no limit. "
        "Choose more than your longest backlog, retry delay and run together.",
        example="86400.0",
    )
    signature_clock_skew_seconds: float = setting(
        300.0,
        "float | timedelta",
        seconds(),
        "By how much the clocks of senders and workers may differ, for `signature_max_age`.",
        example="60.0",
    )
    environment: str | None = setting(
        None,
        "str",
        text,
        "A name that is part of every signature, such as staging: with the same keys, messages of "
        "another environment are refused. Set it everywhere at once: it ends `old_signatures`.",
        example='"staging"',
        variable="AZTASK_ENVIRONMENT",
    )
    version: str | None = setting(
        None, "str", text, "The version of the app.", example='"7.1"', variable="AZTASK_APP_VERSION"
    )
    celery_may_send: tuple[str, ...] | None = setting(
        None, "Sequence[str]", names, "Further tasks that Celery may have sent.", example='["pay"]'
    )
    strict: bool = setting(
        False, "bool", flag, "Refuse arguments of other types than annotated.", example="True"
    )
    argsrepr: bool = setting(
        False, "bool", flag, "Write `argsrepr` and `kwargsrepr` for Celery.", example="True"
    )
    poll_ceiling_seconds: float = setting(
        1.0,
        "float | timedelta",
        seconds(least=0.01),
        "The longest pause between two polls of an empty Storage queue.",
        example="10.0",
    )
    default_queue: str = setting(
        "default", "str", text, "The queue of tasks that set none.", example='"orders"'
    )
    retry_strategy: RetryStrategy = setting(
        RETRY_STRATEGIES[0],
        "RetryStrategy",
        lambda name, value: check_strategy(value, name),
        "How a message waits for its retry, for tasks that set no strategy.",
        example='"hold"',
    )
    max_held: int = setting(
        1000,
        "int",
        count(),
        "How many messages one worker holds at once for the strategy `hold`. More of them wait "
        "until their leases end.",
        example="200",
    )
    events: str | None = setting(
        None,
        "str | os.PathLike[str]",
        directory,
        "The directory for lifecycle events.",
        example='"events"',
        variable="AZTASK_EVENTS",
    )
    events_container: str | None = setting(
        None,
        "str",
        text,
        "Where workers upload closed event files: `blob://ACCOUNT/CONTAINER` (Entra ID), or "
        "`CONTAINER` in the account of `events_account`.",
        example='"blob://shop/events"',
        variable="AZTASK_EVENTS_CONTAINER",
    )
    events_account: Secret | None = setting(
        None,
        "str | Secret",
        secret,
        "The connection string of the account that holds `events_container`.",
        example="connection_string",
        variable="AZTASK_EVENTS_ACCOUNT",
    )
    events_retention_seconds: float = setting(
        30 * 86400.0,
        "float | timedelta",
        seconds(least=60.0),
        "How long closed event files stay in the directory. With a container, only files that are "
        "uploaded and kept are deleted.",
        example="90 * 86400.0",
    )
    events_keep: bool = setting(
        False, "bool", flag, "Keep event files in the directory after upload.", example="True"
    )
    events_max_bytes: int = setting(
        1 << 30,
        "int",
        count(most=1 << 50),
        "How many bytes may wait in the directory while the container is unreachable. Beyond that "
        "the oldest files are dropped.",
        example="100_000_000",
    )
    lease_advice: str | None = setting(
        None,
        "str",
        text,
        "Where workers and senders share what they learn about leases: `auto`, a file's path, or a "
        "container. Without it leases stay as configured.",
        example='"auto"',
        variable="AZTASK_LEASE_ADVICE",
    )
    lease_advice_account: Secret | None = setting(
        None,
        "str | Secret",
        secret,
        "The connection string of the account that holds the container of `lease_advice`.",
        example="connection_string",
        variable="AZTASK_LEASE_ADVICE_ACCOUNT",
    )
    payloads: str | None = setting(
        None,
        "str",
        directory,
        "Where arguments, checkpoints and results are stored that are too large for the queue: "
        "`blob://ACCOUNT/CONTAINER` (Entra ID), `CONTAINER` in the account of `payloads_account`, "
        "the path of a directory with a slash in it, or `off`. Without it, `local://FILE` uses the "
        "directory `FILE.payloads`, and other brokers refuse large arguments.",
        example='"blob://shop/payloads"',
        variable="AZTASK_PAYLOADS",
    )
    payloads_account: Secret | None = setting(
        None,
        "str | Secret",
        secret,
        "The connection string of the account that holds the container of `payloads`.",
        example="connection_string",
        variable="AZTASK_PAYLOADS_ACCOUNT",
    )
    payload_threshold: int | None = setting(
        None,
        "int",
        count(most=MessageLimits().body_bytes),
        "Encoded arguments and results of more bytes are stored in `payloads`, and checkpoints of "
        "an eighth of that (on `local://`, of as much). Without it: arguments of 32 KiB on Storage "
        "queues, 192 KiB on Service Bus, 16 MiB on `local://`; results of 16 MiB.",
        example="100_000",
        variable="AZTASK_PAYLOAD_THRESHOLD",
        from_text=whole_number,
    )
    payload_lifetime_seconds: float = setting(
        30 * 86400.0,
        "float | timedelta",
        seconds(least=3600.0),
        "How long `aztask doctor --collect` keeps payloads of messages that it cannot see. Choose "
        "more than your longest delay and the time that you keep dead letters.",
        example="90 * 86400.0",
    )
    adaptive: bool | tuple[float, float] = setting(
        True,
        "bool | tuple[float | timedelta, float | timedelta]",
        lambda name, value: read_bounds(value, None),
        "True if leases follow that advice; or `(least, most)`, the bounds for it in seconds.",
        example="(30.0, 600.0)",
    )

    def __post_init__(self) -> None:
        check_all(self)
        check_leases(self.lease_seconds, self.max_lease_seconds)
        check_upload(self.events, self.events_target, self.events_account)
        if self.lease_advice is None and self.lease_advice_account is not None:
            raise ConfigurationError(
                "lease_advice_account is given without lease_advice; name the container, or auto"
            )
        read_bounds(self.adaptive, self.max_lease_seconds)
        if self.payloads is None and self.payloads_account is not None:
            raise ConfigurationError(
                "payloads_account is given without payloads; name the container"
            )
        parse_payloads(self.payloads, self.payloads_account)

    @property
    def events_target(self) -> BlobAddress | None:
        """The container that event files are uploaded to, or None."""
        if self.events_container is None:
            return None
        account = self.events_account
        return parse_container(self.events_container, account.reveal() if account else None)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Make settings from keyword options; ``lease`` is short for ``lease_seconds``, and so on.

        Raises ConfigurationError if an option is unknown or its value is not allowed.
        """
        return cls(**fields_of(cls, options, "the app"))


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The settings of one queue, made by ``app.queue(name, ...)``.

    None means: as the app's settings say, or as the queue is configured in the service.
    """

    name: str
    lease_seconds: float | None = inherited(Settings, "lease_seconds")
    max_lease_seconds: float | None = inherited(Settings, "max_lease_seconds")
    max_deliveries: int | None = inherited(Settings, "max_deliveries")
    duplicate_window_seconds: float | None = setting(
        None,
        "float | timedelta",
        seconds(),
        "The service stores a message id once within this window. 0 switches detection off.",
        example="600.0",
    )
    time_to_live_seconds: float | None = setting(
        None,
        "float | timedelta",
        seconds(least=0.01),
        "After it the service drops or dead-letters a message.",
        example="86400.0",
    )
    sessions: bool | None = setting(
        None,
        "bool",
        flag,
        "Messages of one session are received in order, by one receiver at a time.",
        example="True",
    )
    adaptive: bool | tuple[float, float] | None = inherited(Settings, "adaptive")
    signature_max_age_seconds: float | None = inherited(Settings, "signature_max_age_seconds")
    priorities: Mapping[str, int] | None = setting(
        None,
        "Mapping[str, int]",
        check_priorities,
        "Its priorities with their weights. Each has a queue of its own, such as `slow-high`.",
        example='{"high": 4, "low": 1}',
    )
    shards: int | None = setting(
        None, "int", check_shards, "Over how many queues of the service it is spread.", example="16"
    )
    old_shards: int | None = setting(
        None, "int", check_shards, "How many it had before: workers empty those too.", example="32"
    )

    def __post_init__(self) -> None:
        text("a queue's name", self.name)
        check_all(self)
        if self.lease_seconds is not None and self.max_lease_seconds is not None:
            check_leases(self.lease_seconds, self.max_lease_seconds)
        if self.adaptive is not None:
            read_bounds(self.adaptive, self.max_lease_seconds)

    @classmethod
    def from_options(cls, name: str, options: Mapping[str, Any]) -> Self:
        """Make settings from the options of ``app.queue(...)``. Raises ConfigurationError."""
        given = fields_of(cls, options, f"the queue {shown(name)}")
        return cls(**{**given, "name": name})

    def over(self, settings: Settings) -> Settings:
        """The app's settings with this queue's values in their place.

        Raises ConfigurationError if they contradict each other, for example if the queue's lease is
        longer than the app's ``max_lease_seconds``.
        """
        shared = table_of(Settings).keys() & table_of(QueueSettings).keys()
        own = {name: value for name in shared if (value := getattr(self, name)) is not None}
        return replace(settings, **own)


def environment_options(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The app settings that environment variables give. Raises ConfigurationError."""
    return options_of(Settings, environ)
