"""Real workers learn their leases: losses are counted across them, and end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from azurite import Azurite
from harness import Site, Worker, site_in, wait_until
from ledger_app import noop, work
from proxy import Proxy

from aztask import App
from aztask.address.owner import Owner
from aztask.leaseadvice.advice import Evidence, decide
from aztask.leaseadvice.document import QueueEntry, publish_advice
from aztask.leaseadvice.stores import open_lease_store
from aztask.stores.events.event import Event
from aztask.stores.events.sink import read_events

OWNER = Owner("azurite")  # as `storage_site` names it
LEASE = 2.0
HELD = 3.2
OPTIONS = json.dumps({"lease": LEASE, "max_lease": 600.0, "adaptive": [1.0, 60.0]})
ARGUMENTS = ("-Q", "default", "-c", "2", "--prefetch", "0", "--pool", "threads")


@pytest.fixture
def advised(tmp_path: Path) -> dict[str, str]:
    """The environment of workers that share what they learn."""
    return {
        "AZTASK_LEASE_ADVICE": str(tmp_path / "leases.json"),
        "AZTASK_OWNER": OWNER.broker,  # the same through the proxy and past it
        "LEDGER_OPTIONS": OPTIONS,
    }


@pytest.fixture
def local_site(tmp_path: Path, advised: dict[str, str]) -> Iterator[Site]:
    with site_in(tmp_path / "site", extra=advised) as made:
        made.app().broker.declare("default")
        yield made


@pytest.fixture
def storage_site(proxied_site: Site, advised: dict[str, str]) -> Site:
    """On Azurite; workers go through the proxy, the test past it."""
    proxied_site.extra = advised
    return proxied_site


def entry(site: Site) -> QueueEntry:
    store = open_lease_store(site.extra["AZTASK_LEASE_ADVICE"], owner=OWNER)
    return store.load().document.entry("default")


def total(site: Site) -> int:
    return site.app().broker.stats("default").total or 0


def lease(site: Site) -> float:
    advice = entry(site).advice
    return advice.lease_seconds or 0.0 if advice is not None and advice.at else 0.0


def sent(site: Site, *keys: str, seconds: float = HELD) -> None:
    for key in keys:
        site.app().send(work.name, [key, seconds], task_id=key)


def done(site: Site, *keys: str) -> Callable[[], bool]:
    results = [site.app().result(key) for key in keys]
    return lambda: all(each.ready() for each in results)


def events(site: Site, kind: str) -> list[Event]:
    return [event for event in read_events(site.events) if event.event == kind]


def learned_by(site: Site, workers: int) -> float:
    """Wait until so many workers know the lease of the document and receive under it."""

    def know() -> bool:
        latest = {each.worker: each.lease_seconds for each in events(site, "lease_changed")}
        return list(latest.values()) == [lease(site)] * workers

    wait_until(know, 20, f"{workers} workers use the learned lease")
    time.sleep(1.3)  # a receive that is under way goes on under the former one
    return lease(site)


def stopped(*workers: Worker) -> None:
    for worker in workers:
        assert worker.stop() == 0, worker.log


def test_renewals_that_fail_raise_the_lease_until_nothing_is_lost(
    storage_site: Site, proxy: Proxy
) -> None:
    """Tasks longer than the lease, and no renewal gets through: two workers together learn it."""
    site = storage_site
    proxy.hook = lambda line, number: "blackhole" if line.startswith(b"PUT") else None
    sent(site, "a", "b", "c", "d")
    workers = [site.worker(*ARGUMENTS) for _ in range(2)]
    # renewals may be made from half of the lease on: beyond that none is needed
    wait_until(lambda: lease(site) > 2 * HELD, 60, "the lease is raised")
    wait_until(done(site, "a", "b", "c", "d"), 40, "all end under the longer lease")
    wait_until(lambda: total(site) == 0, 30, "what was taken under the shorter one is settled")
    learned = learned_by(site, 2)
    sent(site, "e", "f", "g", "h")
    wait_until(done(site, "e", "f", "g", "h"), 30, "no lease is lost any more")
    assert [site.counts("start")[key] for key in "efgh"] == [1, 1, 1, 1]
    stopped(*workers)
    assert lease(site) == learned
    lost = events(site, "lease_lost")
    assert {each.task_id for each in lost} <= set("abcd")
    assert len({each.worker for each in lost}) == 2  # both lost some, and all are counted together
    assert entry(site).observed.lost_ever >= len(lost) >= 3
    changes = events(site, "lease_changed")
    assert {(each.former_lease_seconds, each.queue) for each in changes} >= {(LEASE, "default")}
    assert any("leases were lost" in (each.reason or "") for each in changes)


def test_deletes_that_come_too_late_raise_the_lease(storage_site: Site, azurite: Azurite) -> None:
    """The service's clock jumps: messages become visible while they are worked on."""
    site = storage_site
    sent(site, "a", "b", "c", "d", seconds=4.0)
    long = json.dumps({"lease": 30.0, "max_lease": 600.0, "adaptive": [1.0, 120.0]})
    arguments = (*ARGUMENTS[:3], "4", *ARGUMENTS[4:])
    workers = [site.worker(*arguments, LEDGER_OPTIONS=long, LEDGER_RESULTS="") for _ in range(2)]
    wait_until(lambda: len(site.lines("start")) == 4, 20, "all run")
    azurite.advance(31.0)
    wait_until(lambda: len(site.lines("start")) == 8, 20, "all run again")
    wait_until(lambda: lease(site) == 60.0, 30, "the lease is doubled")
    stopped(*workers)
    assert site.counts("end") == dict.fromkeys("abcd", 2)  # there is no result store to fence them
    assert entry(site).observed.failed_ever >= 3
    assert "settlements came too late" in events(site, "lease_changed")[0].reason
    assert len(events(site, "settle_failed")) >= 3


