"""Retry strategies with real workers on Service Bus (the emulator, over TCP)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bus import bus_site
from harness import Site
from strategies import (
    ALL,
    deferred_is_gone,
    killed_with_a_deferred_message,
    killed_with_a_failure_recorded,
    runs_again_and_ends,
    runs_again_without_a_result_store,
    the_brokers_own_dead_letter_is_noticed,
    two_pointers_run_it_once,
)

from aztask.queues.base import QueueOptions
from aztask.testing import RunningEmulator

LEASE = 1.5
ARGUMENTS = ("-Q", "default", "-c", "2", "--lease", f"{LEASE}s", "--max-lease", "60s")
OPTIONS = QueueOptions(lease=LEASE, duplicate_window=600.0, max_deliveries=100)


@pytest.fixture
def site(bus: RunningEmulator, tmp_path: Path) -> Iterator[Site]:
    with bus_site(tmp_path / "site", bus, OPTIONS) as made:
        yield made


def test_each_strategy_runs_again_and_ends_in_the_dead_letters(site: Site) -> None:
    runs_again_and_ends(site, ALL, LEASE, *ARGUMENTS)


def test_failures_are_counted_without_a_result_store(site: Site) -> None:
    """In pointers and clones, else by the service."""
    runs_again_without_a_result_store(site, ALL, *ARGUMENTS)


def test_what_the_service_dead_letters_by_its_own_count_is_noticed(
    bus: RunningEmulator, tmp_path: Path
) -> None:
    options = QueueOptions(lease=LEASE, max_deliveries=2)
    with bus_site(tmp_path / "site", bus, options) as site:
        the_brokers_own_dead_letter_is_noticed(site, "abandon", *ARGUMENTS)


@pytest.mark.parametrize("strategy", ["abandon", "lease-timeout", "hold"])
def test_killed_with_a_failure_recorded(strategy: str, site: Site) -> None:
    killed_with_a_failure_recorded(site, strategy, *ARGUMENTS)


@pytest.mark.parametrize("step", ["recorded", "pointed", "fetched", "parted"])
def test_killed_with_a_deferred_message(step: str, site: Site) -> None:
    killed_with_a_deferred_message(site, step, *ARGUMENTS)


def test_two_pointers_run_it_once(site: Site) -> None:
    two_pointers_run_it_once(site, *ARGUMENTS)


def test_a_pointer_whose_message_is_gone_ends(site: Site) -> None:
    deferred_is_gone(site, LEASE, *ARGUMENTS)
