"""Queues with shards, where the contract says nothing: failures, costs, names."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from services import StorageQueues, storage_queue_broker
from simulated import line

from aztask import App, ConfigurationError
from aztask.address.shards import (
    ShardCount,
    read_shard_name,
    shard_name,
    shard_of,
    shard_of_session,
)
from aztask.errors import (
    BrokerError,
    BrokerUnavailable,
    LeaseRefused,
    QueueFull,
    QueueNotFound,
    SendUnconfirmed,
)
from aztask.message.envelope import Envelope
from aztask.operate.doctor import _of_shards
from aztask.operate.provision.plan import plan_for_azure
from aztask.operate.queues import queues
from aztask.queues.base import Inspectable, Receiver, Transactional, shared_transaction
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.queues.sharded import receiver as receiving
from aztask.queues.sharded.broker import JointShards, ShardedBroker, sharded
from aztask.queues.sharded.positions import behind, by_shard, inner_position, outer_position
from aztask.queues.storagequeue.receiver import StorageReceiver
from aztask.settlement import Complete
from aztask.support.clock import SYSTEM_CLOCK

FOUR = {"orders": ShardCount(4, 4)}


def ids(count: int) -> list[Envelope]:
    return [Envelope(b"x", {"id": f"t{number}"}, f"m{number}") for number in range(count)]


@pytest.fixture
def inner() -> Any:
    database = Database(":memory:")
    yield LocalBroker(database)
    database.close()


def made(inner: Any, shards: Any = None) -> ShardedBroker:
    broker = sharded(inner, shards or FOUR)
    assert isinstance(broker, ShardedBroker)
    return broker


# -- names, hashes, positions ----------------------------------------------------------------


def test_shard_0_has_the_name_of_the_queue() -> None:
    assert [shard_name("orders", n) for n in (0, 1, 12)] == [
        "orders",
        "orders-shard-1",
        "orders-shard-12",
    ]
    assert read_shard_name("orders-shard-12") == ("orders", 12)
    for other in ("orders", "orders-shard-0", "orders-shard-x", "orders-shard-123", "-shard-"):
        assert read_shard_name(other) == (other, 0)


def test_hashes_never_change() -> None:
    """Messages lie where an earlier release has put them."""
    found = [shard_of(Envelope(b"", {"id": f"t{n}"}), 16) for n in range(6)]
    assert found == HASHES
    assert shard_of(Envelope(b"", {"id": "t0"}, "another id"), 16) == HASHES[0]
    assert shard_of(Envelope(b"", {"id": "t1"}, session="s"), 16) == shard_of_session("s", 16) == 8
    assert shard_of(Envelope(b"", {}, "m"), 16) == 11
    assert shard_of(Envelope(b"body", {}), 16) == 8


HASHES = [6, 6, 2, 1, 11, 12]


def test_messages_are_spread_evenly() -> None:
    counts = Counter(shard_of(each, 16) for each in ids(16_000))
    assert len(counts) == 16
    assert min(counts.values()) > 850
    assert max(counts.values()) < 1150


def test_positions_come_back() -> None:
    for position in (0, 1, 2**50, "abc", "a:b"):
        for shard in (0, 5, 63):
            assert inner_position(outer_position(shard, position)) == (shard, position)
    assert inner_position(str(outer_position(5, 77))) == (5, 77)
    assert by_shard([outer_position(1, 7), outer_position(3, 8), outer_position(9, 1)], 4) == {
        1: [7],
        3: [8],
    }
    assert behind(outer_position(2, 7), 2) == 7
    assert behind(outer_position(2, 7), 3) == 6
    with pytest.raises(ConfigurationError, match="position of a queue with shards"):
        inner_position("x")


# -- failures --------------------------------------------------------------------------------


def test_a_queue_without_shards_is_passed_on(inner: Any) -> None:
    assert sharded(inner, {}) is inner
    broker = made(inner)
    broker.send("plain", ids(3))
    assert inner.stats("plain").active == 3
    receiver = broker.receiver("plain", lease=5.0)
    assert not isinstance(receiver, receiving.ShardedReceiver)


def test_a_send_that_fails_in_some_shards_names_what_is_missing(
    inner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, sent = made(inner), ids(40)
    send = LocalBroker.send

    def failing(self: Any, queue: str, envelopes: Sequence[Envelope]) -> None:
        if queue.endswith(("1", "3")):
            raise QueueFull("full")
        send(self, queue, envelopes)

    monkeypatch.setattr(LocalBroker, "send", failing)
    missing = [each for each in sent if shard_of(each, 4) in (1, 3)]
    with pytest.raises(SendUnconfirmed, match="2 of 4 shards of queue 'orders'") as raised:
        broker.send("orders", sent)
    assert sorted(each.message_id for each in raised.value.unconfirmed) == sorted(
        each.message_id for each in missing
    )
    assert broker.stats("orders").active == 40 - len(missing)
    with pytest.raises(QueueFull):
        broker.send("orders", missing)
    monkeypatch.undo()
    broker.send("orders", raised.value.unconfirmed)
    assert broker.stats("orders").active == 40


def test_a_shard_that_fails_rests_and_the_others_go_on(
    inner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broker = made(inner)
    broker.send("orders", ids(40))
    receiver = broker.receiver("orders", lease=30.0)
    asked = Counter[str]()
    kind: Any = type(receiver._receivers[0])
    receive = kind.receive

    def failing(self: Any, limit: int, wait: float) -> Any:
        asked[self._queue] += 1
        if self._queue == "orders-shard-2":
            raise BrokerUnavailable("gone")
        return receive(self, limit, wait)

    monkeypatch.setattr(kind, "receive", failing)
    with caplog.at_level("INFO"):
        found = [each for _ in range(8) for each in receiver.receive(10, 0.01)]
    assert {each.shard for each in found} == {0, 1, 3}
    assert asked["orders-shard-2"] == 1
    assert "shard orders-shard-2: cannot receive, retry in 0.5 s: gone" in caplog.text
    monkeypatch.undo()
    receiver._resting._failures[2] = (0, 0.0, BrokerUnavailable("gone"))
    with caplog.at_level("INFO"):
        found = [each for _ in range(8) for each in receiver.receive(10, 0.01)]
    assert {each.shard for each in found} == {2}
    assert "shard orders-shard-2: receiving works again" in caplog.text


def test_a_receive_raises_if_no_shard_can_be_received_from(
    inner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = made(inner).receiver("orders", lease=30.0)

    def failing(self: Any, limit: int, wait: float) -> Any:
        raise QueueNotFound(f"no queue {self._queue}")

    monkeypatch.setattr(type(receiver._receivers[0]), "receive", failing)
    began = time.monotonic()
    with pytest.raises(QueueNotFound, match="no queue orders"):
        receiver.receive(10, 5.0)
    assert time.monotonic() - began < 1.0, "it does not wait for its time"


def unreachable(kind: Any, names: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these calls of receivers fail in shard 1."""

    def failing(call: Any) -> Any:
        def failing_one(self: Any, *given: Any) -> Any:
            if self._requests.queue.endswith("-shard-1"):
                raise BrokerUnavailable("gone")
            return call(self, *given)

        return failing_one

    for name in names:
        monkeypatch.setattr(kind, name, failing(getattr(kind, name)))


