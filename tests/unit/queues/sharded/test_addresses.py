"""Apps with several addresses: what is refused, where shards live, and an address that fails."""

from __future__ import annotations

import json
import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from services import StorageQueues, storage_queue_broker
from simulated import line
from waiting import wait_until

from aztask import App, ConfigurationError
from aztask.address.shards import (
    MOST_SHARDS,
    AddressNames,
    ShardCount,
    ShardLayout,
    ShardRange,
    spread,
)
from aztask.address.urls import parse_broker, split_brokers
from aztask.errors import BrokerUnavailable, QueueNotFound, SendUnconfirmed
from aztask.message.envelope import Envelope
from aztask.operate.deadletters import Selection
from aztask.operate.deadletters.actions import replay
from aztask.operate.doctor import examine
from aztask.operate.owners import adoption
from aztask.operate.queues import queues
from aztask.operate.resharding import look_after, reshard, shard_tools
from aztask.queues.base import QueueOptions
from aztask.queues.delivery import Renewed, Settled, Unknown
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.queues.sharded import addresses as sharding
from aztask.queues.sharded.addresses import AddressBroker, Home
from aztask.queues.sharded.broker import ShardedBroker, sharded
from aztask.queues.sharded.layouts import DeclaredLayouts
from aztask.queues.storagequeue.receiver import StorageReceiver
from aztask.settlement import Complete, DeadLetter
from aztask.stores import shardlayouts
from aztask.support.clock import SYSTEM_CLOCK

TWO = AddressNames(("a", "b"), "a", several=True)
THREE = AddressNames(("a", "b", "c"), "a", several=True)
FOUR = {"orders": ShardCount(4, 4, declared=True)}
KEY = "c2VjcmV0LWtleS1vZi10aGUtYWNjb3VudA=="


def ids(count: int) -> list[Envelope]:
    return [Envelope(b"x", {"id": f"t{number}"}, f"m{number}") for number in range(count)]


# -- which shard lives where -----------------------------------------------------------------


def test_shards_are_spread_evenly_and_move_as_little_as_possible() -> None:
    assert spread(5, "ab") == ("a", "b", "a", "b", "a")
    for count in range(1, MOST_SHARDS + 1):
        before = spread(count, "abc")
        for addresses in ("abcd", "ab", "cb", "dabc", "abcde", "c"):
            after = spread(count, addresses, before)
            had, has = Counter(before), Counter(after)
            sizes = [has[each] for each in addresses]
            assert max(sizes) - min(sizes) <= 1
            moved = sum(old != new for old, new in zip(before, after, strict=True))
            room = sorted((had[each] for each in addresses), reverse=True)
            least, more = divmod(count, len(addresses))
            stay = sum(min(size, least + (place < more)) for place, size in enumerate(room))
            assert moved == count - stay
            assert spread(count, addresses, after) == after


def test_more_shards_leave_the_others_where_they_are() -> None:
    assert spread(8, "ab", spread(4, "ab")) == tuple("abababab")
    assert spread(4, "ab", ("a", "a", "a", "a")) == tuple("aabb")


def test_a_shard_whose_address_changes_gets_another_number() -> None:
    layout = ShardLayout.declared(ShardCount(6, 6), TWO)
    assert layout.homes == tuple("ababab")
    moved = layout.moved(6, ordered=False, addresses=THREE)
    assert moved.sent == ShardRange.among([0, 1, 2, 3, 6, 7])
    assert moved.homes == (*"ababab", "c", "c")
    assert moved.leaving() == (4, 5)
    assert moved.reading(ShardCount(6, 6)) == (0, 1, 2, 3, 4, 5, 6, 7)
    back = moved.ended(0).moved(6, ordered=False, addresses=THREE, without="c")
    assert back.sent == ShardRange(0, 6), "numbers that are free come back"
    assert back.homes == moved.homes


