"""Three workers, 10 starts a second, and kills: what must hold. Run by ``tox -e limits``.

Starts are stamped as the first thing in the task, on this machine's clock, which is the store's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Site, Worker, site_in, wait_until
from limits_app import ten
from test_limits import most_in

SECONDS = 30
ARGUMENTS = ("-c", "2", "--lease", "3s", "--max-lease", "60s")


@pytest.fixture(params=[True, False], ids=["one file", "two files"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with site_in(tmp_path / "site", module="limits_app", joint=request.param) as made:
        yield made


def started(site: Site) -> list[float]:
    """When each task started for the first time, in order."""
    first: dict[str, float] = {}
    for line in site.lines("start"):
        first.setdefault(line.key, line.at)
    return sorted(first.values())


def average(site: Site) -> float:
    """Tasks a second, from the first start to the last."""
    times = started(site)
    return (len(times) - 1) / (times[-1] - times[0])


def all_started(site: Site, count: int) -> None:
    wait_until(lambda: len(started(site)) == count, 4 * SECONDS, "all have run")


def test_three_workers_keep_ten_a_second(site: Site) -> None:
    count = 10 * SECONDS
    for number in range(count):
        site.app().send(ten.name, [f"{number:04}"])
    workers = [site.worker(*ARGUMENTS) for _ in range(3)]
    all_started(site, count)
    times = [line.at for line in site.lines("start")]
    assert most_in(times, 1.0) <= 10
    assert average(site) >= 9.5
    assert len(times) == count
    assert [worker.stop() for worker in workers] == [0] * 3, workers[0].log


def test_three_workers_keep_ten_a_second_through_kills(site: Site) -> None:
    """A killed worker's slots are not used, and its messages come back when its leases end."""
    count, draw = 10 * SECONDS, random.Random(7)
    for number in range(count):
        site.app().send(ten.name, [f"{number:04}"])
    workers: list[Worker] = [site.worker(*ARGUMENTS) for _ in range(3)]
    wait_until(lambda: site.lines("start"), 20, "they have begun")
    for _ in range(SECONDS // 8):
        time.sleep(draw.uniform(6.0, 8.0))
        victim = draw.choice(workers)
        victim.kill()
        victim.wait()
        workers[workers.index(victim)] = site.worker(*ARGUMENTS)
    all_started(site, count)
    assert most_in([line.at for line in site.lines("start")], 1.0) <= 10
    times = started(site)[: int(0.95 * count)]  # the last ones wait for a lease to end
    assert (len(times) - 1) / (times[-1] - times[0]) >= 9.0
