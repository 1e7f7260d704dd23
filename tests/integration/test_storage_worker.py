"""Real workers on Storage queues: kills, outages, late renewals, and what each task costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from azurite import Azurite
from harness import Site, Worker, wait_until
from ledger_app import noop, rejecting, retry_later, work
from proxy import Proxy
from storage import storage_site
from test_kills import killed_at_each_step
from throttle import throttling

from aztask.stores.records.base import RunKey, State

LEASE = 2.0
ARGUMENTS = ("-Q", "default", "-c", "2", "--lease", f"{LEASE}s", "--max-lease", "60s")
OUTAGE_SECONDS = float(os.environ.get("OUTAGE_SECONDS", "30"))


@pytest.fixture
def site(azurite: Azurite, proxy: Proxy, tmp_path: Path) -> Iterator[Site]:
    with storage_site(tmp_path / "site", azurite, port=proxy.port) as made:
        yield made


def total(site: Site) -> int:
    return site.app().broker.stats("default").total or 0


def test_killed_at_each_step(site: Site) -> None:
    killed_at_each_step(site, total, *ARGUMENTS)


def test_killed_within_a_batch_of_deletes(site: Site, proxy: Proxy) -> None:
    app = site.app()
    keys = [f"k{n}" for n in range(80)]
    for key in keys:
        app.send(work.name, [key], task_id=key)
    dying: list[Worker] = []

    def hook(line: bytes, number: int) -> None:
        if line.startswith(b"DELETE") and number == 20:
            dying[0].signal(signal.SIGKILL)

    proxy.hook = hook
    # leases of more than two seconds are settled in batches
    batches = (*ARGUMENTS[:3], "8", "--pool", "threads", "--lease", "5s", "--max-lease", "60s")
    dying.append(site.worker(*batches))
    assert dying[0].wait() == -signal.SIGKILL
    recorded = {
        key
        for key in keys
        if any(each.state is State.SUCCEEDED for each in app.results.history(key))
    }
    assert 0 < total(site) < 80
    second = site.worker(*batches)
    wait_until(lambda: total(site) == 0, 30, "the second worker settles the rest")
    for key in keys:
        assert [each.state for each in app.results.history(key)] == [State.SUCCEEDED], key
    assert recorded
    counts = site.counts("end")
    assert {key: counts[key] for key in recorded} == dict.fromkeys(recorded, 1)
    assert second.stop() == 0, second.log


def test_killed_within_a_map(site: Site, proxy: Proxy) -> None:
    """What was stored is whole and runs; nothing is stored twice."""
    code = (
        "from ledger_app import work\n"
        "print('ready', flush=True); input()\n"
        "work.map([(f'm{n}',) for n in range(400)])"
    )
    sender = subprocess.Popen(
        [sys.executable, "-c", code],
        env=site.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert sender.stdin
    assert sender.stdout
    assert sender.stdout.readline() == b"ready\n"

    def hook(line: bytes, number: int) -> None:
        if line.startswith(b"POST") and number == 100:
            sender.kill()

    proxy.hook = hook
    sender.communicate(b"\n", timeout=60)
    assert sender.returncode == -signal.SIGKILL
    worker = site.worker(*ARGUMENTS)
    wait_until(lambda: total(site) == 0, 30, "all that was stored is done")
    counts = site.counts("end")
    assert 50 <= len(counts) < 400
    assert set(counts.values()) == {1}
    assert worker.stop() == 0, worker.log


@pytest.mark.parametrize("step", ["ran", "recorded"])
def test_frozen_past_the_lease_and_thawed(site: Site, step: str) -> None:
    app = site.app()
    app.send(work.name, ["a"], task_id="a")
    first = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=f"{step}:STOP")
    wait_until(first.stopped, 20, "the first worker freezes")
    second = site.worker(*ARGUMENTS)
    wait_until(lambda: total(site) == 0, 20, "the second worker settles it")
    first.signal(signal.SIGCONT)
    time.sleep(0.5)
    assert [record.state for record in app.results.history("a")] == [State.SUCCEEDED]
    app.send(work.name, ["b"], task_id="b")
    assert app.result("b").get(timeout=15) == "b"
    assert first.stop() == 0, first.log
    assert second.stop() == 0, second.log


def test_retries_wait_in_the_queue_and_rejects_in_the_poison_queue(site: Site) -> None:
    app = site.app()
    site.worker(*ARGUMENTS)
    sent_at = time.time()
    retried = app.send(retry_later.name, ["r", 2.0])
    app.send(rejecting.name, ["x", "no good"], task_id="x")
    assert retried.get(timeout=20) >= sent_at + 2.0
    wait_until(lambda: total(site) == 0, 10, "all is settled")
    (dead,) = app.broker.peek("default", dead_letter=True)
    assert dead.dead_letter_reason == "no good"


def test_what_is_no_message_of_ours_is_dead_lettered_with_its_bytes(site: Site, azurite) -> None:
    app = site.app()
    queue = app.broker._client.queue("default")  # type: ignore[attr-defined]
    raw = ["plain text", "eyJicm9rZW4iOiB0cnVlfQ==", "x" * 65536]
    for text in raw:
        queue.send_message(text, time_to_live=-1)
    app.send(work.name, ["after"], task_id="after")
    worker = site.worker(*ARGUMENTS)
    assert app.result("after").get(timeout=20) == "after"
    wait_until(lambda: len(app.broker.peek("default", dead_letter=True)) == 3, 10, "3 are dead")
    wait_until(lambda: total(site) == 0, 10, "the queue is empty")
    dead = app.broker.peek("default", dead_letter=True)
    assert sorted(each.envelope.body.decode() for each in dead) == sorted(raw)
    # the longest one leaves no room for a reason, and is kept as it was
    assert sorted(each.dead_letter_reason or "" for each in dead) == [
        "",
        "undecodable",
        "undecodable",
    ]
    assert worker.stop() == 0


def test_an_outage_of_the_service_loses_nothing(site: Site, azurite: Azurite) -> None:
    app = site.app()
    worker = site.worker(*ARGUMENTS)
    app.send(work.name, ["before"], task_id="before")
    assert app.result("before").get(timeout=20) == "before"
    app.send(work.name, ["during", OUTAGE_SECONDS / 2], task_id="during")
    wait_until(lambda: site.lines("start", "during"), 10, "it runs")
    azurite.stop()
    time.sleep(OUTAGE_SECONDS)
    assert worker.process.poll() is None
    azurite.start()
    assert app.result("during").get(timeout=40 + OUTAGE_SECONDS) == "during"
    app.send(work.name, ["after"], task_id="after")
    assert app.result("after").get(timeout=20) == "after"
    wait_until(lambda: total(site) == 0, 20, "all is settled")
    assert worker.stop() == 0, worker.log


def test_a_queue_deleted_under_the_worker(site: Site) -> None:
    app = site.app()
    app.broker.declare("other")
    worker = site.worker("-Q", "default,other", *ARGUMENTS[2:])
    app.send(work.name, ["a"], task_id="a")
    assert app.result("a").get(timeout=20) == "a"
    app.broker.delete("default")
    wait_until(lambda: "aztask queues create default" in worker.log, 10, "the log says what to do")
    app.send(work.name, ["b"], queue="other", task_id="b")
    assert app.result("b").get(timeout=20) == "b"
    app.broker.declare("default")
    app.send(work.name, ["c"], task_id="c")
    assert app.result("c").get(timeout=30) == "c"
    assert worker.stop() == 0


def test_a_task_ten_leases_long_runs_once_while_replies_are_late(site: Site, proxy: Proxy) -> None:
    """Every third answer to a renewal comes more than half a lease late."""
    lease = 4.0
    proxy.hook = lambda line, number: 2.4 if line.startswith(b"PUT") and number % 3 == 0 else None
    app = site.app()
    app.send(work.name, ["long", 10 * lease], task_id="long")
    worker = site.worker("-Q", "default", "-c", "2", "--lease", f"{lease}s", "--max-lease", "10m")
    assert app.result("long").get(timeout=20 + 10 * lease) == "long"
    wait_until(lambda: total(site) == 0, 10, "it is settled")
    assert site.counts("start")["long"] == 1
    assert proxy.counts["PUT"] >= 10
    assert worker.stop() == 0


def test_what_no_ops_cost(site: Site, proxy: Proxy) -> None:
    """Sending, receiving and deleting: at most 2.1 requests for each task while it is busy."""
    count = 800
    worker = site.worker("-Q", "default", "-c", "8", "--pool", "threads")
    app = site.app()
    for _ in range(4):  # warm: the worker learns how much to prefetch
        app.send(noop.name)
    wait_until(lambda: total(site) == 0, 20, "the worker is warm")
    time.sleep(2.5)
    worker.freeze()  # until all is sent: it is busy, however slowly this process sends
    before = proxy.total
    results = app.task(name=noop.name)(lambda: None).map([()] * count)
    worker.signal(signal.SIGCONT)
    wait_until(lambda: all(each.ready() for each in reversed(results)), 60, "all ended")
    used = proxy.total - before
    assert worker.stop() == 0
    assert used / count <= 2.1


def test_what_a_long_task_costs(site: Site, proxy: Proxy) -> None:
    """Three leases long: one send, one delete, its renewals, and the looks of an idle worker."""
    lease = 3.0
    proxy.counts.clear()
    site.worker("-Q", "default", "-c", "1", "--prefetch", "0", "--lease", f"{lease}s")
    app = site.app()
    app.send(work.name, ["long", 3 * lease], task_id="long")
    assert app.result("long").get(timeout=30) == "long"
    wait_until(lambda: total(site) == 0, 10, "it is settled")
    assert (proxy.counts["POST"], proxy.counts["DELETE"]) == (1, 1)
    assert 3 <= proxy.counts["PUT"] <= 5


def test_what_an_idle_worker_costs(site: Site, proxy: Proxy) -> None:
    """At the ceiling it only looks; the unit tests of polling count the looks of whole hours."""
    site.worker(*ARGUMENTS)
    wait_until(lambda: proxy.counts["GET"] > 5, 20, "the worker looks")
    time.sleep(8.0)
    before, began = proxy.total, time.monotonic()
    time.sleep(8.0)
    # One is at the edge of the time, and one the look at what waits, once a minute.
    rate = (proxy.total - before - 2) / (time.monotonic() - began)
    assert rate * 3600 <= 4000


def test_workers_of_an_account_that_takes_less_send_less(site: Site, azurite: Azurite) -> None:
    """The account takes 60 requests a second of two workers: each task runs once."""
    app = site.app()
    keys = [f"k{n}" for n in range(600)]
    for key in keys:
        app.send(noop.name, task_id=key)
    with throttling(azurite.port, 60.0) as throttle:
        site.broker = azurite.connection_string_at(throttle.port)
        for _ in range(2):
            site.worker("-Q", "default", "-c", "4", "--lease", "30s")
        wait_until(lambda: total(site) == 0, 120, "the queue is empty")
        results = site.app().results
        assert results is not None
        runs = [run for key in keys for run in results.history(key)]
        assert [(run.key, run.state) for run in runs] == [
            (RunKey(key), State.SUCCEEDED) for key in keys
        ]
        # Without a pace, two of three are refused.
        assert throttle.refused < throttle.admitted / 2
        site.stop_workers()