def test_sessions_move_to_numbers_that_hold_nothing() -> None:
    layout = ShardLayout.declared(ShardCount(4, 4), TWO)
    moved = layout.moved(4, ordered=True, addresses=TWO, without="b")
    assert (moved.sent, moved.homes) == (ShardRange(4, 4), (*"abab", *"aaaa"))
    assert moved.reading(ShardCount(4, 4)) == (0, 1, 2, 3)
    again = moved.ended(0).moved(4, ordered=True, addresses=TWO)
    assert [again.homes[each] for each in again.sent.numbers] == list("aabb")
    assert not {*again.sent.numbers} & {*moved.sent.numbers}


def test_a_layout_of_one_address_is_at_home() -> None:
    layout = ShardLayout(ShardRange(0, 4), epoch=3)
    assert layout.home(2, TWO) == "a"
    moved = layout.moved(4, ordered=False, addresses=TWO)
    assert (moved.sent.numbers, moved.homes) == ((0, 1, 4, 5), tuple("aaaabb"))


def test_numbers_may_run_out() -> None:
    layout = ShardLayout.declared(ShardCount(64, 64), TWO)
    with pytest.raises(ConfigurationError, match="all 64 numbers of shards are taken"):
        layout.moved(64, ordered=False, addresses=THREE)


@pytest.mark.parametrize("ordered", [False, True])
def test_whatever_moves_come_a_number_stays_where_it_is(ordered: bool) -> None:
    for seed in range(300):
        chance = random.Random(seed)
        places = AddressNames(tuple("abcd"[: chance.randint(1, 4)]), "a", several=True)
        layout = ShardLayout.declared(ShardCount(n := chance.randint(1, 6), n), places)
        for _ in range(6):
            names = tuple(chance.sample("abcdef", chance.randint(1, 4)))
            names = tuple(dict.fromkeys([*names, *(layout.homes[n] for n in layout.sent.numbers)]))
            places = AddressNames(names, "a", several=True)
            without = chance.choice([*names, ""]) if len(names) > 1 else ""
            try:
                moved = layout.moved(chance.randint(1, 6), ordered=ordered, addresses=places,
                                     without=without)  # fmt: skip
            except ConfigurationError:  # the numbers have run out
                break
            assert moved.homes[: len(layout.homes)] == layout.homes
            numbers = list(moved.sent.numbers)
            assert len(set(numbers)) == moved.sent.count == len(numbers)
            used = Counter(moved.homes[number] for number in numbers)
            assert without not in used
            counts = [used[name] for name in names if name != without]
            assert max(counts) - min(counts) <= 1
            assert not {*moved.leaving()} & {*numbers}
            assert moved.unknown_homes(places) == []
            if ordered:
                assert not {*numbers} & {*layout.sent.numbers}
            assert max(numbers) < moved.top <= MOST_SHARDS
            layout = moved.ended(chance.choice([0, moved.top]))


def test_an_id_and_its_message_have_one_shard() -> None:
    shards = ShardRange.among([0, 7, 2])
    assert {shards.of_id(f"t{n}") for n in range(40)} == {0, 2, 7}
    for each in ids(40):
        assert shards.of(each) == shards.of_id(each.headers["id"])


# -- what is refused -------------------------------------------------------------------------


def two_files(path: Path) -> list[str]:
    return [f"local://{path}/a.db", f"local://{path}/b.db"]


def shop(path: Path, broker: Any = None, **options: Any) -> App:
    given = {"results": f"local://{path}/r.db", "owner": "shop", **options}
    made = App("shop", broker=two_files(path) if broker is None else broker, **given)
    made.queue("orders", shards=4)

    @made.task(queue="orders")
    def work(n: int) -> int:
        return n

    return made


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    made = shop(tmp_path)
    made.broker.declare("orders", QueueOptions())
    yield made
    made.close()


def account(name: str) -> str:
    return f"DefaultEndpointsProtocol=https;AccountName={name};AccountKey={KEY}"


