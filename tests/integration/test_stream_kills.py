"""A worker that is killed while its task emits, and the reader that sees it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import azurite
import pytest
from bus import bus_site
from harness import Site, site_in, wait_until
from proxy import Proxy, proxied
from stream_app import count, emit_at_first, fail_once, pause_and_count

from aztask import StreamPart
from aztask.queues.base import QueueOptions
from aztask.steps.parts import PARTS
from aztask.stores.records.base import Provisioned
from aztask.testing import emulator

ARGUMENTS = ("-c", "1", "--lease", "3s", "--max-lease", "60s")


SITES = ("one file", "two files", "Storage and Tables", "Service Bus and Tables")


@pytest.fixture(params=SITES)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """Queues in a file, on Azurite or on the emulator of Service Bus; results beside them."""
    folder, stream_app = tmp_path / "site", "stream_app"
    if request.param in SITES[:2]:
        with site_in(folder, joint=request.param == SITES[0], module=stream_app) as made:
            yield made
        return
    with azurite.storing(tmp_path / "account") as stores:
        if request.param == SITES[2]:
            with azurite.running(tmp_path / "account" / "queue") as queues:
                account = azurite.account_of(queues, *stores)
                with site_in(
                    folder, joint=False, broker=account, results=account, module=stream_app
                ) as made:
                    made.app().broker.declare("default")
                    yield _provisioned(made)
            return
        results = azurite.account_of(*stores)
        with (
            emulator() as bus,
            bus_site(
                folder, bus, QueueOptions(lease=3.0), results=results, module=stream_app
            ) as made,
        ):
            yield _provisioned(made)


def _provisioned(site: Site) -> Site:
    results = site.app().results
    assert isinstance(results, Provisioned)
    results.create()
    return site


class Reader:
    """Reads a stream in a thread."""

    def __init__(self, site: Site, task_id: str, after: int | str = 0) -> None:
        self.parts: list[StreamPart] = []
        self._stream = site.app().result(task_id).stream(after, timeout=90)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for part in self._stream:
            self.parts.append(part)

    def end(self) -> list[StreamPart]:
        self._thread.join(100)
        assert not self._thread.is_alive()
        return self.parts


def check(parts: list[StreamPart], most: int) -> None:
    """In each take the numbers follow each other, and the values are those of one process."""
    resets = [n for n, part in enumerate(parts) if part.reset]
    for first, last in zip([-1, *resets], [*resets, len(parts)], strict=True):
        take = parts[first + 1 : last]
        assert [part.number for part in take] == list(range(1, len(take) + 1))
        assert [int(part.value.split("-")[1]) for part in take] == [part.number for part in take]
        assert len({part.value.split("-")[0] for part in take}) == 1
    assert parts[-1].number == most


def test_a_killed_worker_leaves_a_take_and_the_next_one_is_a_reset(site: Site) -> None:
    site.app().send(count.name, ["a", 60, 0.05], task_id="a")
    first = site.worker(*ARGUMENTS)
    live = Reader(site, "a")
    wait_until(lambda: len(live.parts) >= 10, 60, "it has read some")
    first.kill()
    first.wait()
    seen = live.parts[-1]
    second = site.worker(*ARGUMENTS)
    parts = live.end()
    assert sum(part.reset for part in parts) == 1
    check(parts, 60)
    assert site.app().result("a").get(timeout=10) == "a"
    last = [part.value for part in site.app().result("a").stream()]
    assert len(last) == len(set(last)) == 60
    assert [part.number for part in site.app().result("a").stream(after=57)] == [58, 59, 60]
    resumed = list(site.app().result("a").stream(after=seen.id))
    assert resumed[0].reset, "what was read is of a take that does not count"
    assert len(resumed) == 61
    assert second.stop() == 0, second.log


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_the_next_start_emits_nothing_and_no_part_is_left(site: Site, end: str) -> None:
    """Whether its worker was killed, or gave it back: a local queue then counts no delivery."""
    site.app().send(emit_at_first.name, ["a"], task_id="a")
    first = site.worker(*ARGUMENTS, "--shutdown-timeout", "0.5s")
    live = Reader(site, "a")
    wait_until(lambda: len(live.parts) >= 5, 60, "it has read some")
    if end == "killed":
        first.kill()
        first.wait()
    else:
        assert first.stop() == 0, first.log
    second = site.worker(*ARGUMENTS)
    parts = live.end()
    assert parts[-1].reset
    assert site.app().result("a").get(timeout=10) == "a"
    assert list(site.app().result("a").stream()) == []
    assert second.stop() == 0, second.log


def test_a_frozen_worker_writes_where_no_reader_looks(site: Site) -> None:
    site.app().send(count.name, ["a", 100, 0.05], task_id="a")
    first = site.worker(*ARGUMENTS)
    live = Reader(site, "a")
    wait_until(lambda: len(live.parts) >= 5, 60, "it has read some")
    first.freeze()
    second = site.worker(*ARGUMENTS)
    wait_until(lambda: any(part.reset for part in live.parts), 60, "the second take has begun")
    first.signal(signal.SIGCONT)
    parts = live.end()
    assert sum(part.reset for part in parts) == 1
    check(parts, 100)
    first.kill()
    assert second.stop() == 0, second.log


def test_a_run_that_slept_goes_on_behind_its_parts_and_a_kill_is_a_reset(site: Site) -> None:
    site.app().send(pause_and_count.name, ["a"], task_id="a")
    first = site.worker(*ARGUMENTS)
    live = Reader(site, "a")
    wait_until(lambda: len(live.parts) >= 6, 60, "it has slept, and goes on")
    assert [part.value for part in live.parts[:4]] == ["one", "two", "0", "1"]
    assert not any(part.reset for part in live.parts)
    first.kill()
    first.wait()
    second = site.worker(*ARGUMENTS)
    parts = live.end()
    reset = next(n for n, part in enumerate(parts) if part.reset)
    expected = ["one", "two", *map(str, range(20))]
    assert [part.value for part in parts[reset + 1 :]] == expected
    assert [part.value for part in site.app().result("a").stream()] == expected
    assert second.stop() == 0, second.log


def test_a_writing_task_makes_at_most_ten_requests_a_second(site: Site) -> None:
    """It emits 500 parts a second; each row of parts is one request."""
    site.app().send(count.name, ["a", 1000, 0.002], task_id="a")
    worker = site.worker(*ARGUMENTS)
    began = time.monotonic()
    parts = Reader(site, "a").end()
    check(parts, 1000)
    app = site.app()
    rows = app.results.rows.of(PARTS)
    written = sum(row.place.key.startswith("p:") for row in rows.of_owner(app.owner.of_broker))
    run = site.lines("end")[0].at - site.lines("start")[0].at
    assert written <= 10 * run + 2
    assert time.monotonic() - began < 60
    assert worker.stop() == 0, worker.log


@pytest.mark.parametrize("pause", [0.0, 0.5], ids=["at its start", "behind a wait"])
def test_a_failed_attempt_and_its_retry_are_a_reset(site: Site, pause: float) -> None:
    site.app().send(fail_once.name, ["a", pause], task_id="a")
    worker = site.worker(*ARGUMENTS)
    parts = Reader(site, "a").end()
    values = ["reset" if part.reset else part.value for part in parts]
    assert values == ["one", "two", "reset", "one", "two", "three"]
    app = site.app()
    assert [part.value for part in app.result("a").stream()] == ["one", "two", "three"]
    assert [part.value for part in app.result("a").stream(after=1)] == ["two", "three"]
    assert worker.stop() == 0, worker.log


# -- while a batch is on its way to Tables -----------------------------------------------------


@dataclass
class Batches:
    """Disturbs the requests that write parts, from the first one behind `begin` on."""

    fault: str
    every: int = 1
    begin: threading.Event = field(default_factory=threading.Event)
    hit: threading.Event = field(default_factory=threading.Event)
    seen: int = 0

    def __call__(self, line: bytes, number: int) -> str | None:
        if not self.begin.is_set() or not line.startswith(b"POST"):
            return None
        self.seen += 1
        if self.seen % self.every:
            return None
        self.hit.set()
        return self.fault


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[tuple[Site, Proxy]]:
    """Workers reach the tables through the proxy, readers too."""
    with azurite.storing(tmp_path / "account") as stores, proxied(stores[0].port) as proxy:
        results = azurite.account_of(*stores, table=proxy.port)
        with (
            emulator() as bus,
            bus_site(
                tmp_path / "site",
                bus,
                QueueOptions(lease=3.0),
                results=results,
                module="stream_app",
            ) as made,
        ):
            yield _provisioned(made), proxy


@pytest.mark.parametrize("fault", ["blackhole", "drop-reply"])
def test_a_worker_that_is_killed_in_the_middle_of_a_batch(
    tables: tuple[Site, Proxy], fault: str
) -> None:
    """The batch never arrives, or is written without an answer: no take has a gap or a double."""
    site, proxy = tables
    site.app().send(count.name, ["a", 60, 0.05], task_id="a")
    first = site.worker(*ARGUMENTS)
    live = Reader(site, "a")
    wait_until(lambda: len(live.parts) >= 10, 60, "it has read some")
    proxy.hook = batches = Batches(fault)
    batches.begin.set()
    assert batches.hit.wait(10.0)
    first.kill()
    first.wait()
    proxy.hook = None
    second = site.worker(*ARGUMENTS)
    parts = live.end()
    assert sum(part.reset for part in parts) == 1
    check(parts, 60)
    assert second.stop() == 0, second.log


def test_a_batch_whose_answer_is_lost_is_there_once(tables: tuple[Site, Proxy]) -> None:
    site, proxy = tables
    site.app().send(count.name, ["a", 60, 0.05], task_id="a")
    worker = site.worker(*ARGUMENTS)
    live = Reader(site, "a")
    wait_until(lambda: len(live.parts) >= 5, 60, "it has read some")
    proxy.hook = batches = Batches("drop-reply", every=3)
    batches.begin.set()
    parts = live.end()
    assert batches.hit.is_set()
    assert not any(part.reset for part in parts)
    check(parts, 60)
    assert worker.stop() == 0, worker.log
