"""Many leases and many tasks of one worker on Service Bus: requests and connections are bounded."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bus import bus_site
from harness import Site, wait_until
from ledger_app import flaky, work

from aztask.emulator.broker import management
from aztask.queues.base import QueueOptions
from aztask.queues.servicebus.senders import MAX_SENDERS
from aztask.testing import RunningEmulator

TASKS = 2_000
LEASE = 10.0
HOLD_SECONDS = 18.0
MOST_REQUESTS = 100
RECEIVER_CONNECTIONS = 3
LOOKING_CONNECTIONS = 2
"""Receiving, settling and renewing; see `aztask.queues.servicebus.broker`, rule 2."""


def renewals(site: Site) -> list[float]:
    """How much of its lease had passed, for each renewal that the worker's events tell of."""
    shares = []
    for path in site.events.rglob("*.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            assert event["event"] != "lease_lost", event
            if event["event"] == "renewed":
                shares.append(1.0 - event["margin_seconds"] / event["lease_seconds"])
    return shares


def test_two_thousand_leases_are_renewed_in_few_requests_and_none_late(
    bus: RunningEmulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    requests: list[tuple[float, int]] = []
    renew = management.OPERATIONS["renew-lock"]

    def counted(call: management.ManagementCall) -> management.Result:
        requests.append((time.monotonic(), len(call.body["lock-tokens"])))
        return renew(call)

    monkeypatch.setitem(management.OPERATIONS, "renew-lock", counted)
    with bus_site(tmp_path / "site", bus, QueueOptions(lease=LEASE)) as site:
        app = site.app()
        task = app.task(name=work.name)(work.function)
        task.map([(f"t{n}", HOLD_SECONDS) for n in range(TASKS)])
        worker = site.worker(
            *("-Q", "default", "--pool", "threads", "-c", str(TASKS)),
            *("--lease", f"{LEASE}s", "--max-lease", "5m"),
        )
        wait_until(lambda: len(site.lines("start")) == TASKS, 60, "all have started")
        wait_until(lambda: len(site.lines("end")) == TASKS, HOLD_SECONDS + 60, "all have ended")
        wait_until(lambda: not app.broker.peek("default"), 30, "all are settled")
        assert worker.stop() == 0, worker.log
        shares = renewals(site)
        assert len(set(site.counts("start").values())) == 1, "each ran once"
    rounds = len(shares) / TASKS
    with capsys.disabled():
        print(
            f"\n{len(shares)} renewals in {len(requests)} requests, {len(requests) / rounds:.0f} "
            f"for each round; the latest at {max(shares):.0%} of the lock"
        )
    assert rounds >= 2.0
    assert len(requests) / rounds <= MOST_REQUESTS
    assert max(shares) <= 0.85


@contextmanager
def watched(bus: RunningEmulator) -> Iterator[list[int]]:
    """How many connections there were, sampled."""
    samples: list[int] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.05):
            samples.append(len(bus._emulator.server.endpoints))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def test_connections_of_a_worker_are_bounded(bus: RunningEmulator, tmp_path: Path) -> None:
    """Three for each queue that it receives from, at most four for each that it sends to, and one
    each for looking at a queue and at its dead letters.
    """
    queues = ("default", "other")
    with bus_site(tmp_path / "site", bus, QueueOptions(lease=LEASE)) as site:
        app = site.app()
        app.broker.declare("other", QueueOptions(lease=LEASE))
        task = app.task_with_context(name=flaky.name)(flaky.function)
        for queue in queues:
            task.with_options(queue=queue).map([(f"{queue}{n}", 2) for n in range(100)])
        app.close()
        wait_until(lambda: not bus._emulator.server.endpoints, 15, "the sender is gone")
        with watched(bus) as samples:
            worker = site.worker("-Q", ",".join(queues), "-c", "8", "--lease", f"{LEASE}s")
            wait_until(lambda: len(site.lines("end")) == 200, 60, "all have ended")
            time.sleep(1.0)
            busy = len(samples)
            time.sleep(1.0)
            assert worker.stop() == 0, worker.log
        most = RECEIVER_CONNECTIONS + MAX_SENDERS + LOOKING_CONNECTIONS
        assert max(samples) <= len(queues) * most
        assert max(samples) >= len(queues) * RECEIVER_CONNECTIONS
        assert samples[busy:], "it was watched while idle too"
        wait_until(lambda: not bus._emulator.server.endpoints, 15, "none is left behind")
        site.app().broker.delete("other")


def test_prefetched_messages_whose_lock_lapsed_are_not_run_and_the_log_says_why(
    bus: RunningEmulator, tmp_path: Path
) -> None:
    """A worker that stood still gives nothing of what it held ahead to its pool afterwards."""
    lease = 3.0
    with bus_site(tmp_path / "site", bus, QueueOptions(lease=lease)) as site:
        app = site.app()
        arguments = ("-Q", "default", "-c", "1", "--lease", f"{lease}s", "--prefetch", "4")
        ahead = [f"ahead{number}" for number in range(3)]
        app.send(work.name, ["first", 4.0], task_id="first")
        for name in ahead:
            app.send(work.name, [name], task_id=name)
        frozen = site.worker(*arguments)
        wait_until(lambda: site.lines("start", "first"), 20, "it runs the first")
        time.sleep(1.5)  # the others are held ahead by now
        frozen.signal(signal.SIGSTOP)
        other = site.worker(*arguments)
        wait_until(lambda: {*ahead} <= {*site.counts("end")}, 40, "another one takes over")
        frozen.signal(signal.SIGCONT)
        said = "expired while the message waited|lost before the task started"
        wait_until(lambda: re.search(said, frozen.log), 15, "it says why")
        time.sleep(0.5)
        starts = site.counts("start")
        assert [starts[name] for name in ahead] == [1, 1, 1]
        assert frozen.stop() == 0, frozen.log
        assert other.stop() == 0, other.log