@pytest.mark.parametrize(
    ("broker", "options", "error"),
    [
        ([], {}, "the list of broker addresses is empty; name at least one, or leave it out"),
        (["storagequeue://aaa", "servicebus://aaaaaa"], {}, "of several kinds: servicebus, stor"),
        (["storagequeue://aaa", account("aaa")], {}, "storagequeue://aaa.core.windows.net is na"),
        (["local:///a.db", "local:///a.db?durable=full"], {}, "local:///a.db is named twice"),
        (["local:///a.db", "local://:memory:"], {}, ":memory: cannot be one of several"),
        (["local:///a.db", "local:///b.db?durabel=full"], {}, "no option 'durabel'. Did you mean"),
        (["local:///a.db", 5], {}, "a broker is given as text, not as int"),
        (["local:///a.db", "local:///b.db"], {"results": None}, "needs a result store"),
        (["local:///a.db", "local:///b.db"], {"owner": None}, r"write App\(owner='shop'\); or se"),
        (
            ["storagequeue://aaa", "storagequeue://bbb"],
            {"owner": None},
            r"write App\(owner='shop'\), or 'storagequeue://aaa.core.windows.net' to go on with",
        ),
    ],
)
def test_wrong_lists_are_refused_in_one_line(
    broker: Any, options: Any, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZTASK_RESULTS", raising=False)
    with pytest.raises(ConfigurationError, match=error) as raised:
        App("shop", broker=broker, **{"results": "local:///r.db", "owner": "shop", **options})
    assert "\n" not in str(raised.value)
    assert KEY not in str(raised.value)


def test_a_text_may_hold_several_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_brokers("local:///x,y.db") is None
    assert split_brokers(f"{account('aaa')}, {account('bbb')}") == [account("aaa"), account("bbb")]
    assert split_brokers("local:///a.db,") == ["local:///a.db"]
    with pytest.raises(ConfigurationError, match="several broker addresses are given where one"):
        parse_broker("local:///a.db,local:///b.db")
    monkeypatch.setenv("AZTASK_BROKER", ",".join(two_files(tmp_path)))
    app = shop(tmp_path, broker="")
    assert app.address == ", ".join(two_files(tmp_path))
    assert isinstance(app.broker_target, tuple)
    app.close()
    secret = App("s", broker=f"{account('aaa')},{account('bbb')}", owner="s", results="local://")
    assert KEY not in secret.address
    assert "AccountName=bbb" in secret.address


def test_a_program_that_knows_one_of_them_is_refused(tmp_path: Path, app: App) -> None:
    other = shop(tmp_path, f"local://{tmp_path}/a.db")
    with pytest.raises(ConfigurationError, match=r"owner 'shop' are spread over .*b.db, and this"):
        other.broker.stats("orders")
    other.close()
    fewer = shop(tmp_path, [f"local://{tmp_path}/a.db"])
    with pytest.raises(ConfigurationError, match=r"'orders' also lives at local://.*/b.db, which"):
        fewer.broker.send("orders", ids(1))
    fewer.close()


def test_rows_of_one_address_are_not_left_behind(tmp_path: Path) -> None:
    before = shop(tmp_path, f"local://{tmp_path}/a.db", owner=None)
    before.send("shop.work", [1], task_id="one")
    owner = before.owner.broker
    before.close()
    lost = shop(tmp_path)
    with pytest.raises(ConfigurationError, match=f"has rows of {owner}, and none of shop: write"):
        lost.broker.stats("orders")
    lost.close()
    kept = shop(tmp_path, [f"local://{tmp_path}/b.db", f"local://{tmp_path}/a.db"], owner=owner)
    assert kept.broker.stats("orders").active == 1, "the older address is home, whatever its place"
    again = shop(tmp_path)
    again.close()
    kept.close()


def test_an_app_with_one_address_gets_another_one_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shardlayouts, "REFRESH_SECONDS", 0.2)
    monkeypatch.setattr(shardlayouts, "FREE_SECONDS", 0.1)
    first, second = two_files(tmp_path)
    before = shop(tmp_path, first, owner=None)
    before.broker.send("orders", ids(40))
    app = shop(tmp_path, [second, first], owner=before.owner.broker)
    assert app.broker.stats("orders").active == 40
    before.broker.send("orders", ids(80)[40:])
    move = reshard(app, "orders")
    assert [move.moves["orders"].homes[n] for n in move.moves["orders"].sent.numbers] == [
        first,
        first,
        second,
        second,
    ]
    move.act()
    late = ids(120)[80:]

    def refused() -> bool:
        try:
            before.broker.send("orders", late[:1])
        except ConfigurationError as error:
            return f"also lives at {second}" in str(error)
        late.pop(0)
        return False

    wait_until(refused, 10, "a program that knows one address is refused once the move counts")
    receiver = app.broker.receiver("orders", lease=30.0)
    wanted, held = 120 - len(late), 0
    until = time.monotonic() + 20.0
    while held < wanted and time.monotonic() < until:
        found = receiver.receive(20, 0.1)
        held += len(found)
        receiver.settle([(each, Complete()) for each in found])
    assert held == wanted
    before.close()
    app.close()


