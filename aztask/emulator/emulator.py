"""The emulator: opens the store, serves AMQP and the administration API, and stops cleanly."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aztask.emulator.admin.routes import AdminServer
from aztask.emulator.amqp.connection import ConnectionLimits
from aztask.emulator.broker.access import Access
from aztask.emulator.broker.broker import Locks, Service
from aztask.emulator.broker.dispatch import Committer, DeliveryDispatcher
from aztask.emulator.broker.entities import Entity
from aztask.emulator.broker.forwarding import Forwarder
from aztask.emulator.broker.namespace import Namespace
from aztask.emulator.config import Options, connection_string, read_config
from aztask.emulator.server import Server
from aztask.emulator.websocket import Doorway
from aztask.errors import ConfigurationError
from aztask.queues.engine import IN_MEMORY, Database, Engine
from aztask.support.clock import Clock, boot_seconds
from aztask.support.private import make_directory, make_file

# -- a self-signed certificate for the emulator, and the TLS context of its listeners ------
#
# The certificate is made at the first start, with the package ``cryptography``. It is its own
# authority: configure clients to trust the file.


try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    AVAILABLE = True
except ImportError:  # an extra
    AVAILABLE = False

CERTIFICATE_FILE = "aztask-emulator-cert.pem"
KEY_FILE = "aztask-emulator-key.pem"
VALID_DAYS = 365


def server_context(directory: Path, host: str) -> tuple[ssl.SSLContext, Path]:
    """Return a context for the listeners, and the certificate file that clients must trust.

    Missing files are made in `directory`. Raises ConfigurationError if that needs ``cryptography``
    and it is not installed.
    """
    certificate, key = directory / CERTIFICATE_FILE, directory / KEY_FILE
    if not certificate.exists() or not key.exists():
        if not AVAILABLE:
            raise ConfigurationError(
                "TLS needs a certificate, and making one needs the package cryptography:"
                f" pip install cryptography, or put {CERTIFICATE_FILE} and {KEY_FILE}"
                f" into {directory}"
            )
        make_directory(directory)
        _make(certificate, key, host)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate


def _make(certificate: Path, key: Path, host: str) -> None:
    """Write a key that only its owner can read, and a certificate for it."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "aztask emulator")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName(_names(host)), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    make_file(key)
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    make_file(certificate)
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def _names(host: str) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = [x509.DNSName("localhost")]
    for address in {"127.0.0.1", "::1", host}:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(address)))
        except ValueError:
            if address != "localhost":
                names.append(x509.DNSName(address))
    return names


Trace = Callable[[str, str, int, Any], None]


class Emulator:
    """One Service Bus namespace.

    Use it on an event loop: ``await start()``, later ``await stop()``. After the start, `port` and
    `admin_port` are the bound ports, and `certificate` is the file that clients must trust.
    """

    def __init__(
        self,
        options: Options,
        *,
        trace: Trace | None = None,
        limits: ConnectionLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Open the store. Nothing listens before `start`.

        trace: called with each frame, see `aztask.emulator.view`. limits: of each connection.
        clock: replaces the system's clock in tests; the options' offset is then ignored.
        """
        self.options = options
        self.port = options.port
        self.admin_port = options.admin_port
        self.certificate: Path | None = None
        offset = options.clock_offset
        self.clock = clock or Clock(boot_seconds, lambda: time.time() + offset)
        self.database = Database(options.data or IN_MEMORY)
        engine = Engine(self.database, clock=self.clock)
        self.namespace = Namespace(self.database, engine, self.clock, options.tier)
        forwarder = Forwarder(engine, self.namespace, self.clock)
        dispatcher = DeliveryDispatcher(engine, self.clock, forwarder)
        self.broker = Service(
            engine,
            self.namespace,
            Committer(self.database, lambda call: asyncio.get_running_loop().call_soon(call)),
            dispatcher,
            forwarder,
            Locks(self.clock.monotonic),
            Access(options.shared_access_key, self.clock.wall, options.rules, options.entra),
            self.clock,
            options.faults,
        )
        self.broker.committer.collector = dispatcher
        self.server = Server(self.broker, limits, trace)
        self.admin = AdminServer(self.broker, self.server)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    async def start(self) -> None:
        """Create the configured entities and listen on both ports.

        Raises OSError for a port in use, ConfigurationError.
        """
        options = self.options
        if options.config:
            for entity in read_config(options.config):
                self.namespace.ensure(entity)
        for name in options.queues:
            if self.namespace.find(name) is None:
                self.namespace.create(Entity(name))
        context = self._tls() if options.tls else None
        self.port = await self.server.start(options.host, options.port, context, Doorway)
        if options.admin_port is not None:
            self.admin_port = await self.admin.start(options.host, options.admin_port, context)

    def _tls(self) -> ssl.SSLContext:
        directory = self.options.certificate
        if directory is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="aztask-emulator-")
            directory = Path(self._temporary.name)
        context, self.certificate = server_context(directory, self.options.host)
        return context

    async def stop(self) -> None:
        """Close all connections and the store."""
        await self.server.stop()
        await self.admin.stop()
        self.broker.committer.flush()
        self.database.close()
        if self._temporary:
            self._temporary.cleanup()

    def connection_string(self) -> str:
        """Return the connection string for messaging clients."""
        options = self.options
        return connection_string(
            options.host, self.port, options.shared_access_key, emulator=not options.tls
        )

    def admin_connection_string(self) -> str:
        """Return the connection string for administration clients, with the other port."""
        port = self.admin_port if self.admin_port is not None else self.port
        options = self.options
        return connection_string(
            options.host, port, options.shared_access_key, emulator=not options.tls
        )
