"""A worker or a sender that dies at each step of a payload's life: nothing is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import azurite as services
import pytest
from azurite import Azurite
from bus import address_at
from harness import ROOT, Site, wait_until
from ledger_app import double
from payloadsite import collect, payload_site, stored

from aztask.queues.base import QueueOptions
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.stores.records.base import State
from aztask.testing import RunningEmulator

ARGUMENTS = ("-Q", "default", "-c", "2", "--max-lease", "60s")
STEPS = (
    *("received", "claimed", "sent", "loaded", "ran", "result-stored"),
    *("recorded", "settled", "removed"),
)
ON_SERVICES = ("loaded", "result-stored", "settled", "removed")
THRESHOLD = 10_000
DATA = b"x" * 50_000

SENDER = """
import os
from aztask import App
app = App("ledger", broker=os.environ["LEDGER_BROKER"], payload_threshold=10_000, **OPTIONS)
app.send("ledger.double", ["lost", b"x" * 50_000], task_id="lost")
"""


def left(site: Site) -> int:
    """How many messages there still are, dead letters included."""
    stats = site.app().broker.stats("default")
    return stats.living + (stats.dead or 0)


def killed_at_each_step(site: Site, steps: tuple[str, ...] = STEPS, *, lease: str = "2s") -> None:
    app, arguments = site.app(), (*ARGUMENTS, "--lease", lease)
    orphans = results = 0
    for step in steps:
        app.send(double.name, [step, DATA], task_id=step)
        first = site.worker(*arguments, AZTASK_FAILPOINT=f"{step}:KILL")
        assert first.wait() == -signal.SIGKILL, first.log
        second = site.worker(*arguments)
        assert app.result(step).get(timeout=30) == DATA + DATA
        wait_until(lambda: left(site) == 0, 20, "all is settled")
        assert second.stop() == 0, second.log
        assert [record.state for record in app.results.history(step)] == [State.SUCCEEDED]
        assert len(stored(site)) - orphans <= 1, f"orphans of {step}"
        assert 1 <= len(stored(site, "results")) - results <= 2, f"results of {step}"
        orphans, results = len(stored(site)), len(stored(site, "results"))
    collect(site)
    assert stored(site) == []
    assert app.result(steps[0]).get(timeout=5) == DATA + DATA
    collect(site, after=app.settings.result_retention_seconds + 4 * 3600.0)
    assert stored(site, "results") == []


@pytest.mark.parametrize("joint", [True, False], ids=["one file", "two files"])
def test_killed_at_each_step(joint: bool, tmp_path: Path) -> None:
    with payload_site(tmp_path / "site", joint=joint, payload_threshold=THRESHOLD) as site:
        killed_at_each_step(site)


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    with services.running(tmp_path_factory.mktemp("blobs"), service="blob") as server:
        yield server


def test_killed_at_each_step_on_storage_queues(
    azurite: Azurite, blobs: Azurite, tmp_path: Path
) -> None:
    given = {"payloads": "storage", "payloads_account": services.account_of(blobs)}
    with payload_site(
        tmp_path / "site",
        broker=azurite.connection_string,
        payload_threshold=THRESHOLD,
        **given,
    ) as site:
        site.app().broker.declare("default")
        killed_at_each_step(site, ON_SERVICES)


def test_killed_at_each_step_on_service_bus(
    bus: RunningEmulator, blobs: Azurite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
    given = {"payloads": "service-bus", "payloads_account": services.account_of(blobs)}
    with payload_site(
        tmp_path / "site", broker=address_at(bus, None), payload_threshold=THRESHOLD, **given
    ) as site:
        # the lease is the queue's lock, and the shortest lock is five seconds
        site.app().broker.declare("default", QueueOptions(lease=5.0))
        killed_at_each_step(site, ON_SERVICES, lease="5s")


DEBOUNCER = """
import os, sys, time
from aztask import App
app = App(
    "ledger", broker=os.environ["LEDGER_BROKER"], results=os.environ["LEDGER_RESULTS"],
    payload_threshold=10_000,
)
ship = app.task(name="ledger.double", unique=lambda name, data: "one", debounce=1.0)(
    lambda name, data: None
)
if sys.argv[1] != "repair":
    ship.delay("last", sys.argv[1].encode() * 50_000)
else:
    while not app.unique_engine("ledger.double").repair():  # as workers do every second
        time.sleep(0.1)
"""


def debounced(site: Site, letter: str, **environment: str) -> int:
    return subprocess.run(
        [sys.executable, "-c", DEBOUNCER, letter],
        env={**site.environment, "PYTHONPATH": str(ROOT), **environment},
        check=False,
    ).returncode


def test_a_sender_killed_after_it_replaced_a_debounced_call_leaves_one_orphan(
    tmp_path: Path,
) -> None:
    with payload_site(tmp_path / "site", payload_threshold=THRESHOLD) as site:
        site.app().broker.declare("default")
        assert debounced(site, "a") == 0
        (first,) = stored(site)
        assert debounced(site, "b", AZTASK_FAILPOINT="unique-taken:KILL") == -signal.SIGKILL
        assert len(stored(site)) == 2
        assert "removed 1 payload " in collect(site)
        (second,) = stored(site)
        assert second.name != first.name
        assert debounced(site, "c") == 0
        (third,) = stored(site)
        assert third.name != second.name
        assert debounced(site, "repair") == 0
        collect(site)
        assert stored(site) == [third]
        worker = site.worker(*ARGUMENTS)
        wait_until(lambda: not stored(site) and left(site) == 0, 60, "the last call has run")
        assert worker.stop() == 0, worker.log
        (ended,) = site.app().results.recent()
        assert ended.state is State.SUCCEEDED, ended


def test_a_sender_killed_before_the_send_leaves_one_orphan(tmp_path: Path) -> None:
    with payload_site(tmp_path / "site", payload_threshold=THRESHOLD) as site:
        killed = subprocess.run(
            [sys.executable, "-c", SENDER.replace("OPTIONS", "{}")],
            env={**site.environment, "AZTASK_FAILPOINT": "uploaded:KILL", "PYTHONPATH": str(ROOT)},
            check=False,
        )
        assert killed.returncode == -signal.SIGKILL
        site.app().broker.declare("default")
        assert left(site) == 0
        assert len(stored(site)) == 1
        assert "kept 1 payload " in collect(site, after=60.0)
        assert "removed 1 payload " in collect(site)
        assert stored(site) == []
