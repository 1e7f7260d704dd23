"""Entra ID with azure-identity's real code against a token service on this machine.

Service Bus is the emulator, which verifies the tokens and knows what each identity may do. Storage
queues are Azurite, which verifies issuer, audience and time. Both are over TLS, as the SDKs demand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import azurite
import pytest
from harness import ROOT, wait_until
from identityservice import APP_SERVICE, CLIENT, HEADER, PRINCIPAL, SECRET, TENANT, IdentityService
from tokenservice import new_key

from aztask import App
from aztask.address.addresses import ServiceBusAddress, StorageQueueAddress
from aztask.azure.access import named_credential
from aztask.emulator.broker.entities import Entity
from aztask.emulator.config import Options
from aztask.emulator.emulator import KEY_FILE, Emulator
from aztask.errors import AztaskError, ConfigurationError
from aztask.message.envelope import Envelope
from aztask.operate.verify import verify
from aztask.operate.verifyroles import VARIABLES
from aztask.queues.base import Broker
from aztask.queues.delivery import Renewed, Settled
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.queues.storagequeue.broker import StorageQueueBroker
from aztask.settlement import Complete
from aztask.testing import EntraTokens, Right
from aztask.testing.servicebus import BackgroundEmulator

LEASE = 6.0
LIFE = 12
"""Seconds that a short token is valid."""
WORKS = LIFE + 8.0
"""Seconds that a task takes which outlives its worker's first token."""
VARIABLES_OF_IDENTITY = (
    *("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID", "AZURE_FEDERATED_TOKEN_FILE"),
    *("AZURE_AUTHORITY_HOST", "AZURE_POD_IDENTITY_AUTHORITY_HOST", "AZURE_TOKEN_CREDENTIALS"),
    *("IDENTITY_ENDPOINT", "IDENTITY_HEADER", "MSI_ENDPOINT", "MSI_SECRET"),
)
REVOKED = {"error": "invalid_client", "error_description": "AADSTS7000222: the secret has expired"}
BOTH = frozenset({Right.SEND, Right.LISTEN})


@dataclass
class Cloud:
    """A token service, the emulator and Azurite, all with one certificate."""

    identity: IdentityService
    bus: Emulator
    account: azurite.Azurite
    grants: dict[str, frozenset[Right]]

    def broker(self, service: str, **options: Any) -> Broker:
        if service == "Service Bus":
            endpoint = f"localhost:{self.bus.port}"
            return ServiceBusBroker(ServiceBusAddress("localhost"), endpoint=endpoint, **options)
        return StorageQueueBroker(
            StorageQueueAddress(azurite.ACCOUNT, self.account.endpoint), **options
        )

    def ways(self, folder: Path) -> dict[str, dict[str, str]]:
        """The environment of a process for each way to a token."""
        file = folder / "federated-token"
        file.write_text("a token of the cluster")
        self.identity.federated = file.read_text()
        host = {"AZURE_AUTHORITY_HOST": self.identity.authority}
        application = {**host, "AZURE_TENANT_ID": TENANT, "AZURE_CLIENT_ID": CLIENT}
        return {
            "secret": {**application, "AZURE_CLIENT_SECRET": SECRET},
            "workload": {**application, "AZURE_FEDERATED_TOKEN_FILE": str(file)},
            "app-service": {
                "IDENTITY_ENDPOINT": f"{self.identity.authority}{APP_SERVICE}",
                "IDENTITY_HEADER": HEADER,
            },
            "machine": {"AZURE_POD_IDENTITY_AUTHORITY_HOST": self.identity.authority},
        }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    folder = tmp_path_factory.mktemp("cloud")
    identity = IdentityService(folder, new_key())
    pair = (identity.certificate, identity.certificate.with_name(KEY_FILE))
    grants = {PRINCIPAL: BOTH}
    tokens = EntraTokens(identity.jwks(), grants)
    try:
        with (
            BackgroundEmulator(
                Options(port=0, admin_port=0, tls=True, certificate=folder, entra=tokens)
            ) as bus,
            azurite.running(folder / "data", certificate=pair, oauth=True) as account,
        ):
            bus.emulator.namespace.create(Entity("orders", lock_seconds=LEASE))
            yield Cloud(identity, bus.emulator, account, grants)
    finally:
        identity.close()


@pytest.fixture
def cloud(made: Cloud, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    for name in VARIABLES_OF_IDENTITY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(made.identity.certificate))
    made.identity.life, made.identity.ahead, made.identity.away = 3600, 0, None
    made.identity.given.clear()
    made.grants.update({PRINCIPAL: BOTH})
    return made


def use(monkeypatch: pytest.MonkeyPatch, names: dict[str, str]) -> None:
    for name, value in names.items():
        monkeypatch.setenv(name, value)


