"""Retry strategies with real workers on Storage queues (Azurite)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from azurite import Azurite
from harness import Site
from storage import storage_site
from strategies import (
    ALL,
    killed_with_a_failure_recorded,
    runs_again_and_ends,
    runs_again_without_a_result_store,
)

LEASE = 2.0
ARGUMENTS = ("-Q", "default", "-c", "2", "--lease", f"{LEASE}s", "--max-lease", "60s")


@pytest.fixture
def site(azurite: Azurite, tmp_path: Path) -> Iterator[Site]:
    with storage_site(tmp_path / "site", azurite) as made:
        yield made


def test_each_strategy_runs_again_and_ends_in_the_dead_letters(site: Site) -> None:
    runs_again_and_ends(site, ALL[:-1], LEASE, *ARGUMENTS)


def test_failures_are_counted_without_a_result_store(site: Site) -> None:
    """In the message; a worker that died in a run does not count as one of them."""
    runs_again_without_a_result_store(site, ALL[:-1], *ARGUMENTS, crash=True)


def test_deferring_is_refused_when_the_worker_starts(site: Site) -> None:
    worker = site.worker(*ARGUMENTS, LEDGER_STRATEGY="defer")
    assert worker.wait() == 4, worker.log
    assert "does not support retry_strategy='defer'" in worker.log
    assert "resubmit, abandon, lease-timeout, hold" in worker.log
    assert "Traceback" not in worker.log


@pytest.mark.parametrize("strategy", ["abandon", "lease-timeout", "hold"])
def test_killed_with_a_failure_recorded(strategy: str, site: Site) -> None:
    killed_with_a_failure_recorded(site, strategy, *ARGUMENTS)
