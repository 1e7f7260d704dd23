"""An app with two addresses: two files, two Azurites, two emulators.

Senders and workers are killed, one address fails and comes back, and queues are moved between the
addresses meanwhile.
"""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import azurite
import pytest
from bus import address_at
from harness import HERE, Site
from proxy import Proxy
from waiting import wait_until

from aztask import App
from aztask.address.shards import ShardLayout
from aztask.errors import BrokerUnavailable, SendUnconfirmed
from aztask.operate.resharding import addresses_of, layouts
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.queues.sharded.broker import ShardedBroker
from aztask.stores import shardlayouts
from aztask.testing import emulator

REFRESH = 3.0
WORKER = ("--pool", "processes", "-c", "2", "--max-lease", "60s")
KEY = "a signing key with enough characters"
KILLS = 4
TASKS = 200


class Pair:
    """A site on two addresses. `proxies`: in front of them; none before files."""

    def __init__(self, site: Site, texts: list[str], proxies: list[Proxy]) -> None:
        self.site, self.proxies = site, proxies
        self.log = (site.folder / "programs.log").open("ab")
        self.senders: dict[str, subprocess.Popen[bytes]] = {}
        self.app = App(
            "shards",
            broker=texts,
            results=site.results,
            lease=5.0,
            signing_keys=[KEY],
            owner=site.extra["AZTASK_OWNER"],
        )
        self.app.queue("default", shards=4)
        self.queues = ["default"]
        if site.extra.get("SHARDS_SESSIONS"):
            self.app.queue("ordered", shards=4, sessions=True)
            self.queues.append("ordered")
        for name in self.queues:
            self.app.broker.declare(name, self.app.queue_options(name))
        addresses = addresses_of(self.app)
        assert addresses is not None
        self.names = list(addresses.homes)
        self._held: sqlite3.Connection | None = None

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env={**self.site.environment, **environment},
            cwd=self.site.folder,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
        )

    def send(self, name: str) -> None:
        self.senders[name] = self.start(str(HERE / "shards_sender.py"), name)

    def kill_a_sender(self, name: str) -> None:
        """Kill it if it has sent something since its start, and start another one."""
        sender = self.senders[name]
        if any(line.pid == sender.pid for line in self.site.lines("sent")):
            sender.kill()
            sender.wait()
            self.send(name)

    def kill_a_worker(self) -> None:
        worker = next(each for each in self.site.workers if each.process.poll() is None)
        before = len(self.site.lines())
        wait_until(lambda: len(self.site.lines()) > before, 60, "the workers work")
        worker.kill()
        worker.process.wait()
        self.site.worker(*WORKER)

    def fail(self, mode: str) -> None:
        """The second address does not answer any more. mode: how, where there is a proxy."""
        if self.proxies:
            self.proxies[1].set(mode)
            return
        self._held = sqlite3.connect(self.names[1].removeprefix("local://"), isolation_level=None)
        self._held.execute("BEGIN EXCLUSIVE")

    def recover(self) -> None:
        if self.proxies:
            self.proxies[1].set("pass")
            self.proxies[1].reset_all()  # what was swallowed is not sent again
        elif self._held is not None:
            self._held.close()

    def reshard(self, *arguments: str, step: str = "") -> set[int]:
        """Move all queues while a sender is killed again and again; the commands' exit codes.

        step: the commands are killed there.
        """
        failpoint = {"AZTASK_FAILPOINT": f"{step}:KILL"} if step else {}
        commands = [
            self.start(
                "-m", "aztask", "queues", "reshard", "-A", "shards_app:app", queue, "--yes",
                *arguments, **failpoint,
            )
            for queue in self.queues
        ]  # fmt: skip
        until = time.monotonic() + 240
        while any(each.poll() is None for each in commands):
            assert time.monotonic() < until, "the move does not end"
            time.sleep(0.7)
            self.kill_a_sender(random.choice(list(self.senders)))
        return {each.returncode for each in commands}

    def layout(self, queue: str = "default") -> ShardLayout:
        found = layouts(self.app)[queue]
        assert isinstance(found, ShardLayout)
        return found

    def homes(self, queue: str = "default") -> list[int]:
        """How many shards get messages at each address."""
        layout, names = self.layout(queue), self.names
        homes = [layout.homes[number] for number in layout.sent.numbers]
        return [homes.count(name) for name in names]

    def ended(self) -> dict[str, int]:
        return {**self.site.counts("end"), **self.site.counts("step")}

    def close(self) -> None:
        self.recover()
        for each in self.senders.values():
            each.kill()
            each.wait()
        self.app.close()
        self.log.close()


