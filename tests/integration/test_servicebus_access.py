"""Ways to Service Bus: Entra ID over TLS, AMQP over WebSockets, and credentials that run out."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote_plus

import pytest
from azure.core.credentials import AccessToken
from harness import ROOT
from websocketfront import Front, front_of

from aztask import App
from aztask.address.addresses import ServiceBusAddress
from aztask.address.urls import parse_broker
from aztask.emulator.broker.access import sign
from aztask.emulator.emulator import server_context
from aztask.errors import AztaskError, ConfigurationError
from aztask.message.envelope import Envelope
from aztask.queues.delivery import Renewed, Settled
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.settlement import Complete
from aztask.testing import RunningEmulator, emulator

LEASE = 20.0
KEY = "key-of-this-test"
LIFE = 12.0
"""Seconds that a token of this test is good for."""


class StaticCredential:
    """Tokens as Entra ID would give them; the emulator takes every one."""

    def __init__(self, seconds: float = 3600.0) -> None:
        self.seconds = seconds
        self.scopes: list[str] = []

    def get_token(self, *scopes: str, **options: object) -> AccessToken:
        self.scopes += scopes
        return AccessToken("header.payload.signature", int(time.time() + self.seconds))


@pytest.fixture(scope="module")
def secure() -> Iterator[RunningEmulator]:
    with emulator(tls=True) as running:
        running.create_queue("q", lock_seconds=LEASE)
        yield running


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Front, Path]]:
    context, certificate = server_context(tmp_path_factory.mktemp("tls"), "localhost")
    with emulator() as bus, front_of(bus.port, context) as made:
        bus.create_queue("q", lock_seconds=LEASE)
        yield made, certificate


@pytest.fixture
def trusting(secure: RunningEmulator, monkeypatch: pytest.MonkeyPatch) -> RunningEmulator:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(secure.certificate))
    return secure


def broker_on(port: int, credential: StaticCredential, **options: bool) -> ServiceBusBroker:
    """The namespace is called localhost, and its administration is nowhere."""
    address = ServiceBusAddress("localhost")
    return ServiceBusBroker(address, credential=credential, endpoint=f"localhost:{port}", **options)


def round_trip(broker: ServiceBusBroker) -> None:
    broker.send("q", [Envelope(b"x", message_id="m"), Envelope(b"y", message_id="n")])
    receiver = broker.receiver("q", lease=LEASE)
    deliveries = []
    until = time.monotonic() + 15
    while len(deliveries) < 2 and time.monotonic() < until:
        deliveries += receiver.receive(2 - len(deliveries), 5.0)
    assert [each.envelope.body for each in deliveries] == [b"x", b"y"]
    assert all(isinstance(answer, Renewed) for answer in receiver.renew(deliveries))
    pairs = [(each, Complete()) for each in deliveries]
    assert receiver.settle(pairs) == [Settled(), Settled()]
    assert broker.peek("q") == []


def test_entra_id_over_tls(trusting: RunningEmulator) -> None:
    credential = StaticCredential()
    broker = broker_on(trusting.port, credential)
    round_trip(broker)
    broker.close()
    assert "https://servicebus.azure.net//.default" in credential.scopes


def test_a_certificate_that_nobody_vouches_for_is_refused(secure: RunningEmulator) -> None:
    broker = broker_on(secure.port, StaticCredential())
    with pytest.raises(AztaskError, match="certificate verify failed"):
        broker.send("q", [Envelope(b"x")])
    broker.close()


def test_a_token_is_renewed_before_it_runs_out(trusting: RunningEmulator) -> None:
    """One connection outlives its token: the next one is shown before the service asks."""
    credential = StaticCredential(LIFE)
    broker = broker_on(trusting.port, credential)
    receiver = broker.receiver("q", lease=LEASE)
    assert receiver.receive(1, 0.1) == []
    asked = len(credential.scopes)
    until = time.monotonic() + LIFE + 2.0
    while time.monotonic() < until:
        assert receiver.receive(1, 0.3) == []
    assert asked < len(credential.scopes) < asked + 10, "some new tokens, not one for each look"
    broker.close()


class NoToken(StaticCredential):
    """A credential that has nothing to give (any more)."""

    def get_token(self, *scopes: str, **options: object) -> AccessToken:
        raise OSError("the identity endpoint does not answer")


def test_a_credential_that_gives_nothing_is_told(trusting: RunningEmulator) -> None:
    broker = broker_on(trusting.port, NoToken())
    with pytest.raises(AztaskError, match="identity endpoint"):
        broker.send("q", [Envelope(b"x")])
    broker.close()


def test_an_app_over_entra_id(trusting: RunningEmulator) -> None:
    app = App("shop", broker=broker_on(trusting.port, StaticCredential()), lease=LEASE)
    app.send("any", queue="q")
    with app.receive("q") as lease:
        lease.complete()
    app.close()


# -- AMQP over WebSockets ------------------------------------------------------------------------


def test_websockets(front: tuple[Front, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made, certificate = front
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    broker = broker_on(made.port, StaticCredential(), websockets=True)
    round_trip(broker)
    broker.close()
    assert set(made.paths) == {"/$servicebus/websocket"}


def test_a_worker_over_websockets(front: tuple[Front, Path], tmp_path: Path) -> None:
    """The environment alone says how to get there."""
    made, certificate = front
    (tmp_path / "shop.py").write_text(
        "from aztask import App\n"
        f"app = App('shop', lease={LEASE}, results='local://')\n"
        "@app.task(queue='q')\n"
        "def double(n: int) -> int:\n"
        "    return 2 * n\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "AZTASK_APP": "shop:app",
        "AZTASK_BROKER": "Endpoint=sb://localhost/;SharedAccessKeyName=n;SharedAccessKey=a2V5",
        "AZTASK_SERVICEBUS_TRANSPORT": "websockets",
        "AZTASK_SERVICEBUS_ENDPOINT": f"localhost:{made.port}",
        "REQUESTS_CA_BUNDLE": str(certificate),
    }

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "aztask", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    for number in range(3):
        run("send", "shop.double", "--args", f"[{number}]")
    assert "3 succeeded" in run("worker", "-Q", "q", "-c", "1", "--burst", "--max-tasks", "3")


# -- signatures that run out ---------------------------------------------------------------------


def signed(bus: RunningEmulator, seconds: float) -> str:
    """A connection string that is good for so long."""
    expiry = str(int(time.time() + seconds))
    resource = quote_plus(f"sb://{bus.host}:{bus.port}/q")
    signature = quote_plus(sign(KEY, f"{resource}\n{expiry}"))
    token = f"SharedAccessSignature sr={resource}&sig={signature}&se={expiry}&skn=name"
    return (
        f"Endpoint=sb://{bus.host}:{bus.port};SharedAccessSignature={token};"
        "UseDevelopmentEmulator=true"
    )


def test_a_signature_that_runs_out_is_no_hot_loop() -> None:
    """The service ends the link; receiving says why, each time that it is tried."""
    with emulator(shared_access_key=KEY, queues=["q"]) as bus:
        address = parse_broker(signed(bus, 2.0))
        assert isinstance(address, ServiceBusAddress)
        broker = ServiceBusBroker(address, admin=bus.admin_connection_string)
        receiver = broker.receiver("q", lease=60.0)
        assert receiver.receive(1, 0.1) == []
        began, cpu, refused = time.monotonic(), time.process_time(), 0
        while time.monotonic() - began < 6.0:
            try:
                receiver.receive(1, 0.5)
            except ConfigurationError as error:
                assert "check the key" in str(error)
                refused += 1
                time.sleep(0.2)  # as a worker's intake does, at least
            except AztaskError:
                time.sleep(0.2)
        assert refused > 0
        assert time.process_time() - cpu < 4.0
        broker.close()
