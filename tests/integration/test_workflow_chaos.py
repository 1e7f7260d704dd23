"""A chord of many members under random kills of workers, pool processes and its sender."""

from __future__ import annotations

import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from azurite import Azurite, account_of, running, storing
from bus import bus_site
from harness import Site, Worker, site_in, wait_until
from killing import Strikes
from neighbour import neighbour_of

from aztask.queues.base import QueueOptions
from aztask.stores.records.base import Provisioned, State
from aztask.testing import emulator

MEMBERS = int(os.environ.get("CHAOS_TASKS", "600")) // 2
"""300 by default, 10,000 in tox -e chaos."""

REMOTE_MEMBERS = int(os.environ.get("CHAOS_REMOTE_MEMBERS", str(MEMBERS // 3)))
"""10,000 in tox -e workflows-long."""

SEED = int(os.environ.get("CHAOS_SEED", "20260719"))
PAUSES = 60
"""Kills of workers amid one chord, at most."""

LEASE = 2.0
OUTAGE = 20.0
DEEP_LEASE = 30.0
"""With thousands of messages in a queue, Azurite answers a receive after seconds."""

DEEP = 2_000
"""Members from which leases on Azurite are `DEEP_LEASE`."""
EXTRA = {"LEDGER_MAX_DELIVERIES": "1000", "LEDGER_GRAPH_SECONDS": "2.0"}


@pytest.mark.parametrize("joint", [True, False], ids=["one file", "two files"])
def test_a_chord_under_random_kills(joint: bool, tmp_path: Path, capsys) -> None:
    with site_in(tmp_path / "site", joint=joint, extra=dict(EXTRA)) as site:
        chaos(site, MEMBERS, capsys)


def test_a_chord_under_random_kills_on_storage_and_tables(tmp_path: Path, capsys) -> None:
    with storing(tmp_path) as stores, running(tmp_path / "queue") as queues:
        text = account_of(queues, *stores)
        with site_in(
            tmp_path / "site", joint=False, broker=text, results=text, extra=dict(EXTRA)
        ) as site:
            prepare(site)
            site.app().broker.declare("default")
            lease = DEEP_LEASE if REMOTE_MEMBERS >= DEEP else LEASE
            chaos(site, REMOTE_MEMBERS, capsys, lease)


def test_a_chord_under_random_kills_on_the_emulator_and_tables(tmp_path: Path, capsys) -> None:
    options = QueueOptions(lease=LEASE, max_deliveries=1000)
    with (
        storing(tmp_path) as stores,
        emulator() as bus,
        bus_site(tmp_path / "site", bus, options) as site,
    ):
        site.results = account_of(*stores)
        site.extra.update(EXTRA)
        prepare(site)
        chaos(site, REMOTE_MEMBERS, capsys)


@contextmanager
def frozen(*services: Azurite) -> Iterator[None]:
    """The services answer nothing during the block. (A stopped Azurite loses its last seconds.)"""
    for each in services:
        os.kill(each.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for each in services:
            os.kill(each.pid, signal.SIGCONT)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another program holds the file's write lock during the block."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


def test_the_result_store_is_unreachable_for_20_s_amid_a_chord(tmp_path: Path, capsys) -> None:
    with storing(tmp_path) as stores, running(tmp_path / "queue") as queues:
        text = account_of(queues, *stores)
        with site_in(
            tmp_path / "site", joint=False, broker=text, results=text, extra=dict(EXTRA)
        ) as site:
            prepare(site)
            site.app().broker.declare("default")
            outage(site, REMOTE_MEMBERS, lambda: frozen(*stores), capsys)


def test_the_result_file_is_locked_for_20_s_amid_a_chord(tmp_path: Path, capsys) -> None:
    with site_in(tmp_path / "site", joint=False, extra=dict(EXTRA)) as site:
        path = Path(site.results.removeprefix("local://"))
        outage(site, MEMBERS, lambda: locked(path), capsys)


def outage(
    site: Site, count: int, away: Callable[[], AbstractContextManager[None]], capsys
) -> None:
    """The store is away amid the chord, and a worker is killed meanwhile: it ends, and right."""
    with neighbour_of(site):
        outage_beside(site, count, away, capsys)


def outage_beside(
    site: Site, count: int, away: Callable[[], AbstractContextManager[None]], capsys
) -> None:
    dice = random.Random(SEED)
    app = site.app()
    result = app.workflows.result("w")
    assert send(site, dice, count, kills=0) == 0
    workers = [start_worker(site) for _ in range(2)]
    share = dice.uniform(0.1, 0.6)
    wait_until(lambda: len(site.lines("end")) > share * count, 120, "a part has ended")
    before = len(site.lines("end"))
    with away():
        time.sleep(OUTAGE / 2)
        victim = dice.randrange(2)
        workers[victim].kill()
        workers[victim].wait()
        workers[victim] = start_worker(site)
        time.sleep(OUTAGE / 2)
        ran = len(site.lines("end")) - before
    assert before + ran < count, "the outage came too late"
    wait_until(result.ready, 180.0 + count / 3, "it ends")
    restarts, extra = checked(site, count)
    with capsys.disabled():
        print(
            f"\nchaos seed {SEED}: the store was away for {OUTAGE:g} s after {before} of {count} "
            f"members, {ran} ended meanwhile / extra runs {extra} / starts that a fault struck "
            f"{restarts}"
        )


def start_worker(site: Site, lease: float = LEASE) -> Worker:
    """A worker with three processes."""
    pool = ("--pool", "processes", "-c", "3")
    draining = ("--shutdown-timeout", "300ms", "--shutdown-grace", "2s")
    return site.worker(*pool, *draining, "--lease", f"{lease}s", "--max-lease", "60s")


def prepare(site: Site) -> None:
    results = site.app().results
    assert isinstance(results, Provisioned)
    results.create()


def chaos(site: Site, count: int, capsys, lease: float = LEASE) -> None:
    """Send a chord until its sender survives, kill workers until it ends, and check everything."""
    with neighbour_of(site):
        chaos_beside(site, count, capsys, lease)


def chaos_beside(site: Site, count: int, capsys, lease: float) -> None:
    """As `chaos`, beside an app with a broker of its own on the same store."""
    dice = random.Random(SEED)
    app = site.app()
    result = app.workflows.result("w")
    start = partial(start_worker, site, lease)
    workers = [start() for _ in range(2)]
    sender_kills = send(site, dice, count)
    kills = kill_workers(site, dice, workers, start, result.ready, count)
    restarts, extra = checked(site, count)
    with capsys.disabled():
        print(
            f"\nchaos seed {SEED}: a chord of {count}: {kills}, {sender_kills} senders "
            f"killed / extra runs {extra} / starts that a fault struck {restarts}"
        )


def checked(site: Site, count: int) -> tuple[int, int]:
    """Check the results of a chord that has ended; returns starts that were struck, extra runs."""
    app = site.app()
    result = app.workflows.result("w")
    assert result.get(timeout=1) == [f"m{number}" for number in range(count)]
    progress = result.progress
    assert (progress.done, progress.failed, progress.total) == (count + 1, 0, count + 1)
    wait_until(lambda: left(site) == 0, 60.0 + count / 20, "all is settled")
    site.stop_workers()
    ends, restarts = site.counts("end"), 0
    for number in range(1, count + 3):
        history = app.results.history(f"w.{number}")
        if number > 1:  # node 1 is the join
            *struck, last = history
            assert all(run.state is State.RETRYING for run in struck)  # its pool process was killed
            assert last.state is State.SUCCEEDED
            restarts += sum(run.starts for run in history) - 1
    extra = sum(ends.values()) - (count + 1)
    assert set(ends) == {f"m{number}" for number in range(count)} | {"m"}
    # A start that a drained worker gave back does not count, and may have come to its end.
    given_back = sum(
        int(number)
        for worker in site.workers
        for number in re.findall(r"gave back (\d+) running", worker.log)
    )
    assert extra <= restarts + given_back
    assert not any("Traceback" in worker.log for worker in site.workers)
    return restarts, extra


def send(site: Site, dice: random.Random, count: int, kills: int = 3) -> int:
    """Start the chord in processes that are killed while they do; how many kills it took."""
    program = f"from graphs import members\nmembers('m', {count}).delay(workflow_id='w')\n"
    for number in range(100):
        process = subprocess.Popen(
            [sys.executable, "-c", program], env=site.environment, cwd=site.folder
        )
        if number < kills:
            time.sleep(dice.uniform(0.2, 0.6 + count / 5000))
            process.kill()
        if process.wait(900) == 0:
            return number
    raise AssertionError("no sender survived")


def kill_workers(
    site: Site,
    dice: random.Random,
    workers: list[Worker],
    start: Callable[[], Worker],
    done: Callable[[], bool],
    count: int,
) -> Strikes:
    """Strike one of the workers now and then until all is done; returns what was struck.

    Between two strikes some members end: on a busy machine, workers take longer to start than they
    would live, and a chord of 10,000 would never end.
    """
    give_up_at = time.monotonic() + 180.0 + count / 3
    strikes, next_strike, ended = Strikes(dice, start), time.monotonic() + 0.5, 0
    while not done() or strikes.total < 2:
        assert time.monotonic() < give_up_at, f"it does not end: {site.folder}"
        time.sleep(0.05)
        if time.monotonic() < next_strike:
            continue
        now = site.ledger.read_bytes().count(b"end ") if site.ledger.exists() else 0
        if now - ended < count // PAUSES and not done():
            continue
        if strikes.strike(workers):
            ended, next_strike = now, time.monotonic() + dice.uniform(0.6, 1.5)
    strikes.finish()
    return strikes


def left(site: Site) -> int:
    """Messages that are neither done with nor dead."""
    stats = site.app().broker.stats("default")
    if stats.total is not None:
        return stats.total
    return (stats.active or 0) + (stats.leased or 0)