def test_on_the_local_broker_frozen_workers_learn_and_a_restart_keeps_it(local_site: Site) -> None:
    site = local_site
    workers = [site.worker(*ARGUMENTS) for _ in range(2)]
    sent(site, "a", "b", "c", "d", seconds=1.0)
    wait_until(lambda: len(site.lines("start")) == 4, 20, "all run")

    def freeze() -> None:
        for worker in workers:
            worker.signal(signal.SIGSTOP)
        time.sleep(LEASE + 0.3)
        for worker in workers:
            worker.signal(signal.SIGCONT)

    freeze()
    wait_until(lambda: lease(site) >= 2 * LEASE, 30, "the lease is raised")
    wait_until(done(site, "a", "b", "c", "d"), 20, "all end")
    learned = learned_by(site, 2)
    sent(site, "e", "f", "g", "h", seconds=1.0)
    wait_until(lambda: len(site.lines("start")) >= 12, 20, "they run")
    freeze()
    wait_until(done(site, "e", "f", "g", "h"), 20, "all end")
    assert [site.counts("start")[key] for key in "efgh"] == [1, 1, 1, 1]
    stopped(*workers)
    assert {each.worker for each in events(site, "lease_lost")} == {
        each.worker for each in events(site, "lease_changed")
    }

    third = site.worker(*ARGUMENTS)  # a restart keeps it, and many short tasks do not lower it
    app = site.app()
    results = app.task(name=noop.name)(lambda: None).map([()] * 150)
    wait_until(lambda: all(each.ready() for each in results), 30, "the short ones end")
    stopped(third)
    assert {e.lease_seconds for e in events(site, "started") if e.task == noop.name} == {learned}
    assert lease(site) == learned

    shown = subprocess.run(
        [sys.executable, "-m", "aztask", "queues", "-A", "ledger_app", "--json"],
        env=site.environment,
        cwd=site.folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    (line,) = map(json.loads, shown.stdout.splitlines())
    assert line["lease_seconds"] == learned
    assert line["leases_lost"] >= 3
    assert line["lease_advice"]["reason"].startswith("raised: ")
    assert line["lease_advice"]["latest"].startswith("kept: ")


def test_a_worker_with_an_older_lease_extends_what_the_sender_knew(
    local_site: Site, tmp_path: Path
) -> None:
    site = local_site
    store = open_lease_store(site.extra["AZTASK_LEASE_ADVICE"], owner=OWNER)
    advice = decide(Evidence(1000, 20.0, 20.0), LEASE, source="pipeline", at=time.time())
    assert publish_advice(store, {"default": advice}, store.load())
    place = site.extra["AZTASK_LEASE_ADVICE"]
    sender = App("ledger", broker=site.broker, lease_advice=place, owner=OWNER.broker)
    sender.send(work.name, ["told", 1.0], task_id="told")
    sender.close()
    sent(site, "not told", seconds=1.0)
    worker = site.worker(*ARGUMENTS, AZTASK_LEASE_ADVICE="")
    wait_until(done(site, "told", "not told"), 20, "both end")
    stopped(worker)
    margins = {each.task_id: each.margin_seconds for each in events(site, "succeeded")}
    assert 25.0 < margins["told"] <= 30.0
    assert margins["not told"] <= LEASE
