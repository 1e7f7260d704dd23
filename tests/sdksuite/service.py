"""The emulator that stands for Service Bus, with TLS and keys, where the SDK expects the service.

The suite knows a namespace by its host name alone and connects to the ports 5671 and 443. Here the
host is ``localhost``, and connections to these two ports go to the emulator's.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import certifi
from azure.servicebus.management import ServiceBusAdministrationClient

from aztask.emulator.broker.entities import Tier
from aztask.emulator.config import Options
from aztask.emulator.emulator import CERTIFICATE_FILE, Emulator, server_context
from aztask.testing import Right, Rule
from aztask.testing.servicebus import BackgroundEmulator

HOST = "localhost"
CERTIFICATES = "SUITE_CERTIFICATES"
"""The variable with the folder of the emulator's key and certificate."""
POLICY = "RootManageSharedAccessKey"
KEY = "suite-key"
RULES = {right.value: Rule(f"{right.value}-key", frozenset({right})) for right in Right}


def rule_name(rights: list[str]) -> str:
    """The key with the least of these rights; Manage includes the others."""
    return POLICY if Right.MANAGE.value in rights else rights[0]


def key_of(name: str) -> str:
    """The secret of a key."""
    return RULES[name].key if name in RULES else KEY


def connection_string(name: str = POLICY, entity: str | None = None) -> str:
    """A connection string as the service's portal shows it."""
    path = f";EntityPath={entity}" if entity else ""
    key = key_of(name)
    return f"Endpoint=sb://{HOST}/;SharedAccessKeyName={name};SharedAccessKey={key}{path}"


def administration() -> ServiceBusAdministrationClient:
    """A client that creates and deletes what tests ask for."""
    return ServiceBusAdministrationClient.from_connection_string(connection_string())


def trust(folder: Path) -> dict[str, str]:
    """Environment variables for a process that is to trust the certificate in the folder, which is
    made when it is missing. aiohttp reads them when it is imported.
    """
    server_context(folder, "127.0.0.1")
    certificate = str(folder / CERTIFICATE_FILE)
    return {
        CERTIFICATES: str(folder),
        "SSL_CERT_FILE": certificate,
        "REQUESTS_CA_BUNDLE": certificate,
    }


@contextmanager
def service() -> Iterator[None]:
    """The emulator runs, and is reached, for the block."""
    folder = Path(os.environ[CERTIFICATES])
    options = Options(
        port=0,
        admin_port=0,
        tls=True,
        certificate=folder,
        shared_access_key=KEY,
        rules=RULES,
        tier=Tier.STANDARD,  # the one that the suite expects
    )
    with BackgroundEmulator(options) as background, _reached(background.emulator):
        yield


@contextmanager
def _reached(emulator: Emulator) -> Iterator[None]:
    ports = {5671: emulator.port, 443: emulator.admin_port}
    hosts = {"127.0.0.1", HOST}
    connect = socket.socket.connect

    def redirected(self: socket.socket, address: tuple[str, int]) -> None:
        host, port = address[:2]
        connect(self, (host, ports.get(port, port)) if host in hosts else address)

    with (
        patch.object(socket.socket, "connect", redirected),
        patch.object(certifi, "where", lambda: str(emulator.certificate)),
    ):
        yield
