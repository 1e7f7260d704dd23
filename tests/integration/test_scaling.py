"""The concurrency of real workers, changed while they run: every pool, obeyed and kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Line, Site, site_in, wait_until
from ledger_app import work
from test_pausing import SOON, controls

from aztask.limits.control import Reach
from aztask.worker.options import POOLS

SECONDS = 0.2
PATIENCE = 30


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site whose workers read what is scaled often."""
    with site_in(tmp_path / "site", extra=SOON) as made:
        yield made


def at_once(lines: list[Line]) -> int:
    """How many tasks ran at the same time at most."""
    changes = sorted((line.at, 1 if line.event == "start" else -1) for line in lines)
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def send(site: Site, prefix: str, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        site.app().send(work.name, [f"{prefix}{number}", SECONDS])


def of(site: Site, prefix: str) -> list[Line]:
    return [line for line in site.lines() if line.key.startswith(prefix)]


def finish(site: Site, prefix: str, count: int) -> int:
    """Wait until these tasks have ended; returns how many ran at the same time at most."""
    wait_until(lambda: len(of(site, prefix)) == 2 * count, PATIENCE, f"all of {prefix} have run")
    return at_once(of(site, prefix))


def reaches(site: Site, prefix: str, most: int) -> None:
    """Send until `most` tasks run at the same time: new processes need a moment, some more than
    others. There are never more.
    """
    count = 0

    def reached() -> bool:
        nonlocal count
        if count - len(of(site, prefix)) / 2 < 2 * most:  # some wait, whatever runs
            send(site, prefix, 1, count)
            count += 1
        return at_once(of(site, prefix)) == most

    wait_until(reached, PATIENCE, f"{most} run at the same time")
    assert finish(site, prefix, count) == most


@pytest.mark.parametrize("pool", sorted({*POOLS} - {"solo"}))  # solo always runs one
def test_more_and_fewer_tasks_at_the_same_time_while_a_worker_runs(site: Site, pool: str) -> None:
    worker, scaling = site.worker("-c", "1", "--pool", pool, "--prefetch", "4"), controls(site)
    send(site, "a", 3)
    assert finish(site, "a", 3) == 1
    scaling.scale(Reach.ALL, [""], 4, time.time(), forget=set())
    reaches(site, "b", 4)
    scaling.scale(Reach.ALL, [""], 2, time.time(), forget=set())
    wait_until(lambda: "concurrency is 2 now" in worker.log, 5, "it obeys")
    send(site, "c", 6)
    assert finish(site, "c", 6) == 2
    scaling.unscale(None, ())
    wait_until(lambda: "concurrency is 1 now" in worker.log, 5, "it obeys")
    send(site, "d", 3)
    assert finish(site, "d", 3) == 1
    assert worker.stop() == 0, worker.log
    assert set(site.counts("end").values()) == {1}, "no task was lost or ran twice"
    assert "ended while it ran" not in worker.log


@pytest.mark.parametrize("pool", POOLS[:2])
def test_running_tasks_go_on_when_a_pool_shrinks(site: Site, pool: str) -> None:
    worker = site.worker("-c", "4", "--pool", pool, "--prefetch", "4")
    long = [site.app().send(work.name, [f"long{number}", 2.0]) for number in range(4)]
    wait_until(lambda: len(of(site, "long")) == 4, PATIENCE, "they run")
    controls(site).scale(Reach.ALL, [""], 1, time.time(), forget=set())
    wait_until(lambda: "concurrency is 1 now" in worker.log, 5, "it obeys")
    send(site, "next", 3)
    assert [each.get(timeout=20) for each in long] == [f"long{number}" for number in range(4)]
    assert finish(site, "next", 3) == 1
    ended = min(line.at for line in of(site, "long") if line.event == "end")
    begun = min(line.at for line in of(site, "next") if line.event == "start")
    assert begun > ended, "no more tasks start than the new number allows"
    assert set(site.counts("start").values()) == {1}
    assert worker.stop() == 0, worker.log


def test_a_worker_of_its_own_and_new_workers_obey_too(site: Site) -> None:
    scaling = controls(site)
    scaling.scale(Reach.QUEUE, ["default"], 2, time.time(), forget=set())
    scaling.scale(Reach.WORKER, ["special"], 3, time.time(), forget=set())
    special = site.worker("-c", "1", "--pool", "threads", "--name", "special")
    other = site.worker("-c", "1", "--pool", "threads", "--name", "other")
    wait_until(lambda: "concurrency is 3 now, and was 1" in special.log, 10, "by its name")
    wait_until(lambda: "concurrency is 2 now, and was 1" in other.log, 10, "by its queue")
    scaling.unscale(Reach.WORKER, ["special"])
    wait_until(lambda: "concurrency is 2 now, and was 3" in special.log, 5, "by its queue")
    assert [special.stop(), other.stop()] == [0, 0]