@pytest.fixture(params=["files", "storage queues", "service bus"])
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    monkeypatch.setattr(shardlayouts, "REFRESH_SECONDS", REFRESH)
    monkeypatch.setattr(shardlayouts, "FREE_SECONDS", 2 * REFRESH)
    extra = {"SHARDS_REFRESH": str(REFRESH), "AZTASK_OWNER": "pair"}
    texts: list[str] = []
    proxies: list[Proxy] = []
    with ExitStack() as stack:
        for name in ("a", "b"):
            if request.param == "files":
                texts.append(f"local://{tmp_path}/{name}.db")
                extra["SHARDS_SESSIONS"] = "yes"
                continue
            if request.param == "storage queues":
                server = stack.enter_context(azurite.running(tmp_path / name, service="queue"))
                proxies.append(Proxy(server.port))
                texts.append(server.connection_string_at(proxies[-1].port))
            else:
                bus = stack.enter_context(emulator())
                proxies.append(Proxy(bus.port))
                texts.append(address_at(bus, proxies[-1].port))
                extra[f"{ADMIN_VARIABLE}_{proxies[-1].port}"] = bus.admin_connection_string
            stack.callback(proxies[-1].close)
        for key, value in extra.items():
            monkeypatch.setenv(key, value)
        site = Site(
            tmp_path / "site", ",".join(texts), joint=False, module="shards_app", extra=extra
        )
        stack.callback(site.close)
        made = Pair(site, texts, proxies)
        stack.callback(made.close)
        yield made


def check(pair: Pair, sent: set[str], twice: int) -> None:
    """All have ended, and no more than so many ran twice."""
    wait_until(lambda: sent <= pair.ended().keys(), 120, "all tasks end")
    for queue in pair.queues:
        wait_until(lambda: not pair.app.broker.stats(queue).living, 60, "the queue is empty")  # noqa: B023
        assert pair.app.broker.stats(queue).dead == 0
    assert sum(count - 1 for count in pair.ended().values()) <= twice
    results = pair.app.results
    assert results is not None
    states = {results.get(key).state.value for key in sent}  # type: ignore[union-attr]
    assert states == {"succeeded"}
    steps: dict[str, list[int]] = defaultdict(list)
    for line in pair.site.lines("step"):
        session, _, number = line.key.rpartition(":")
        steps[session].append(int(number))
    for session, numbers in steps.items():
        firsts = list(dict.fromkeys(numbers))
        assert firsts == list(range(len(firsts))), session