def test_the_answers_of_other_shards_count_if_one_is_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = StorageQueues(SYSTEM_CLOCK)
    inner = storage_queue_broker(service, line(SYSTEM_CLOCK), poll_ceiling=0.05)
    broker = sharded(inner, FOUR, poll_ceiling=0.05)
    broker.declare("orders")
    broker.send("orders", ids(40))
    receiver: Any = broker.receiver("orders", lease=30.0)
    held = [each for _ in range(12) for each in receiver.receive(32, 0.1)]
    assert len(held) == 40
    unreachable(StorageReceiver, ("settle", "renew"), monkeypatch)
    for answers, names in (
        (receiver.renew(held), {"Renewed"}),
        (receiver.settle([(each, Complete()) for each in held]), {"Settled"}),
    ):
        for each, answer in zip(held, answers, strict=True):
            wanted = {"Unknown"} if each.shard == 1 else names
            assert {type(answer).__name__} == wanted
    with pytest.raises(BrokerUnavailable):
        receiver.settle([(each, Complete()) for each in held if each.shard == 1])
    broker.close()
    with pytest.raises(BrokerError, match="was closed"):
        broker.stats("orders")


def test_shards_in_one_file_fail_together(inner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = made(inner)
    broker.send("orders", ids(40))
    receiver: Any = broker.receiver("orders", lease=30.0)
    held = [each for _ in range(6) for each in receiver.receive(20, 0.01)]
    kind: Any = type(receiver._receivers[0])
    settle = kind.settle

    def failing(self: Any, pairs: Any) -> Any:
        if self._queue == "orders-shard-1":
            raise QueueFull("full")
        return settle(self, pairs)

    monkeypatch.setattr(kind, "settle", failing)
    with pytest.raises(QueueFull), inner.transaction():
        receiver.settle([(each, Complete()) for each in held])
    monkeypatch.undo()
    assert broker.stats("orders").leased == 40, "nothing was settled"


@pytest.mark.parametrize("error", [LeaseRefused("60 s"), RuntimeError("of an SDK")])
def test_a_shard_that_is_set_up_wrongly_keeps_no_other_one_waiting(
    inner: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = made(inner)
    broker.send("orders", ids(40))
    receiver: Any = broker.receiver("orders", lease=30.0)
    kind: Any = type(receiver._receivers[0])
    receive = kind.receive

    def failing(self: Any, limit: int, wait: float) -> Any:
        if self._queue == "orders-shard-2":
            raise error
        return receive(self, limit, wait)

    monkeypatch.setattr(kind, "receive", failing)
    found: set[int] = set()
    for _ in range(12):
        with suppress(RuntimeError):
            found |= {each.shard for each in receiver.receive(10, 0.01)}
    assert found == {0, 1, 3}


# -- costs -----------------------------------------------------------------------------------


def test_an_empty_sharded_queue_is_polled_twice_as_often_as_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    polls = Counter[str]()
    take = StorageReceiver._take

    def counting(self: Any, limit: int) -> Any:
        polls["polls"] += 1
        return take(self, limit)

    monkeypatch.setattr(StorageReceiver, "_take", counting)
    service = StorageQueues(SYSTEM_CLOCK)

    def cost(shards: int) -> int:
        ceiling = 0.05
        inner = storage_queue_broker(service, line(SYSTEM_CLOCK), poll_ceiling=ceiling)
        broker = sharded(inner, {"orders": ShardCount(shards, shards)} if shards > 1 else {},
                         poll_ceiling=ceiling)  # fmt: skip
        broker.declare("orders")
        receiver: Receiver = broker.receiver("orders", lease=30.0)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:  # until the pauses have their length
            assert receiver.receive(10, 0.2) == []
        polls.clear()
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            assert receiver.receive(10, 0.2) == []
        broker.close()
        return polls["polls"]

    alone, spread = cost(1), cost(8)
    assert alone > 20
    assert spread <= 2.2 * alone


def test_broker_and_results_of_one_file_share_their_transactions(tmp_path: Path) -> None:
    app = App("shop", broker=f"local://{tmp_path}/q.db", results=f"local://{tmp_path}/q.db")
    app.queue("orders", shards=4)
    assert isinstance(app.broker, JointShards)
    assert isinstance(app.broker, Transactional)
    assert shared_transaction(app.broker, app.results) is app.broker
    assert app.results is not None
    app.close()


# -- apps ------------------------------------------------------------------------------------


@pytest.fixture
def app(tmp_path: Path) -> Any:
    made = App("shop", broker=f"local://{tmp_path}/q.db", results=f"local://{tmp_path}/r.db")
    yield made
    made.close()


@pytest.mark.parametrize("count", [0, 65, -1, 2.0, "4", True])
def test_a_wrong_number_of_shards_is_refused(app: App, count: Any) -> None:
    with pytest.raises(ConfigurationError, match="shards is a whole number from 1 to 64"):
        app.queue("orders", shards=count)


def test_shards_are_declared_before_the_app_is_used(app: App) -> None:
    app.queue("orders", shards=4)
    app.queue("orders", shards=4, lease=30)
    app.broker.declare("orders")
    app.queue("orders", shards=4, lease=20)
    with pytest.raises(ConfigurationError, match="'orders' gets its shards too late"):
        app.queue("orders", shards=5)


def test_a_shard_has_the_settings_of_its_queue(app: App) -> None:
    app.queue("orders", shards=4, lease=33, priorities={"high": 2})
    assert app.lease_seconds("orders-shard-3") == 33
    assert app.lease_seconds("orders-high-shard-3") == 33
    with pytest.raises(ConfigurationError, match="'orders-shard-3' is a shard of queue 'orders'"):
        app.queue("orders-shard-3", lease=5)
    app.queue("orders-shard-9", lease=5)
    assert app.queue_names() == ["default", "orders", "orders-high", "orders-shard-9"]
    assert app.queues.shards("orders-high")[3] == "orders-high-shard-3"


def test_a_name_that_no_service_allows_is_refused_with_its_shards() -> None:
    app = App("shop", broker="storagequeue://account")
    app.queue("a" * 50)
    with pytest.raises(ConfigurationError, match="queue 'aaaa"):
        app.queue("a" * 60, shards=4)


def test_an_older_and_larger_number_is_read_and_not_sent_to(app: App) -> None:
    app.queue("orders", shards=2, old_shards=5)
    for number in range(40):
        app.send("shop.any", [], queue="orders", task_id=f"t{number}")
    counts = queues(app).shards["orders"]
    assert {each.queue: each.living > 0 for each in counts} == {
        "orders": True,
        "orders-shard-1": True,
    }
    assert app.queues.shards("orders")[-1] == "orders-shard-4"


def test_the_doctor_finds_shards_that_no_worker_reads(tmp_path: Path) -> None:
    place = f"local://{tmp_path}/q.db"
    before = App("shop", broker=place)
    before.queue("orders", shards=6)
    for number in range(40):
        before.send("shop.any", [], queue="orders", task_id=f"t{number}")
    held = {each.queue: each.living for each in queues(before).shards["orders"]}
    assert list(_of_shards(before)) == []
    before.close()
    after = App("shop", broker=place)
    after.queue("orders", shards=2)
    found = list(_of_shards(after))
    assert len(found) == 4
    assert f"orders-shard-5 holds {held['orders-shard-5']} messages" in found[-1].text
    assert "app.queue('orders', ..., old_shards=6)" in found[-1].advice
    after.close()


def test_a_missing_shard_is_a_missing_queue() -> None:
    service = StorageQueues(SYSTEM_CLOCK)
    inner = storage_queue_broker(service, line(SYSTEM_CLOCK), poll_ceiling=0.05)
    broker = sharded(inner, FOUR)
    with pytest.raises(QueueNotFound, match="orders"):
        broker.stats("orders")
    for name in ("orders", "orders-shard-1", "orders-shard-3"):
        inner.declare(name)
    assert [each.queue for each in broker.shard_stats("orders")] == [
        "orders",
        "orders-shard-1",
        "orders-shard-3",
    ]
    with pytest.raises(QueueNotFound, match="orders-shard-2"):
        broker.send("orders", [each for each in ids(40) if shard_of(each, 4) == 2])
    assert isinstance(broker, Inspectable)
    facts = broker.inspector().facts("orders")
    assert (facts.queue, facts.exists) == ("orders", False)
    broker.declare("orders")
    assert broker.inspector().facts("orders").exists
    broker.close()


def test_the_plan_for_azure_has_each_shard() -> None:
    app = App("shop", broker="servicebus://shop-space")
    app.queue("orders", shards=3, lease=45)

    @app.task(queue="orders")
    def work() -> None: ...

    found = {each.name: each.lock for each in plan_for_azure(app, "shop:app").queues}
    assert found == {"orders": 45.0, "orders-shard-1": 45.0, "orders-shard-2": 45.0}


def test_the_commands_show_one_queue_and_on_demand_its_shards(tmp_path: Path, cli: Any) -> None:
    (tmp_path / "shardshop.py").write_text(
        f"from aztask import App\napp = App('shop', broker='local://{tmp_path}/q.db')\n"
        "app.queue('orders', shards=3)\n"
        "@app.task(queue='orders')\ndef work(n): ...\n"
    )
    app = ["-A", "shardshop:app"]
    for word in "abcdef":
        cli("send", *app, "shop.work", "--args", f'["{word}"]', "--task-id", word)
    shown = cli("queues", "list", *app).out.splitlines()
    assert [line.split()[:2] for line in shown[1:]] == [["orders", "6"]]
    shown = cli("queues", "list", "--shards", *app).out.splitlines()
    assert [line.split()[0] for line in shown[1:]] == [
        "orders",
        "orders",
        "orders-shard-1",
        "orders-shard-2",
    ]
    assert sum(int(line.split()[1]) for line in shown[2:]) == 6
    (record,) = map(json.loads, cli("queues", "list", "--json", *app).out.splitlines())
    assert [each["queue"] for each in record["shards"]][2] == "orders-shard-2"
    assert sum(each["total"] for each in record["shards"]) == record["total"] == 6
