"""Configuration errors of one queue: told once, when it is used first, and never as an outage."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote_plus

import pytest
from harness import ROOT

from aztask import App
from aztask.emulator.broker.access import sign
from aztask.errors import ConfigurationError
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.testing import RunningEmulator, emulator

LEASE = 20.0
KEY = "key-of-this-test"
SHOP = f"""
from aztask import App

app = App("shop", lease={LEASE}, results="local://")

@app.task(queue="orders")
def charge(number: int) -> int:
    return number

@app.task(queue="images")
def resize(number: int) -> int:
    return number
"""
CONFIGURATION = 4


@pytest.fixture(scope="module")
def bus() -> Iterator[RunningEmulator]:
    with emulator(shared_access_key=KEY) as running:
        for queue in ("orders", "images"):
            running.create_queue(queue, lock_seconds=LEASE)
        yield running


class Shop:
    def __init__(self, folder: Path, bus: RunningEmulator, broker: str) -> None:
        self._folder = folder
        (folder / "shop.py").write_text(SHOP)
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "AZTASK_APP": "shop:app",
            "AZTASK_BROKER": broker,
            ADMIN_VARIABLE: bus.admin_connection_string,
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "aztask", *arguments],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )


def for_orders(bus: RunningEmulator, name: str = "orders") -> str:
    return f"{bus.connection_string};EntityPath={name}"


@pytest.fixture
def shop(bus: RunningEmulator, tmp_path: Path) -> Shop:
    return Shop(tmp_path, bus, for_orders(bus))


def assert_told(done: subprocess.CompletedProcess[str]) -> None:
    """Both queues and what to do, once, on one line, and not as an outage or a bug."""
    assert done.returncode == CONFIGURATION, done.stderr
    errors = [line for line in done.stderr.splitlines() if "aztask: error:" in line]
    assert len(errors) == 1, done.stderr
    assert done.stderr.count("EntityPath") == 2, done.stderr  # both are in that line
    for part in ("'orders'", "'images'", "without EntityPath"):
        assert part in errors[0]
    for wrong in ("report it", "does not answer", "Traceback", "retry in", KEY):
        assert wrong not in done.stderr


def test_a_send_to_another_queue_names_both_and_is_not_sent(bus: RunningEmulator) -> None:
    app = App("shop", broker=for_orders(bus), lease=LEASE)

    @app.task(queue="images")
    def resize(number: int) -> int:
        return number

    for send in (
        lambda: resize.delay(1),
        lambda: resize.map([(1,), (2,)]),
        lambda: resize.with_options(delay=5).delay(1),
        lambda: app.send("shop.other", [1], queue="images"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            send()
        assert type(caught.value) is ConfigurationError
        assert "'orders'" in str(caught.value)
        assert "'images'" in str(caught.value)
    app.close()


def test_the_name_of_the_queue_may_be_in_another_case(bus: RunningEmulator) -> None:
    """The service takes both for one queue; the SDK compares them exactly."""
    app = App("shop", broker=for_orders(bus, "Orders"), lease=LEASE)

    @app.task(queue="orders")
    def charge(number: int) -> int:
        return number

    charge.delay(1)
    with app.receive("orders", wait=10) as lease:
        lease.complete()
    app.close()


def test_the_command_line_says_so_with_exit_4(shop: Shop) -> None:
    assert_told(shop.run("send", "shop.resize", "--args", "[1]"))


def test_a_worker_ends_at_once_if_one_of_its_queues_is_another(shop: Shop) -> None:
    began = time.monotonic()
    assert_told(shop.run("worker", "-Q", "orders,images", "-c", "1"))
    assert time.monotonic() - began < 60.0  # it does not retry


def test_a_worker_of_the_right_queue_works(shop: Shop) -> None:
    assert shop.run("send", "shop.charge", "--args", "[1]").returncode == 0
    done = shop.run("worker", "-Q", "orders", "-c", "1", "--burst", "--max-tasks", "1")
    assert done.returncode == 0, done.stderr


def test_doctor_says_which_queue_and_nothing_of_firewalls(shop: Shop) -> None:
    done = shop.run("doctor")
    assert done.returncode == CONFIGURATION, done.stdout
    (line,) = [each for each in done.stdout.splitlines() if "without EntityPath" in each]
    assert line.startswith("problem")
    assert "'images'" in line
    assert "firewall" not in done.stdout + done.stderr
    assert "queue orders: it exists" in done.stdout


def signed_for(bus: RunningEmulator, queue: str) -> str:
    """A connection string with a signature that the service takes for one queue."""
    expiry = str(int(time.time() + 3600))
    resource = quote_plus(f"sb://{bus.host}:{bus.port}/{queue}")
    signature = quote_plus(sign(KEY, f"{resource}\n{expiry}"))
    token = f"SharedAccessSignature sr={resource}&sig={signature}&se={expiry}&skn=name"
    return (
        f"Endpoint=sb://{bus.host}:{bus.port};SharedAccessSignature={token};"
        "UseDevelopmentEmulator=true"
    )


def test_a_worker_that_may_not_receive_from_one_of_its_queues_ends(
    bus: RunningEmulator, tmp_path: Path
) -> None:
    """The service alone knows it, and says so at the first receive."""
    shop = Shop(tmp_path, bus, signed_for(bus, "orders"))
    done = shop.run("worker", "-Q", "orders,images", "-c", "1")
    assert done.returncode == CONFIGURATION, done.stderr
    errors = [line for line in done.stderr.splitlines() if "aztask: error:" in line]
    assert len(errors) == 1, done.stderr
    assert "refuses access to 'images'" in errors[0]
    assert "cannot receive, retry" not in done.stderr
