"""Tasks that fail twice, under every strategy, while workers are killed at random."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from bus import bus_site
from harness import Site, Worker, site_in, wait_until
from ledger_app import flaky
from strategies import ALL, left

from aztask.brokers.base import QueueOptions
from aztask.results.base import State
from aztask.testing import emulator

EACH = int(os.environ.get("CHAOS_STRATEGY_TASKS", "12"))
SEED = int(os.environ.get("CHAOS_SEED", "20260719"))
LEASE = 1.5
ARGUMENTS = ("-c", "3", "--lease", f"{LEASE}s", "--max-lease", "60s")
ENVIRONMENT = {"LEDGER_STRATEGIES": ",".join(ALL), "LEDGER_MAX_DELIVERIES": "1000"}


@pytest.mark.parametrize("joint", [True, False], ids=["one file", "two files"])
def test_random_kills_lose_no_retry(joint: bool, tmp_path: Path) -> None:
    with site_in(tmp_path / "site", joint=joint, extra=ENVIRONMENT) as site:
        retried_under_kills(site)


def test_random_kills_lose_no_retry_on_service_bus(tmp_path: Path) -> None:
    options = QueueOptions(lease=LEASE, max_deliveries=1000, duplicate_window=600.0)
    with emulator() as bus, bus_site(tmp_path / "site", bus, options) as site:
        site.extra.update(ENVIRONMENT)
        retried_under_kills(site)


def retried_under_kills(site: Site) -> None:
    """Each ends with exactly two failures counted, and leaves nothing in the queue."""
    dice = random.Random(SEED)
    app = site.app()
    ids = [f"{strategy}-{number}" for strategy in ALL for number in range(EACH)]
    for each in ids:
        app.send(f"{flaky.name}-{each.rpartition('-')[0]}", [each, 2], task_id=each)
    kills = kill_while_they_last(site, dice, set(ids))
    last = site.worker(*ARGUMENTS)
    wait_until(lambda: left(site) == 0, 30, "messages and pointers are settled")
    assert kills >= 3, f"seed {SEED}"
    for each in ids:
        assert app.result(each).get(timeout=1) == 2, f"{each}, seed {SEED}"
        assert app.results.history(each)[-1].state is State.SUCCEEDED
    assert not app.broker.peek("default", dead_letter=True)
    assert last.stop() == 0, last.log


def kill_while_they_last(site: Site, dice: random.Random, missing: set[str]) -> int:
    """Two workers, one of them killed now and then, until every task has ended."""
    workers: list[Worker] = [site.worker(*ARGUMENTS) for _ in range(2)]
    kills, give_up_at = 0, time.monotonic() + 90
    next_kill = time.monotonic() + 0.8
    while missing or kills < 3:
        assert time.monotonic() < give_up_at, f"{sorted(missing)} did not end: {site.folder}"
        time.sleep(0.05)
        missing = {each for each in missing if not site.app().result(each).ready()}
        if time.monotonic() >= next_kill:
            victim = dice.randrange(2)
            workers[victim].kill()
            workers[victim].wait()
            workers[victim] = site.worker(*ARGUMENTS)
            kills += 1
            next_kill = time.monotonic() + dice.uniform(0.6, 1.2)
    for worker in workers:
        worker.stop()
    return kills
