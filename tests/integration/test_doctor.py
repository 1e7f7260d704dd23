"""``aztask doctor`` and what a worker says when it starts, on the emulator and on Azurite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import azurite
import pytest
from azure.storage.queue import (
    AccountSasPermissions,
    QueueClient,
    ResourceTypes,
    generate_account_sas,
)
from harness import ROOT

from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.testing import Right, Rule, RunningEmulator, emulator

SHOP = """
from aztask import App, RetryPolicy

app = App("shop", lease=30, results="local://")

@app.task(queue="orders", retry=RetryPolicy(max_delay=3600))
def ship(order: int) -> int:
    return order
"""
KEY = "main-key-of-this-test"
RULES = {
    "worker": Rule("worker-key", frozenset({Right.LISTEN, Right.SEND})),
    "listener": Rule("listener-key", frozenset({Right.LISTEN})),
    "sender": Rule("sender-key", frozenset({Right.SEND})),
}


@dataclass
class Shop:
    """A folder with an app; commands run there, as a user's would."""

    folder: Path
    environment: dict[str, str]

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "aztask", *arguments],
            cwd=self.folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "AZTASK_APP": "shop:app",
                **self.environment,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def doctor(self, *arguments: str, code: int) -> dict[tuple[str, str], Any]:
        """{(subject, check): finding}."""
        done = self("doctor", "-Q", "orders", "--json", *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        found = map(json.loads, done.stdout.splitlines())
        return {(each["subject"].split()[-1], each["check"]): each for each in found}


@pytest.fixture(scope="module")
def bus() -> Iterator[RunningEmulator]:
    with emulator(shared_access_key=KEY, rules=RULES) as running:
        yield running


def shop_on(bus: RunningEmulator, folder: Path, name: str | None = None, **more: str) -> Shop:
    """A shop whose key has the rights of that name."""
    folder.mkdir(exist_ok=True)
    (folder / "shop.py").write_text(SHOP)
    environment = {
        "AZTASK_BROKER": bus.connection_string,
        ADMIN_VARIABLE: bus.admin_connection_string,
    }
    if name is not None:
        for variable, text in environment.items():
            environment[variable] = text.replace("RootManageSharedAccessKey", name).replace(
                KEY, RULES[name].key
            )
    return Shop(folder, {**environment, **more})


@pytest.fixture
def shop(bus: RunningEmulator, tmp_path: Path) -> Iterator[Shop]:
    made = shop_on(bus, tmp_path / "shop")
    yield made
    made("queues", "delete", "orders", "--yes")


def levels(found: dict[tuple[str, str], Any]) -> set[str]:
    return {finding["level"] for finding in found.values()}


def test_created_examined_and_worked_on(shop: Shop) -> None:
    """`App(lease=30)` alone makes a queue that its worker takes, and the doctor finds it fine."""
    missing = shop.doctor(code=5)
    assert "aztask queues create orders" in missing["orders", "exists"]["advice"]
    assert shop("queues", "create", "orders").returncode == 0
    found = shop.doctor(code=0)
    assert levels(found) == {"ok"}, found
    assert "for 30 s" in found["orders", "lease"]["text"]
    assert "looks back 3660 s" in found["orders", "duplicates"]["text"]
    assert "after 1000 deliveries" in found["orders", "deliveries"]["text"]
    assert found["orders", "permissions"]["text"].endswith("listen, send")
    sent = shop("send", "shop.ship", "--args", "[7]")
    assert sent.returncode == 0, sent.stderr
    worked = shop("worker", "-Q", "orders", "-c", "1", "--burst")
    assert worked.returncode == 0, worked.stderr
    assert "1 succeeded" in worked.stderr
    assert "WARNING" not in worked.stderr


def test_creating_again_leaves_what_nobody_asked_to_change(shop: Shop) -> None:
    shop("queues", "create", "orders", "--duplicate-window", "0", "--max-deliveries", "50")
    again = shop("queues", "create", "orders", "--time-to-live", "1d")
    assert again.returncode == 0, again.stderr
    found = shop.doctor(code=0)
    assert "is off" in found["orders", "duplicates"]["text"]
    assert "after 50 deliveries" in found["orders", "deliveries"]["text"]
    refused = shop("queues", "create", "orders", "--duplicate-window", "10m")
    assert refused.returncode == 4
    assert "cannot change" in refused.stderr


def test_contradictions_are_found_and_the_worker_says_them_when_it_starts(shop: Shop) -> None:
    shop("queues", "create", "orders", "--duplicate-window", "1m", "--max-deliveries", "15")
    found = shop.doctor(code=0)
    assert found["orders", "duplicates"]["level"] == "warning"
    assert found["orders", "deliveries"]["level"] == "warning"
    worked = shop("worker", "-Q", "orders", "-c", "1", "--burst")
    assert worked.returncode == 0, worked.stderr
    warnings = [line for line in worked.stderr.splitlines() if " WARNING " in line]
    assert len(warnings) == 2, worked.stderr
    assert "queue orders: duplicate detection looks back 60 s, less than" in warnings[0]
    assert "after 15 deliveries, close to aztask's 10" in warnings[1]


def test_another_lease_is_a_problem_before_the_worker_meets_it(shop: Shop) -> None:
    shop("queues", "create", "orders", "--lease", "45s")
    found = shop.doctor(code=4)
    assert "45 s, but the worker requests 30 s" in found["orders", "lease"]["text"]
    assert shop.doctor("--lease", "45s", code=0)["orders", "lease"]["level"] == "ok"
    assert shop("worker", "-Q", "orders", "--burst").returncode == 4


def test_settings_that_the_service_does_not_take_are_no_outage(shop: Shop) -> None:
    refused = shop("queues", "create", "orders", "--lease", "10m")
    assert refused.returncode == 4
    assert "refused these settings of 'orders'" in refused.stderr
    shop("queues", "create", "orders")


def test_listen_and_send_suffice_for_a_worker(
    shop: Shop, bus: RunningEmulator, tmp_path: Path
) -> None:
    shop("queues", "create", "orders")
    modest = shop_on(bus, tmp_path / "modest", "worker")
    found = modest.doctor(code=0)
    assert found["orders", "settings"]["level"] == "warning"
    assert "needs the permission to manage" in found["orders", "settings"]["text"]
    assert "assumes a lease of 30 s" in found["orders", "settings"]["text"]
    assert ("orders", "lease") not in found, "what cannot be read is not guessed"
    assert found["orders", "permissions"]["text"].endswith("listen, send")
    assert modest("send", "shop.ship", "--args", "[7]").returncode == 0
    worked = modest("worker", "-Q", "orders", "-c", "1", "--burst")
    assert worked.returncode == 0, worked.stderr
    assert "1 succeeded" in worked.stderr
    assert "WARNING" not in worked.stderr
    assert modest("dlq", "list", "-Q", "orders").returncode == 0
    refused = modest("queues", "create", "another")
    assert refused.returncode == 4
    assert "needs the permission to manage" in refused.stderr


def test_a_queue_with_sessions(shop: Shop) -> None:
    shop("queues", "create", "orders", "--sessions")
    found = shop.doctor(code=4)
    assert "write app.queue('orders', sessions=True)" in found["orders", "sessions"]["advice"]
    assert found["orders", "permissions"]["text"].endswith("listen, send")
    queue = 'app.queue("orders", sessions=True)\n'
    (shop.folder / "shop.py").write_text(SHOP.replace("@app.task", f"{queue}@app.task"))
    assert levels(shop.doctor(code=0)) == {"ok"}
    shop("queues", "delete", "orders", "--yes")
    shop("queues", "create", "orders", "--no-sessions")
    assert "the queue has none" in shop.doctor(code=4)["orders", "sessions"]["text"]


@pytest.mark.parametrize(("name", "lacks"), [("listener", "send"), ("sender", "listen")])
def test_a_right_that_is_missing_is_named(
    shop: Shop, bus: RunningEmulator, tmp_path: Path, name: str, lacks: str
) -> None:
    shop("queues", "create", "orders")
    found = shop_on(bus, tmp_path / name, name).doctor(code=4)
    finding = found["orders", f"right-{lacks}"]
    assert finding["level"] == "problem"
    assert f"'{lacks.title()}' claim" in finding["text"]


def test_a_wrong_key_is_a_permission_and_shows_nowhere(
    bus: RunningEmulator, tmp_path: Path
) -> None:
    shop = shop_on(bus, tmp_path / "wrong")
    shop.environment["AZTASK_BROKER"] = bus.connection_string.replace(KEY, "wrong-key")
    done = shop("doctor", "-Q", "orders")
    assert done.returncode in (4, 5)
    assert "wrong-key" not in done.stdout + done.stderr


def test_nobody_answers(bus: RunningEmulator, tmp_path: Path) -> None:
    port = azurite.free_port()
    shop = shop_on(bus, tmp_path / "away")
    shop.environment["AZTASK_BROKER"] = bus.connection_string.replace(f":{bus.port}", f":{port}")
    shop.environment[ADMIN_VARIABLE] = bus.admin_connection_string.replace(
        f":{bus.admin_port}", f":{port}"
    )
    found = shop.doctor(code=3)
    assert found["broker", "answers"]["level"] == "problem"
    assert "no firewall lies between" in found["broker", "answers"]["advice"]
    assert found["results", "results"]["level"] == "ok", "the rest is looked at all the same"


@pytest.mark.parametrize(("offset", "way"), [(3600.0, "ahead of"), (-3600.0, "behind")])
def test_a_clock_that_is_an_hour_off(tmp_path: Path, offset: float, way: str) -> None:
    with emulator(clock_offset=offset) as bus:
        shop = shop_on(bus, tmp_path / "late")
        shop("queues", "create", "orders")
        found = shop.doctor(code=4)
        assert found["clock", "clock"]["level"] == "problem"
        assert f"s {way} this machine's" in found["clock", "clock"]["text"]
        assert abs(float(found["clock", "clock"]["text"].split()[4]) - 3600.0) < 5.0


# -- Storage queues ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[azurite.Azurite]:
    with azurite.running(tmp_path_factory.mktemp("azurite")) as running:
        yield running


def storage_shop(folder: Path, address: str) -> Shop:
    folder.mkdir(exist_ok=True)
    (folder / "shop.py").write_text(SHOP)
    return Shop(folder, {"AZTASK_BROKER": address})


def signed(server: azurite.Azurite, permission: str, seconds: float = 90 * 86400.0) -> str:
    token = generate_account_sas(
        azurite.ACCOUNT,
        azurite.KEY,
        ResourceTypes(service=True, container=True, object=True),
        AccountSasPermissions.from_string(permission),
        datetime.now(UTC) + timedelta(seconds=seconds),
    )
    return f"QueueEndpoint={server.endpoint};SharedAccessSignature={token}"


def test_storage_queues_and_their_dead_letters(storage: azurite.Azurite, tmp_path: Path) -> None:
    shop = storage_shop(tmp_path / "shop", storage.connection_string)
    assert "queues create orders" in shop.doctor(code=5)["orders", "exists"]["advice"]
    assert shop("queues", "create", "orders").returncode == 0
    found = shop.doctor(code=0)
    assert levels(found) == {"ok"}, found
    assert found["orders", "permissions"]["text"].endswith("get, add, update, delete")
    assert found["clock", "clock"]["level"] == "ok"
    client = azurite_queue(storage, "orders-poison")
    client.delete_queue()
    found = shop.doctor(code=5)
    assert "no queue for its dead letters" in found["orders", "dead-letters"]["text"]
    worked = shop("worker", "-Q", "orders", "-c", "1", "--burst")
    assert "WARNING aztask.worker: queue orders: there is no queue for its dead" in worked.stderr
    bad = shop("doctor", "-Q", "Orders")
    assert bad.returncode == 4
    assert "lower-case" in bad.stdout


def azurite_queue(storage: azurite.Azurite, name: str) -> Any:
    return QueueClient.from_connection_string(storage.connection_string, name)


def test_a_signature_with_fewer_rights(storage: azurite.Azurite, tmp_path: Path) -> None:
    shop = storage_shop(tmp_path / "shop", storage.connection_string)
    shop("queues", "create", "orders")
    modest = storage_shop(tmp_path / "modest", signed(storage, "aup"))
    found = modest.doctor(code=0)
    assert "not checked (needs the permission to read" in found["orders", "settings"]["text"]
    assert found["orders", "permissions"]["text"].endswith("get, add, update, delete")
    assert found["broker", "signature"]["level"] == "ok"
    processor = storage_shop(tmp_path / "processor", signed(storage, "rap"))
    finding = processor.doctor(code=4)["orders", "right-update"]
    assert finding["level"] == "problem"
    receiver = storage_shop(tmp_path / "receiver", signed(storage, "rup"))
    assert "lacks 'a' (add" in receiver.doctor(code=4)["orders", "right-add"]["text"]


@pytest.mark.parametrize(
    ("seconds", "level", "code"), [(86400.0, "warning", 0), (-60.0, "problem", 4)]
)
def test_a_signature_that_ends(
    storage: azurite.Azurite, tmp_path: Path, seconds: float, level: str, code: int
) -> None:
    storage_shop(tmp_path / "shop", storage.connection_string)("queues", "create", "orders")
    found = storage_shop(tmp_path / "ending", signed(storage, "raup", seconds)).doctor(code=code)
    assert found["broker", "signature"]["level"] == level