def test_adopted_rows_are_not_left_behind(tmp_path: Path) -> None:
    before = shop(tmp_path, f"local://{tmp_path}/a.db", owner=None)
    before.send("shop.work", [1], task_id="one")
    owner = before.owner.broker
    before.close()
    app = shop(tmp_path)
    assert adoption(app, owner).act() > 0
    assert app.broker.stats("orders").active == 1
    app.close()


def test_all_programs_have_one_home_whatever_the_order_of_their_lists(
    tmp_path: Path, app: App
) -> None:
    app.send("shop.other", [1], queue="plain")
    other = shop(tmp_path, two_files(tmp_path)[::-1])
    other.send("shop.other", [2], queue="plain")
    other.send("shop.other", [3], queue="newer")
    assert app.broker.stats("plain").active == 2
    assert {queues(other).homes[name] for name in ("plain", "newer")} == {two_files(tmp_path)[0]}
    other.close()


def test_the_doctor_finds_messages_that_no_worker_reads(app: App, tmp_path: Path) -> None:
    app.broker.send("orders", ids(4))
    assert not [each for each in examine(app, ["orders"]) if each.check == "addresses"]
    database = Database(f"{tmp_path}/b.db")
    LocalBroker(database).send("orders", ids(3))
    (found,) = [each for each in examine(app, ["orders"]) if each.check == "addresses"]
    assert "b.db holds 3 messages in orders, which lives at another address" in str(found)
    database.close()


def test_a_queue_that_is_only_listed_is_not_noted(app: App, tmp_path: Path) -> None:
    app.broker.send("plain", ids(1))
    database = Database(f"{tmp_path}/a.db")
    LocalBroker(database).send("others", ids(1))
    database.close()
    assert {each.queue for each in queues(app).queues} == {"orders", "others", "plain"}
    tools = shard_tools(app)
    assert tools is not None
    assert tools.rows.read("plain") is not None
    assert tools.rows.read("others") is None
    app.broker.send("others", ids(1))
    assert tools.rows.read("others") is not None


def test_a_queue_without_shards_lives_at_one_address(app: App) -> None:
    for number in range(20):
        app.send("shop.other", [number], queue="plain")
    (found,) = [each for each in queues(app).shards["plain"] if each.living]
    assert (found.queue, found.active) == ("plain", 20)
    assert reshard(app, "plain").count == 0


# -- one queue, and its shards ---------------------------------------------------------------


def test_the_shards_are_shown_with_their_addresses(app: App, cli: Any, tmp_path: Path) -> None:
    for number in range(20):
        app.send("shop.work", [number])
    found = queues(app)
    assert [each.queue for each in found.queues] == ["orders"]
    assert {found.homes[each.queue][-4:] for each in found.shards["orders"]} == {"a.db", "b.db"}
    texts = [str(each) for each in examine(app, ["orders"])]
    assert any("b.db is on a file system" in each for each in texts)
    assert not [each for each in texts if "addresses" in each and "spread" in each]


