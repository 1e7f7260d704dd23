"""Queues that get 16 shards and then 2 while programs send and work, and are killed.

On a file, two files, Azurite and the emulator. Senders, workers and the command are killed, the
command and a worker at each step of the move.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import azurite
import pytest
from bus import address_at
from harness import HERE, Site
from waiting import wait_until

from aztask import App
from aztask.operate.resharding import layouts
from aztask.stores import shardlayouts
from aztask.testing import emulator

REFRESH = 3.0
BETWEEN_KILLS = 8.0
BETWEEN_KILLS_OF_SESSIONS = 30.0
"""Seconds: on Service Bus, a worker looks for sessions in 16 shards for half a minute."""
SENDERS = ("a", "b")
STEPS = ("reshard-created", "reshard-announced", "reshard-empty")
WORKER = ("--pool", "processes", "-c", "2", "--max-lease", "60s")
KEY = "a signing key with enough characters"


class Mill:
    """A site with senders and workers that go on while its queues are moved."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.chance = random.Random(7)
        self.killed_at = time.monotonic()
        slow = "AZTASK_SERVICEBUS_ADMIN" in site.extra
        self.between_kills = BETWEEN_KILLS_OF_SESSIONS if slow else BETWEEN_KILLS
        self.senders: dict[str, subprocess.Popen[bytes]] = {}
        self.log = (site.folder / "programs.log").open("ab")
        self.app = App(
            "shards", broker=site.broker, results=site.results, lease=5.0, signing_keys=[KEY]
        )
        self.app.queue("default", shards=4)
        self.queues = ["default"]
        if site.extra.get("SHARDS_SESSIONS"):
            self.app.queue("ordered", shards=4, sessions=True)
            self.queues.append("ordered")
        for name in self.queues:
            self.app.broker.declare(name, self.app.queue_options(name))

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

    def kill_a_sender(self) -> None:
        """Kill one that has sent something since its start."""
        name = self.chance.choice(SENDERS)
        sender = self.senders[name]
        if any(line.pid == sender.pid for line in self.site.lines("sent")):
            sender.kill()
            sender.wait()
            self.send(name)

    def kill_a_worker(self) -> None:
        """Kill the oldest one; its sessions are free when its leases have ended."""
        self.killed_at = time.monotonic()
        worker = next(each for each in self.site.workers if each.process.poll() is None)
        worker.kill()
        worker.process.wait()
        self.site.worker(*WORKER)

    def reshard(self, count: int, *, step: str, kills: bool) -> list[int]:
        """Move all queues; the command is killed at this step. Its exit codes."""
        failpoint = {"AZTASK_FAILPOINT": f"{step}:KILL"} if step else {}
        name = "aztask"
        commands = [
            self.start("-m", name, "queues", "reshard", "-A", "shards_app:app", queue,
                       "--shards", str(count), "--yes", **failpoint)
            for queue in self.queues
        ]  # fmt: skip
        until = time.monotonic() + 240
        while any(each.poll() is None for each in commands):
            assert time.monotonic() < until, "the move does not end"
            time.sleep(0.7)
            self.kill_a_sender()
            if kills and time.monotonic() - self.killed_at > self.between_kills:
                self.kill_a_worker()
        return [each.returncode for each in commands]

    def stop(self) -> None:
        (self.site.folder / "stop").touch()
        for each in self.senders.values():
            assert each.wait(60) == 0

    def close(self) -> None:
        for each in self.senders.values():
            each.kill()
            each.wait()
        self.app.close()
        self.log.close()


@pytest.fixture(params=["a file", "two files", "storage queues", "service bus"])
def mill(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Mill]:
    monkeypatch.setattr(shardlayouts, "REFRESH_SECONDS", REFRESH)
    with ExitStack() as stack:
        broker, extra = "", {"SHARDS_REFRESH": str(REFRESH)}
        if request.param == "storage queues":
            server = stack.enter_context(azurite.running(tmp_path / "azurite", service="queue"))
            broker = server.connection_string
        else:
            extra["SHARDS_SESSIONS"] = "yes"
        if request.param == "service bus":
            bus = stack.enter_context(emulator())
            broker = address_at(bus)
            extra["AZTASK_SERVICEBUS_ADMIN"] = bus.admin_connection_string
        for name, value in extra.items():
            monkeypatch.setenv(name, value)
        joint = request.param == "a file"
        site = Site(tmp_path / "site", broker, joint=joint, module="shards_app", extra=extra)
        stack.callback(site.close)
        made = Mill(site)
        stack.callback(made.close)
        yield made


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [False, True], ids=["senders killed", "workers killed, too"])
def test_queues_are_moved_under_load(mill: Mill, kills: bool) -> None:
    for name in SENDERS:
        mill.send(name)
    mill.site.worker(*WORKER, AZTASK_FAILPOINT="reshard-empty:KILL" if kills else "")
    mill.site.worker(*WORKER)
    wait_until(lambda: len(mill.site.lines("end")) > 20, 60, "the workers work")
    for count in (16, 2):
        for step in STEPS:
            codes = mill.reshard(count, step=step, kills=kills)
            assert set(codes) <= {0, -signal.SIGKILL}, step
        assert set(mill.reshard(count, step="", kills=kills)) == {0}
        for queue in mill.queues:
            found: Any = layouts(mill.app)[queue]
            assert (found.sent.count, found.former) == (count, None)
    mill.stop()
    check(mill, kills=kills)


def check(mill: Mill, *, kills: bool) -> None:
    """Nothing is lost, nothing is done twice, each session is in order."""
    sent = {line.key for line in mill.site.lines("sent")}
    assert len(sent) > 100

    def ended() -> dict[str, int]:
        return {**mill.site.counts("end"), **mill.site.counts("step")}

    wait_until(lambda: sent <= ended().keys(), 90, "all tasks end")
    wait_until(
        lambda: not any(mill.app.broker.stats(each).living for each in mill.queues),
        60,
        "the queues are empty",
    )
    assert all(mill.app.broker.stats(each).dead == 0 for each in mill.queues)
    twice = {key: count for key, count in ended().items() if count > 1}
    # A worker that is killed leaves what its pool processes had done and it had not recorded.
    most = 2 * len([each for each in mill.site.workers if each.process.poll() not in (None, 0)])
    assert len(twice) <= most if kills else twice == {}
    results = mill.app.results
    assert results is not None
    states = {results.get(key).state.value for key in sent}  # type: ignore[union-attr]
    assert states == {"succeeded"}
    steps: dict[str, list[int]] = defaultdict(list)
    for line in mill.site.lines("step"):
        session, _, number = line.key.rpartition(":")
        steps[session].append(int(number))
    assert len(steps) == (6 if "ordered" in mill.queues else 0)
    for session, numbers in steps.items():
        firsts = list(dict.fromkeys(numbers))
        assert firsts == list(range(len(firsts))), session
