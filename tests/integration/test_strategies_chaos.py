"""Tasks that fail twice, under every strategy, while workers are killed at random."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from bus import bus_site
from harness import Site, site_in, wait_until
from hostilemessages import ODD, send_raw, task_payload, with_properties
from killing import KILL, kill_while_they_last
from ledger_app import flaky
from neighbour import neighbour_of
from strategies import ALL, left

from aztask.queues.base import QueueOptions
from aztask.stores.records.base import State
from aztask.testing import emulator

EACH = int(os.environ.get("CHAOS_STRATEGY_TASKS", "12"))
SEED = int(os.environ.get("CHAOS_SEED", "20260719"))
LEASE = 1.5
ARGUMENTS = ("-c", "3", "--lease", f"{LEASE}s", "--max-lease", "60s")
ENVIRONMENT = {"LEDGER_STRATEGIES": ",".join(ALL), "LEDGER_MAX_DELIVERIES": "1000"}


@pytest.mark.parametrize("joint", [True, False], ids=["one file", "two files"])
def test_random_kills_lose_no_retry(joint: bool, tmp_path: Path) -> None:
    with (
        site_in(tmp_path / "site", joint=joint, extra=ENVIRONMENT) as site,
        neighbour_of(site),
    ):
        retried_under_kills(site)


def test_random_kills_lose_no_retry_on_service_bus(tmp_path: Path) -> None:
    options = QueueOptions(lease=LEASE, max_deliveries=1000, duplicate_window=600.0)
    with (
        emulator() as bus,
        bus_site(tmp_path / "site", bus, options) as site,
        neighbour_of(site),
    ):
        site.extra.update(ENVIRONMENT)
        retried_under_kills(site, odd_port=bus.port)


def retried_under_kills(site: Site, odd_port: int | None = None) -> None:
    """Each ends with exactly two failures counted, and leaves nothing in the queue.

    odd_port: of the emulator to which every third is sent with properties of odd types.
    """
    dice = random.Random(SEED)
    app = site.app()
    ids = [f"{strategy}-{number}" for strategy in ALL for number in range(EACH)]
    for number, each in enumerate(ids):
        name = f"{flaky.name}-{each.rpartition('-')[0]}"
        if odd_port is not None and number % 3 == 0:
            odd = {name: raw for name, (raw, _) in ODD.items()}
            payload = with_properties(task_payload(app.codec, name, [each, 2], each), odd)
            send_raw(odd_port, "default", [payload])
        else:
            app.send(name, [each, 2], task_id=each)
    # no kills of pool processes: each is one more failure, and these are counted
    kill_while_they_last(site, dice, ids, ARGUMENTS, kinds=[KILL])
    wait_until(lambda: left(site) == 0, 30, "messages and pointers are settled")
    for each in ids:
        assert app.result(each).get(timeout=1) == 2, f"{each}, seed {SEED}"
        assert app.results.history(each)[-1].state is State.SUCCEEDED
    assert not app.broker.peek("default", dead_letter=True)
    site.stop_workers()