def test_dead_letters_of_both_addresses_are_replayed(app: App) -> None:
    for number in range(20):
        app.send("shop.work", [number], task_id=f"t{number}")
    receiver = app.broker.receiver("orders", lease=30.0)
    held = [each for _ in range(12) for each in receiver.receive(20, 0.02)]
    receiver.settle([(each, DeadLetter("why")) for each in held])
    receiver.close()
    dead = {each.queue: each.dead for each in queues(app).shards["orders"]}
    assert sum(dead.values()) == 20
    assert min(dead.values()) > 0
    action = replay(app, ["orders"], Selection(task="shop.work"))
    assert action.count == 20
    action.act()
    stats = app.broker.stats("orders")
    assert (stats.active, stats.dead) == (20, 0)


def test_moves_between_addresses_are_planned(app: App, tmp_path: Path) -> None:
    first, second = (f"local://{tmp_path}/{name}.db" for name in "ab")
    app.broker.send("orders", ids(1))
    assert reshard(app, "orders").count == 0
    action = reshard(app, "orders", without=second)
    assert action.moves["orders"].sent.numbers == (0, 4, 2, 5)
    assert f"to 4 shards at {first} (4); its 1 message" in str(action)
    with pytest.raises(ConfigurationError, match=r"c.db is not an address of the app\. Did you me"):
        reshard(app, "orders", without=f"local://{tmp_path}/c.db")
    with pytest.raises(ConfigurationError, match="--former is for an app with one address"):
        reshard(app, "orders", former=3)
    one = shop(tmp_path / "one", [first.replace("/a.db", "/one-a.db")])
    with pytest.raises(ConfigurationError, match="is the only address of the app"):
        reshard(one, "orders", without=first.replace("/a.db", "/one-a.db"))
    one.close()


def test_an_address_leaves_and_another_one_comes(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shardlayouts, "REFRESH_SECONDS", 0.2)
    monkeypatch.setattr(shardlayouts, "FREE_SECONDS", 0.1)
    first, second = two_files(tmp_path)
    app.broker.send("orders", ids(40))
    reshard(app, "orders", without=second).act()
    tools = shard_tools(app)
    assert tools is not None
    receiver = app.broker.receiver("orders", lease=30.0)
    held = 0
    until = time.monotonic() + 20.0
    while held < 40 and time.monotonic() < until:
        found = receiver.receive(10, 0.1)
        held += len(found)
        receiver.settle([(each, Complete()) for each in found])
    assert held == 40
    wait_until(lambda: look_after(app, "orders").ended, 20, "the move ends")
    app.close()
    left = shop(tmp_path, [first, f"local://{tmp_path}/c.db"])
    left.broker.send("orders", ids(40))
    assert left.broker.stats("orders").active == 40
    stats = [each for each in queues(left).shards["orders"] if each.living]
    assert {queues(left).homes[each.queue] for each in stats} == {first}
    assert any("not spread over all addresses" in str(each) for each in examine(left, ["orders"]))
    assert reshard(left, "orders").moves["orders"].homes[-2:] == (f"local://{tmp_path}/c.db",) * 2
    with pytest.raises(QueueNotFound, match=r"was at .*b.db, which this app no longer names"):
        left.broker.stats("orders-shard-1")
    left.close()


def test_an_entry_of_several_addresses_is_not_read_by_the_release_before(app: App) -> None:
    app.broker.send("orders", ids(1))
    tools = shard_tools(app)
    assert tools is not None
    (entry,) = tools.rows._store.read([shardlayouts.entry_name("orders")])
    assert entry is not None
    assert json.loads(entry.data)["v"] == 2


# -- an address that fails -------------------------------------------------------------------