@pytest.mark.timeout(300)
def test_nothing_is_lost_while_workers_and_senders_are_killed(pair: Pair) -> None:
    assert pair.homes() == [2, 2]
    pair.send("a")
    for _ in range(2):
        pair.site.worker(*WORKER)
    keys = [f"k{number}" for number in range(TASKS)]
    for first in range(0, TASKS, TASKS // KILLS):
        for number, key in enumerate(keys[first : first + TASKS // KILLS]):
            pair.app.send("shards.again" if number % 5 == 0 else "shards.work", [key], task_id=key)
        pair.kill_a_worker()
        pair.kill_a_sender("a")
    (pair.site.folder / "stop").touch()
    assert pair.senders["a"].wait(60) == 0
    sent = {line.key for line in pair.site.lines("sent")} | set(keys)
    check(pair, sent, twice=KILLS * 2 * 10)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["reset", "blackhole"])
def test_one_address_fails_and_comes_back(pair: Pair, mode: str) -> None:
    worker = pair.site.worker(*WORKER)
    broker = pair.app.broker
    assert isinstance(broker, ShardedBroker) and broker.addresses is not None
    places = broker.addresses
    keys = [f"k{number}" for number in range(40)]
    for key in keys:
        pair.app.send("shards.work", [key], task_id=key)
    wait_until(lambda: set(keys) <= pair.ended().keys(), 60, "the worker works")
    # Some wait at both addresses when the second one fails.
    late = [f"late{number}" for number in range(20)]
    shards = broker.layouts.sending("default", session=False)
    there = {key for key in late if pair.layout().homes[shards.of_id(key)] == pair.names[1]}
    assert 0 < len(there) < len(late)
    for key in late:
        pair.app.send("shards.work", [key], task_id=key, delay=3.0)
    pair.fail(mode)
    began = time.monotonic()
    # New tasks are sent where they can be, one under an id of its own fails.
    free = [f"free{number}" for number in range(12)]
    unsure = 0
    for key in free:
        try:
            pair.app.send("shards.work", [key])
        except SendUnconfirmed:  # it found the address gone, perhaps behind what it sent
            unsure += 1
            pair.app.send("shards.work", [key])
    assert unsure <= 1
    own = (f"own{number}" for number in range(100))
    lost = next(key for key in own if pair.layout().homes[shards.of_id(key)] == pair.names[1])
    with pytest.raises((BrokerUnavailable, SendUnconfirmed)):
        pair.app.send("shards.work", [lost], task_id=lost)
    wait_until(
        lambda: set(late) - there <= pair.ended().keys() and set(free) <= pair.ended().keys(),
        60,
        "the other address goes on",
    )
    second = pair.site.worker(*WORKER)  # one starts also now
    wait_until(lambda: "3 tasks" in second.log, 60, "it starts")
    said = "does not answer; its shards rest"
    if mode == "reset":  # a link of Service Bus that is silent looks like one without messages
        wait_until(lambda: said in worker.log, 60, "the worker says so")
    time.sleep(max(0.0, began + 6.0 - time.monotonic()))
    assert worker.process.poll() is None
    assert worker.log.count(said) <= 1
    pair.recover()
    wait_until(lambda: set(late) <= pair.ended().keys(), 90, "it is read again")
    if said in worker.log:
        wait_until(lambda: "answers again" in worker.log, 30, "the worker says so")
    wait_until(lambda: places.outages.answers(pair.names[1], "default"), 30, "senders use it")
    check(pair, {*keys, *late}, twice=len(there))


@pytest.mark.timeout(600)
def test_queues_are_moved_between_the_addresses_under_load(pair: Pair) -> None:
    for name in ("a", "b"):
        pair.send(name)
    for _ in range(2):
        pair.site.worker(*WORKER)
    wait_until(lambda: len(pair.ended()) > 20, 60, "the workers work")
    for step, arguments, homes in (
        ("reshard-created", ("--without", pair.names[1]), [4, 0]),
        ("reshard-announced", ("--shards", "7"), [4, 3]),
        ("reshard-empty", ("--without", pair.names[0], "--shards", "4"), [0, 4]),
        ("", (), [2, 2]),
    ):
        if step:
            assert pair.reshard(*arguments, step=step) <= {0, -signal.SIGKILL}
        assert pair.reshard(*arguments) == {0}
        for queue in pair.queues:
            assert pair.layout(queue).former is None
            assert pair.homes(queue) == homes
        pair.kill_a_worker()
    (pair.site.folder / "stop").touch()
    for sender in pair.senders.values():
        assert sender.wait(60) == 0
    sent = {line.key for line in pair.site.lines("sent")}
    assert len(sent) > 100
    check(pair, sent, twice=4 * 2 * 10)
