"""The options of an emulator, checked and in one value."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aztask.emulator.broker.access import Rule
from aztask.errors import ConfigurationError

AMQP_PORT = 5672
AMQPS_PORT = 5671  # SDKs use it for TLS, whatever port the connection string names
ADMIN_PORT = 5300
KEY_NAME = "RootManageSharedAccessKey"
LOCAL_KEY = "SAS_KEY_VALUE"
"""The key in connection strings when none is needed, because SDKs require one."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of an emulator. Raises ConfigurationError for an invalid combination.

    host: the address to listen on.
    port, admin_port: 0 takes a free one; with admin_port None there is no administration API.
    data: the file that stores everything, None for memory.
    shared_access_key: required if `host` is not a loopback address.
    rules: further keys, by name, with fewer permissions.
    clock_offset: seconds by which the emulator's clock is ahead.
    tls: serve both ports over TLS.
    certificate: the directory of the certificate's PEM files; None for a temporary one.
    config: a configuration file, see `aztask.emulator.config`.
    queues: created at the start if they are missing.
    """

    host: str = "127.0.0.1"
    port: int = AMQP_PORT
    admin_port: int | None = ADMIN_PORT
    data: str | None = None
    shared_access_key: str | None = None
    rules: Mapping[str, Rule] = field(default_factory=dict)
    clock_offset: float = 0.0
    tls: bool = False
    certificate: Path | None = None
    config: Path | None = None
    queues: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rules and not self.shared_access_key:
            raise ConfigurationError("further keys (rules) need a main key: set shared_access_key")
        for name in ("port", "admin_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ConfigurationError(f"{name} {port} is not a port: 0 to 65535")
        if not self.shared_access_key and not is_loopback(self.host):
            raise ConfigurationError(
                f"listening on {self.host!r} admits other machines: set a shared access key"
                " (AZTASK_EMULATOR_SHARED_ACCESS_KEY) or use 127.0.0.1"
            )

    def __repr__(self) -> str:
        """Show the main options, never the key."""
        key = "***" if self.shared_access_key else None
        return f"Options({self.host}:{self.port}, admin {self.admin_port}, key {key})"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def connection_string(host: str, port: int, key: str | None, *, emulator: bool = True) -> str:
    """Return a connection string for SDKs.

    emulator: plain TCP on `port`; without it, SDKs use TLS on port 5671.
    """
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host  # noqa: S104  # shown, not bound
    text = (
        f"Endpoint=sb://{shown}:{port};SharedAccessKeyName={KEY_NAME};"
        f"SharedAccessKey={key or LOCAL_KEY}"
    )
    return f"{text};UseDevelopmentEmulator=true" if emulator else text