class Failing:
    """A broker that can be told to fail, or to keep its callers waiting."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker
        self.error: Exception | None = None
        self.free = threading.Event()
        self.free.set()
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._broker, name)
        if not callable(found) or name in ("check", "check_name", "close"):
            return found

        def call(*given: Any, **named: Any) -> Any:
            self.asked += 1
            self.free.wait(20)
            if self.error is not None:
                raise self.error
            answer = found(*given, **named)
            return Failing.of(answer, self) if name == "receiver" else answer

        return call

    @classmethod
    def of(cls, inner: Any, like: Failing) -> Any:
        """A receiver that fails with its broker."""
        made = cls(inner)
        made.__class__ = type("FailingReceiver", (cls,), {
            "error": property(lambda self: like.error, lambda self, value: None),
            "free": property(lambda self: like.free, lambda self, value: None),
        })  # fmt: skip
        return made


def home(name: str, broker: Any, kind: Any) -> Home:
    made = Home(name, kind, None, broker)
    made._broker = broker
    return made


@pytest.fixture
def pair() -> Iterator[tuple[ShardedBroker, Failing]]:
    """A broker over two, of which the second one can fail."""
    databases = [Database(":memory:"), Database(":memory:")]
    first, second = (LocalBroker(each) for each in databases)
    failing = Failing(second)
    layouts = DeclaredLayouts(FOUR, TWO)
    homes = [home("a", first, first._kind), home("b", failing, first._kind)]
    broker = sharded(AddressBroker(homes, layouts), {}, layouts, poll_ceiling=0.05)
    assert isinstance(broker, ShardedBroker)
    yield broker, failing
    failing.free.set()
    broker.close()
    for each in databases:
        each.close()


def test_the_others_go_on_and_the_failure_is_said_once(
    pair: tuple[ShardedBroker, Failing], caplog: pytest.LogCaptureFixture
) -> None:
    broker, failing = pair
    broker.send("orders", ids(40))
    receiver = broker.receiver("orders", lease=30.0)
    failing.error = BrokerUnavailable("gone")
    with caplog.at_level("INFO"):
        found = [each for _ in range(12) for each in receiver.receive(10, 0.02)]
        assert {each.shard for each in found} == {0, 2}
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            assert receiver.receive(10, 0.02) == []
        assert caplog.text.count("broker address b does not answer") == 1
        failing.error = None
        wait_until(lambda: "broker address b answers again" in caplog.text or
                   receiver.receive(0, 0.02), 10, "it is asked again")  # fmt: skip
    rest = [each for _ in range(12) for each in receiver.receive(10, 0.02)]
    assert {each.shard for each in rest} == {1, 3}
    assert len(found) + len(rest) == 40
    receiver.close()


def test_counts_do_not_wait_for_an_address_that_rests(pair: tuple[ShardedBroker, Failing]) -> None:
    broker, failing = pair
    broker.send("orders", ids(8))
    failing.error = BrokerUnavailable("gone")
    with pytest.raises(BrokerUnavailable, match="gone"):
        broker.stats("orders")
    asked = failing.asked
    for call in (broker.stats, broker.peek):
        with pytest.raises(BrokerUnavailable, match="gone"):
            call("orders")
    assert failing.asked == asked


def test_it_is_asked_again_also_after_an_error_of_an_sdk(
    pair: tuple[ShardedBroker, Failing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "SHORTEST_REST", 0.01)
    broker, failing = pair
    assert broker.addresses is not None
    outages = broker.addresses.outages
    failing.error = BrokerUnavailable("gone")
    outages.failed("b", failing.error)
    failing.error = RuntimeError("of an SDK")
    before = failing.asked
    wait_until(lambda: outages.answers("b", "orders") or failing.asked > before + 1, 10, "asked")
    assert outages.error("b") is not None
    failing.error = QueueNotFound("it answers")
    wait_until(lambda: outages.answers("b", "orders"), 10, "it answers")
    outages.failed("b", BrokerUnavailable("gone"))
    broker.close()
    time.sleep(0.05)
    assert not outages.answers("b", "orders")


def test_all_of_them_failing_is_an_error(pair: tuple[ShardedBroker, Failing]) -> None:
    broker, failing = pair
    receiver = broker.receiver("orders", lease=30.0)
    assert broker.addresses is not None
    broker.addresses.outages.failed("a", BrokerUnavailable("gone, too"))
    broker.addresses.outages.failed("b", BrokerUnavailable("gone"))
    failing.error = BrokerUnavailable("gone")
    with pytest.raises(BrokerUnavailable, match="gone"):
        receiver.receive(1, 5.0)


def test_a_busy_address_does_not_rest(pair: tuple[ShardedBroker, Failing]) -> None:
    broker, failing = pair
    failing.error = BrokerUnavailable("busy")
    failing.error.busy = True
    with pytest.raises(BrokerUnavailable):
        broker.stats("orders")
    with pytest.raises(SendUnconfirmed):
        broker.send("orders", ids(40))
    assert broker.addresses is not None
    assert broker.addresses.outages.error("b") is None


def test_new_ids_avoid_it_and_all_else_fails(pair: tuple[ShardedBroker, Failing]) -> None:
    broker, failing = pair
    shards = broker.layouts.sending("orders", session=False)
    assert {shards.of_id(each) for each in broker.fresh_ids("orders", 60)} == {0, 1, 2, 3}
    failing.error = BrokerUnavailable("gone")
    there = next(each for each in ids(40) if shards.of(each) == 1)
    with pytest.raises(BrokerUnavailable, match="gone"):
        broker.send("orders", [there])
    assert {shards.of_id(each) for each in broker.fresh_ids("orders", 60)} == {0, 2}
    with pytest.raises(BrokerUnavailable, match="gone"):
        broker.send("orders", [there])
    with pytest.raises(SendUnconfirmed) as raised:
        broker.send("orders", ids(40))
    assert {shards.of(each) for each in raised.value.unconfirmed} == {1, 3}
    failing.error = None
    broker.send("orders", raised.value.unconfirmed)
    assert broker.stats("orders").active == 40


def test_leases_elsewhere_are_renewed_while_it_keeps_its_callers_waiting(
    pair: tuple[ShardedBroker, Failing],
) -> None:
    broker, failing = pair
    broker.send("orders", ids(40))
    receiver: Any = broker.receiver("orders", lease=5.0)
    held = [each for _ in range(12) for each in receiver.receive(20, 0.02)]
    assert len(held) == 40
    failing.free.clear()
    for untouched in (False, True):  # the second time it is not asked
        began = time.monotonic()
        answers = receiver.renew(held)
        assert time.monotonic() - began < 2.5
        for each, answer in zip(held, answers, strict=True):
            if each.shard in (0, 2):
                assert isinstance(answer, Renewed)
            else:
                assert isinstance(answer, Unknown)
                assert answer.untouched == untouched
    done = receiver.settle([(each, Complete()) for each in held])
    kinds = {each.shard: type(answer) for each, answer in zip(held, done, strict=True)}
    assert kinds == {0: Settled, 2: Settled, 1: Unknown, 3: Unknown}


def test_lists_and_checks_name_an_address_that_does_not_answer(app: App) -> None:
    app.broker.send("orders", ids(20))
    app.broker.send("plain", ids(1))
    assert isinstance(app.broker, ShardedBroker) and app.broker.addresses is not None
    second = list(app.broker.addresses.homes.values())[1]
    failing = Failing(second.broker)
    failing.error = BrokerUnavailable("gone")
    second._broker = failing  # type: ignore[assignment]
    found = queues(app)
    assert [each.queue for each in found.queues] == ["plain"]
    assert "gone" in found.left_out.refused["orders"]
    problems = [each for each in examine(app, ["orders"]) if each.check == "address"]
    assert [each.text for each in problems] == [f"{second.name} does not answer: gone"]
    facts = app.broker.inspector().facts("orders")
    assert facts.exists, "the shards at the other address are looked at"


def test_states_of_sessions_at_an_address_that_has_left_are_passed_over(tmp_path: Path) -> None:
    databases = {name: Database(f"{tmp_path}/{name}.db") for name in "ab"}
    brokers = {name: LocalBroker(each) for name, each in databases.items()}

    class Given(DeclaredLayouts):
        now = ShardLayout.declared(ShardCount(2, 2), TWO)

        def layout(self, queue: str, *, session: bool = False) -> ShardLayout:
            return self.now

        def sending(self, queue: str, *, session: bool) -> ShardRange:
            return self.now.sent

    def over(names: str, layouts: Given) -> Any:
        homes = [home(name, brokers[name], brokers[name]._kind) for name in names]
        return sharded(AddressBroker(homes, layouts), {}, layouts)

    def held(broker: Any) -> Any:
        broker.send("orders", [Envelope(b"x", session="s")])
        receiver = broker.receiver("orders", lease=30.0, session="s")
        (delivery,) = receiver.receive(1, 1.0)
        return receiver, delivery

    layouts = Given({"orders": ShardCount(2, 2, declared=True)}, TWO)
    before = over("ab", layouts)
    before.declare("orders", QueueOptions(sessions=True))
    receiver, delivery = held(before)
    receiver.set_session_state("s", b"state")
    receiver.settle([(delivery, Complete())])
    receiver.let_go()
    old = layouts.now
    there = old.home(old.sent.of_session("s"), TWO)
    stays = "b" if there == "a" else "a"
    layouts.now = old.moved(2, ordered=True, addresses=TWO, without=there).ended(0)
    after = over(stays, layouts)
    after.declare("orders", QueueOptions(sessions=True))
    receiver, delivery = held(after)
    assert receiver.session_state("s") is None
    receiver.let_go()
    both = over("ab", layouts)
    (receiver := both.receiver("orders", lease=30.0, session="s")).receive(1, 1.0)
    assert receiver.session_state("s") == b"state"
    for each in (before, after, both, *databases.values()):
        each.close()


def test_an_address_that_cannot_be_opened_keeps_no_other_one_closed(tmp_path: Path) -> None:
    (tmp_path / "b.db").mkdir()
    app = shop(tmp_path)
    shards = ShardRange(0, 4)
    here = [each for each in ids(40) if shards.of(each) in (0, 2)]
    app.broker.send("orders", here)
    with pytest.raises(ConfigurationError, match="is a directory"):
        app.broker.send("orders", [each for each in ids(40) if each not in here])
    app.close()


def test_an_empty_queue_costs_at_most_twice_the_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    polls = Counter[str]()
    take = StorageReceiver._take

    def counting(self: Any, limit: int) -> Any:
        polls["polls"] += 1
        return take(self, limit)

    monkeypatch.setattr(StorageReceiver, "_take", counting)

    def cost(shards: int) -> int:
        ceiling = 0.05
        inner: Sequence[Any] = [
            storage_queue_broker(StorageQueues(SYSTEM_CLOCK), line(SYSTEM_CLOCK),
                                 poll_ceiling=ceiling)
            for _ in range(2)
        ]  # fmt: skip
        layouts = DeclaredLayouts({"orders": ShardCount(shards, shards, declared=True)}, TWO)
        homes = [home(n, each, each._kind) for n, each in zip("ab", inner, strict=True)]
        broker = sharded(AddressBroker(homes, layouts), {}, layouts, poll_ceiling=ceiling)
        broker.declare("orders")
        receiver = broker.receiver("orders", lease=30.0)
        for wait in (1.5, 2.0):
            polls.clear()
            until = time.monotonic() + wait
            while time.monotonic() < until:
                assert receiver.receive(10, 0.2) == []
        broker.close()
        return polls["polls"]

    alone, over_two = cost(1), cost(8)
    assert alone > 20
    assert over_two <= 2.2 * alone


def test_a_locked_file_is_an_address_that_does_not_answer(tmp_path: Path) -> None:
    """As `Database` says it, after its time of waiting; here the wait is that of SQLite alone."""
    path = tmp_path / "b.db"
    database = Database(str(path), busy_seconds=0.1)
    broker = LocalBroker(database)
    broker.send("orders", ids(1))
    held = sqlite3.connect(path, isolation_level=None)
    held.execute("BEGIN EXCLUSIVE")
    with pytest.raises(BrokerUnavailable):
        broker.send("orders", ids(1))
    held.close()
    database.close()
