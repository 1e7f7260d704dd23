"""Retry strategies with real workers on the local broker: delays, limits, counts, kills."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from harness import Site, site_in, wait_until
from ledger_app import fails_late, retry_later, work
from strategies import (
    ALL,
    deferred_is_gone,
    killed_with_a_deferred_message,
    killed_with_a_failure_recorded,
    runs_again_and_ends,
    runs_again_without_a_result_store,
    started,
    the_brokers_own_dead_letter_is_noticed,
    two_pointers_run_it_once,
)

from aztask.queues.base import QueueOptions
from aztask.stores.records.base import State

LEASE = 1.5
ARGUMENTS = ("--pool", "processes", "-c", "2", "--lease", f"{LEASE}s", "--max-lease", "60s")


@pytest.mark.parametrize("joint", [True, False], ids=["one file", "two files"])
def test_each_strategy_runs_again_and_ends_in_the_dead_letters(joint: bool, tmp_path: Path) -> None:
    with site_in(tmp_path / "site", joint=joint) as site:
        runs_again_and_ends(site, ALL, LEASE, *ARGUMENTS)


def test_failures_are_counted_without_a_result_store(site: Site) -> None:
    """In the message; a worker that died in a run does not count as one of them."""
    runs_again_without_a_result_store(site, ALL, *ARGUMENTS, crash=True)


def test_holding_takes_no_slot_and_shows_the_error_meanwhile(tmp_path: Path) -> None:
    """One slot, one message held for longer than its lease: others run, renewals go on."""
    with site_in(tmp_path / "site", extra={"LEDGER_STRATEGY": "hold"}) as site:
        app = site.app()
        worker = site.worker("-c", "1", "--lease", "1s", "--max-lease", "2s", "--prefetch", "0")
        app.send(retry_later.name, ["held", 3.0], task_id="held")
        wait_until(lambda: app.result("held").state == State.RETRYING, 15, "it has failed")
        (record,) = app.results.history("held")
        assert record.outcome is not None
        assert record.outcome.error_type == "Retry"
        assert app.send(work.name, ["other"]).get(timeout=2) == "other"
        assert app.broker.stats("default").leased == 1
        assert app.result("held").get(timeout=10)
        first, second = started(site, "held")
        assert 3.0 <= second - first < 4.0
        assert worker.stop() == 0, worker.log
        events = "".join(path.read_text() for path in site.events.rglob("*.jsonl"))
        assert events.count('"event":"resubmitted"') == 1


def test_holding_is_bounded(tmp_path: Path) -> None:
    """What is more than `max_held` waits in the queue until its lease has lapsed."""
    extra = {"LEDGER_STRATEGY": "hold", "LEDGER_MAX_HELD": "1"}
    with site_in(tmp_path / "site", extra=extra) as site:
        app = site.app()
        for key in "abc":
            app.send(retry_later.name, [key, 30.0], task_id=key)
        worker = site.worker("-c", "1", "--lease", "1s", "--max-lease", "60s", "--prefetch", "0")
        wait_until(lambda: sorted(site.counts("start").values()) == [1, 2, 2], 15, "two came back")
        wait_until(lambda: app.broker.stats("default").leased == 1, 10, "one is held, two wait")
        assert worker.stop() == 0, worker.log


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_holding_does_not_survive_the_worker(how: signal.Signals, tmp_path: Path) -> None:
    """SIGTERM gives the message back at once, SIGKILL when its lease lapses; neither counts."""
    with site_in(tmp_path / "site", extra={"LEDGER_STRATEGY": "hold"}) as site:
        app = site.app()
        app.send(retry_later.name, ["a", 60.0], task_id="a")
        first = site.worker(*ARGUMENTS)
        wait_until(lambda: app.result("a").state == State.RETRYING, 15, "it is held")
        ended_at = time.time()
        if how is signal.SIGTERM:
            assert first.stop() == 0, first.log
        else:
            first.kill()
            first.wait()
        assert app.result("a").state == State.RETRYING
        second = site.worker(*ARGUMENTS)
        assert app.result("a").get(timeout=10)
        assert site.counts("start") == {"a": 2}
        assert started(site, "a")[1] - ended_at <= LEASE + 10.0  # it was held for 60 s
        assert second.stop() == 0, second.log


def test_what_the_broker_dead_letters_by_its_own_count_is_noticed(site: Site) -> None:
    site.app().broker.declare("default", QueueOptions(max_deliveries=2))
    the_brokers_own_dead_letter_is_noticed(site, "lease-timeout", *ARGUMENTS)


def test_nothing_is_held_any_more_once_the_worker_must_end(site: Site) -> None:
    """What fails while the worker drains is given back at once: it does not wait for the retry."""
    app = site.app()
    app.send(fails_late.name, ["a", 1.5, 60.0], task_id="a")
    worker = site.worker(*ARGUMENTS, LEDGER_STRATEGY="hold")
    wait_until(lambda: started(site, "a"), 15, "it runs")
    assert worker.stop(seconds=10) == 0, worker.log
    stats = app.broker.stats("default")
    assert (stats.active, stats.leased) == (1, 0)
    assert app.result("a").state == State.RETRYING


@pytest.mark.parametrize("strategy", ["abandon", "lease-timeout", "hold"])
def test_killed_with_a_failure_recorded(strategy: str, split_site: Site) -> None:
    killed_with_a_failure_recorded(split_site, strategy, *ARGUMENTS)


@pytest.mark.parametrize("step", ["recorded", "pointed", "fetched", "parted"])
def test_killed_with_a_deferred_message(step: str, split_site: Site) -> None:
    killed_with_a_deferred_message(split_site, step, *ARGUMENTS)


def test_two_pointers_run_it_once(split_site: Site) -> None:
    two_pointers_run_it_once(split_site, *ARGUMENTS)


def test_a_pointer_whose_message_is_gone_ends(split_site: Site) -> None:
    deferred_is_gone(split_site, LEASE, *ARGUMENTS)