def round_trip(broker: Broker) -> None:
    broker.send("orders", [Envelope(b"x", message_id="m")])
    receiver = broker.receiver("orders", lease=LEASE)
    deliveries: list[Any] = []
    until = time.monotonic() + 20
    while not deliveries and time.monotonic() < until:
        deliveries += receiver.receive(1, 5.0)
    assert [each.envelope.body for each in deliveries] == [b"x"]
    assert all(isinstance(answer, Renewed) for answer in receiver.renew(deliveries))
    assert receiver.settle([(deliveries[0], Complete())]) == [Settled()]
    receiver.close()


# -- the chain of azure-identity -------------------------------------------------------------------


@pytest.mark.parametrize("service", ["Service Bus", "Storage queue"])
@pytest.mark.parametrize("way", ["secret", "workload", "app-service", "machine"])
def test_each_way_to_a_token(
    way: str, service: str, cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, cloud.ways(tmp_path)[way])
    broker = cloud.broker(service)
    if service == "Storage queue":
        broker.declare("orders")
    round_trip(broker)
    broker.close()
    assert set(cloud.identity.given) == {way}
    assert "/common/discovery/instance" not in cloud.identity.served


@pytest.mark.parametrize(
    ("way", "name", "text"),
    [
        ("secret", "AZURE_CLIENT_SECRET", "AADSTS7000215"),
        ("workload", "AZURE_FEDERATED_TOKEN_FILE", "AADSTS7000215"),
        ("app-service", "IDENTITY_HEADER", "invalid_scope"),
    ],
)
def test_a_wrong_credential_is_told_in_one_line(
    way: str, name: str, text: str, cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong").write_text("wrong")
    value = str(tmp_path / "wrong") if name.endswith("FILE") else "wrong"
    use(monkeypatch, {**cloud.ways(tmp_path)[way], name: value, "AZURE_TOKEN_CREDENTIALS": "prod"})
    broker = cloud.broker("Service Bus")
    with pytest.raises(AztaskError) as caught:
        broker.send("orders", [Envelope(b"x")])
    broker.close()
    assert text in str(caught.value)
    assert "EnvironmentCredential" not in str(caught.value) or way == "secret", (
        "of the one that counts"
    )
    assert "\n" not in str(caught.value)


def test_a_role_that_is_missing_is_refused_and_so_is_a_token_that_others_signed(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, cloud.ways(tmp_path)["secret"])
    cloud.grants[PRINCIPAL] = frozenset({Right.LISTEN})
    broker = cloud.broker("Service Bus")
    with pytest.raises(ConfigurationError, match="check the key, the permissions"):
        broker.send("orders", [Envelope(b"x")])
    broker.close()
    cloud.grants[PRINCIPAL] = BOTH
    key, cloud.identity.key = cloud.identity.key, new_key()
    broker = cloud.broker("Service Bus")
    with pytest.raises(ConfigurationError, match="signature does not match"):
        broker.send("orders", [Envelope(b"x")])
    broker.close()
    cloud.identity.key = key


@pytest.mark.parametrize(("ahead", "text"), [(3600, "valid in 3"), (-7200, "expired 3")])
def test_clocks_that_differ_are_named(
    ahead: int, text: str, cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service and who gives out the tokens disagree about the time."""
    use(monkeypatch, cloud.ways(tmp_path)["secret"])
    cloud.identity.ahead = ahead
    broker = cloud.broker("Service Bus")
    with pytest.raises(ConfigurationError, match="this machine's clock") as caught:
        broker.send("orders", [Envelope(b"x")])
    assert text in str(caught.value)
    cloud.identity.ahead = 60
    cloud.identity.life = 3600
    broker.close()


def test_verify_tries_a_role_with_an_identity_of_its_own(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azurite has no roles: with any token everything is allowed, and the check says so."""
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", cloud.identity.authority)
    monkeypatch.setenv(VARIABLES["worker"], f"entra:{TENANT}/{CLIENT}/{SECRET}")
    use(monkeypatch, cloud.ways(tmp_path)["app-service"])
    monkeypatch.setenv(VARIABLES["operator"], f"entra:{CLIENT}")
    app = App("shop", broker=cloud.account.connection_string)
    worker, operator = verify(app, ["role-worker", "role-operator"])
    app.close()
    assert worker.state == "failed"
    assert "may count, which it does not need: it has more than the role" in worker.text
    assert (operator.state, operator.text) == (
        "passed",
        "may send, receive, count, manage; was refused: nothing",
    )
    assert set(cloud.identity.given) == {"secret", "app-service"}


def test_an_identity_in_another_form_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="TENANT_ID/CLIENT_ID/SECRET"):
        named_credential("tenant/client")


# -- workers ---------------------------------------------------------------------------------------

WORKER = """
import os, time
from aztask import App
from aztask.address.addresses import ServiceBusAddress, StorageQueueAddress
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.queues.storagequeue.broker import StorageQueueBroker

if os.environ["SERVICE"] == "Service Bus":
    broker = ServiceBusBroker(ServiceBusAddress("localhost"), endpoint=os.environ["ENDPOINT"])
else:
    broker = StorageQueueBroker(StorageQueueAddress("devstoreaccount1", os.environ["ENDPOINT"]))
app = App("shop", broker=broker, lease=float(os.environ["LEASE"]), results="local://")

@app.task(queue="orders")
def work(name, seconds):
    with open("starts", "a") as file:
        file.write(name + "\\n")
    time.sleep(seconds)
    with open("ends", "a") as file:
        file.write(name + "\\n")
"""


class Worker:
    """A worker with an identity, in a process of its own."""

    def __init__(self, cloud: Cloud, service: str, folder: Path, way: str) -> None:
        (folder / "shop.py").write_text(WORKER)
        endpoint = cloud.account.endpoint
        if service == "Service Bus":
            endpoint = f"localhost:{cloud.bus.port}"
        self.folder, self.log = folder, folder / "log"
        self.environment = {
            **{name: v for name, v in os.environ.items() if name not in VARIABLES_OF_IDENTITY},
            **cloud.ways(folder)[way],
            "PYTHONPATH": str(ROOT),
            "AZTASK_APP": "shop:app",
            "SERVICE": service,
            "ENDPOINT": endpoint,
            "LEASE": str(LEASE),
            "REQUESTS_CA_BUNDLE": str(cloud.identity.certificate),
        }
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "aztask", "worker", "-Q", "orders", "-c", "1"],
                cwd=folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def send(self, name: str, seconds: float) -> None:
        arguments = f'["{name}", {seconds}]'
        done = subprocess.run(
            [sys.executable, "-m", "aztask", "send", "shop.work", "--args", arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().split() if file.exists() else []

    def stop(self) -> str:
        self.process.terminate()
        try:
            assert self.process.wait(30) == 0, self.log.read_text()
        finally:
            self.process.kill()
        return self.log.read_text(errors="replace")


@pytest.mark.parametrize("service", ["Service Bus", "Storage queue"])
def test_a_token_expires_in_the_middle_of_a_lease_and_the_lease_is_kept(
    service: str, cloud: Cloud, tmp_path: Path
) -> None:
    declare_on_azurite(cloud)
    cloud.identity.life = LIFE
    worker = Worker(cloud, service, tmp_path, "workload")
    try:
        worker.send("long", WORKS)
        wait_until(lambda: worker.lines("ends") == ["long"], 90, "it has ended")
        worker.send("next", 0)
        wait_until(lambda: worker.lines("ends") == ["long", "next"], 60, "so has the next one")
    finally:
        log = worker.stop()
    assert worker.lines("starts") == ["long", "next"], f"each ran once: {log}"
    assert len(cloud.identity.given) > 2
    assert " lost" not in log


def declare_on_azurite(cloud: Cloud) -> None:
    os.environ["AZURE_AUTHORITY_HOST"] = cloud.identity.authority
    try:
        credential = named_credential(f"{TENANT}/{CLIENT}/{SECRET}")
    finally:
        del os.environ["AZURE_AUTHORITY_HOST"]
    manager = cloud.broker("Storage queue", credential=credential)
    manager.declare("orders")
    manager.close()


@pytest.mark.parametrize(
    ("revoked", "service"),
    [("role", "Service Bus"), ("identity", "Service Bus"), ("identity", "Storage queue")],
)
def test_a_worker_whose_identity_is_revoked_says_so_and_goes_on_when_it_is_accepted_again(
    revoked: str, service: str, cloud: Cloud, tmp_path: Path
) -> None:
    """Its role is taken away, or the token service gives it none any more."""
    declare_on_azurite(cloud)
    cloud.identity.life = LIFE
    worker = Worker(cloud, service, tmp_path, "secret")
    try:
        worker.send("first", 0)
        wait_until(lambda: worker.lines("ends") == ["first"], 60, "the first has ended")
        if revoked == "role":
            cloud.grants.pop(PRINCIPAL)
        else:
            cloud.identity.away = (401, json.dumps(REVOKED))
        said = "has no role here" if revoked == "role" else "AADSTS7000222"
        wait_until(lambda: said in worker.log.read_text(errors="replace"), 60, "it says so")
        time.sleep(6.0)
        assert worker.process.poll() is None, "it waits"
        told = [line for line in worker.log.read_text().splitlines() if said in line]
        assert len([line for line in told if "cannot receive" in line]) == 1, "one line"
        assert len(told) <= 8, "its other parts say it, too, and none in a loop"
        cloud.grants.update({PRINCIPAL: BOTH})
        cloud.identity.away = None
        worker.send("second", 0)
        wait_until(lambda: worker.lines("ends") == ["first", "second"], 60, "it goes on")
    finally:
        log = worker.stop()
    assert "Traceback" not in log
    assert not any(token in log for token in cloud.identity.tokens)
