"""Workers on a queue with shards, killed again and again: on a file, Azurite and the emulator."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import azurite
import pytest
from bus import address_at
from harness import Site
from waiting import wait_until

from aztask import App
from aztask.address.shards import shard_names
from aztask.queues.base import Sharded
from aztask.testing import emulator

KILLS = 4
TASKS = 400
SESSIONS, STEPS = 12, 8
ARGUMENTS = ("--pool", "processes", "-c", "2", "--max-lease", "60s")


class Shop:
    """A site whose queues have shards, and apps that send to them."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.stack = ExitStack()

    def app(self, *, stored: bool = True, **options: int) -> App:
        """An app of this process with these shards, on the same services.

        stored: with the result store, which notes the shards of the first app that uses it.
        """
        made = App(
            "shards",
            broker=self.site.broker,
            results=self.site.results if stored else None,
            lease=5.0,
            signing_keys=["a signing key with enough characters"],
        )
        made.queue("default", **options)
        if self.site.extra.get("SHARDS_SESSIONS"):
            made.queue("ordered", sessions=True, **options)
        self.stack.callback(made.close)
        return made

    def create(self, app: App) -> None:
        for name in app.queue_names():
            app.broker.declare(name, app.queue_options(name))

    def worker(self, **options: int) -> None:
        self.site.worker(*ARGUMENTS, SHARDS=json.dumps(options))

    def kill_one(self) -> None:
        """Kill the oldest worker, in the middle of its work, and start another one."""
        worker = next(each for each in self.site.workers if each.process.poll() is None)
        before = len(self.site.lines())
        wait_until(lambda: len(self.site.lines()) > before, 60, "the workers work")
        worker.kill()
        worker.process.wait()
        self.worker(shards=4)

    def ended(self) -> Counter[str]:
        return Counter(self.site.counts("end"))


@pytest.fixture(params=["a file", "two files", "storage queues", "service bus"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    with ExitStack() as stack:
        broker, extra = "", {}
        if request.param == "storage queues":
            server = stack.enter_context(azurite.running(tmp_path / "azurite", service="queue"))
            broker = server.connection_string
        elif request.param == "service bus":
            bus = stack.enter_context(emulator())
            broker = address_at(bus)
            extra = {"AZTASK_SERVICEBUS_ADMIN": bus.admin_connection_string}
        if request.param != "storage queues":
            extra["SHARDS_SESSIONS"] = "yes"
        joint = request.param == "a file"
        site = Site(tmp_path / "site", broker, joint=joint, module="shards_app", extra=extra)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in extra.items():
                patch.setenv(name, value)
            made = Shop(site)
            stack.callback(site.close)
            stack.callback(made.stack.close)
            yield made


def test_nothing_is_lost_or_done_twice_while_workers_are_killed(shop: Shop) -> None:
    app = shop.app(shards=4)
    shop.create(app)
    shop.worker(shards=4)
    shop.worker(shards=4)
    keys = [f"k{number}" for number in range(TASKS)]
    names = {key: "shards.again" if number % 5 == 0 else "shards.work"
             for number, key in enumerate(keys)}  # fmt: skip
    for first in range(0, TASKS, TASKS // KILLS):
        for key in keys[first : first + TASKS // KILLS]:
            app.send(names[key], [key], task_id=key)
        shop.kill_one()
    wait_until(lambda: len(shop.ended()) == TASKS, 90, "all tasks end")
    wait_until(lambda: app.broker.stats("default").living == 0, 60, "the queue is empty")
    assert app.broker.stats("default").dead == 0
    found = Counter(app.results.get(key).state.value for key in keys)
    assert found == {"succeeded": TASKS}
    twice = sum(count - 1 for count in shop.ended().values())
    assert twice <= KILLS * 2 * 10, "only what the pool processes of a dead worker held"


def test_all_shards_are_used_and_shown_as_one_queue(shop: Shop) -> None:
    app = shop.app(shards=4)
    shop.create(app)
    for number in range(80):
        app.send("shards.work", [f"k{number}"], task_id=f"k{number}")
    broker = app.broker
    assert isinstance(broker, Sharded)
    assert broker.names("default") == shard_names("default", 4)
    counts = [each.living for each in broker.shard_stats("default")]
    assert min(counts) > 5
    assert sum(counts) == broker.stats("default").living == 80
    assert "default" in broker.queues()
    assert not [name for name in broker.queues() if "shard" in name]
    shop.worker(shards=4)
    wait_until(lambda: len(shop.ended()) == 80, 60, "all tasks end")


def test_fewer_shards_are_read_as_before_until_the_others_are_empty(shop: Shop) -> None:
    before = shop.app(shards=6, stored=False)
    shop.create(before)
    for number in range(60):
        before.send("shards.work", [f"k{number}"], task_id=f"k{number}")
    assert isinstance(before.broker, Sharded)
    left = sum(each.living for each in before.broker.shard_stats("default")[2:])
    assert left > 10
    after = shop.app(shards=2, old_shards=6)
    for number in range(60, 120):
        after.send("shards.work", [f"k{number}"], task_id=f"k{number}")
    assert isinstance(after.broker, Sharded)
    counts = [each.living for each in after.broker.shard_stats("default")]
    assert sum(counts[2:]) == left, "senders choose among the new shards"
    shop.worker(shards=2, old_shards=6)
    wait_until(lambda: len(shop.ended()) == 120, 60, "all tasks end")
    wait_until(lambda: after.broker.stats("default").living == 0, 60, "all shards are empty")
    assert set(shop.ended().values()) == {1}


def test_sessions_keep_their_order_while_workers_are_killed(shop: Shop) -> None:
    if "SHARDS_SESSIONS" not in shop.site.extra:
        return  # Storage queues have no sessions
    app = shop.app(shards=4)
    shop.create(app)
    shop.worker(shards=4)
    shop.worker(shards=4)
    for number in range(STEPS):
        for session in range(SESSIONS):
            app.send(
                "shards.step",
                [f"s{session}", number],
                queue="ordered",
                session=f"s{session}",
                task_id=f"s{session}-{number}",
            )
        if number in (2, 4, 6):
            shop.kill_one()
    total = SESSIONS * STEPS
    wait_until(lambda: len(shop.site.counts("step")) == total, 90, "all steps are done")
    for session in range(SESSIONS):
        lines = [
            each.key for each in shop.site.lines("step") if each.key.startswith(f"s{session}:")
        ]
        seen = [int(key.partition(":")[2]) for key in lines]
        firsts = list(dict.fromkeys(seen))
        assert firsts == list(range(STEPS)), seen
