"""The modelled services of a simulated world, and what their faults are to the adapters above."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import pytest

from aztask import App, RetryPolicy
from aztask.address.owner import Owner
from aztask.errors import BrokerUnavailable, ConfigurationError, ResultTimeout, SendUnconfirmed
from aztask.message.envelope import Envelope
from aztask.queues.base import Broker, QueueOptions, Receiver
from aztask.queues.delivery import Delivery, Lost, Renewed, Settled, Unknown
from aztask.settlement import Complete, Resubmit
from aztask.stores.payloads.store import PayloadKind
from aztask.stores.records.deadindex import IndexedDeadLetter
from aztask.stores.tables.client import PAUSES, TimeBudget
from aztask.stores.tables.errors import OutcomeUnknown
from aztask.support import chance
from aztask.support import clock as clocks
from aztask.support.clock import Clock
from aztask.worker.options import WorkerOptions

from .services import (
    FINE,
    URL,
    Blobs,
    Calm,
    Fault,
    Line,
    Outcome,
    Refused,
    Request,
    Service,
    ServiceBus,
    StorageQueues,
    Tables,
    Unanswered,
    Unconnected,
    Wire,
    keep_payloads,
    service_bus_broker,
    storage_queue_broker,
    table_requests,
    tables_results,
)
from .services.tablefilter import filter_of
from .services.tables import Action, RowChange
from .stepped import Machine, Play, Time

LEASE = 30.0
SENDS = ("put", "send")
RETRY = RetryPolicy(max_retries=3, delay=5.0, backoff=1.0, jitter=False)


class Script:
    """A fate that is written: the outcomes of the next requests, or of those of some operations."""

    def __init__(self) -> None:
        self.next: list[Outcome] = []
        self.operations: tuple[str, ...] = ()
        self.seen: list[Request] = []

    def of(self, request: Request) -> Outcome:
        self.seen.append(request)
        if not self.next or (self.operations and request.operation not in self.operations):
            return FINE
        return self.next.pop(0)

    def write(self, *outcomes: Outcome | Fault, operations: tuple[str, ...] = ()) -> None:
        self.operations = operations
        self.next = [Outcome(each) if isinstance(each, Fault) else each for each in outcomes]


class World:
    """A wire with a written fate, and one program."""

    def __init__(self) -> None:
        self.time = Time()
        self.clock = self.time.clock()
        self.fate = Script()
        self.wire = Wire(self.time, self.fate)
        self.line = self.wire.line("worker", self.clock)
        self.queues = StorageQueues(self.clock)
        self.bus = ServiceBus(self.clock)
        self.tables = Tables(self.clock)

    def broker(self, kind: str) -> Broker:
        if kind == "storagequeue":
            return storage_queue_broker(self.queues, self.line)
        return service_bus_broker(self.bus, self.line)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    with clocks.replaced(made.clock), chance.replaced(random.Random(1)):
        yield made


@pytest.fixture(params=["servicebus", "storagequeue"])
def broker(request: pytest.FixtureRequest, world: World) -> Broker:
    made = world.broker(request.param)
    made.declare("default", QueueOptions(lease=LEASE))
    return made


@pytest.fixture
def receiver(broker: Broker) -> Receiver:
    return broker.receiver("default", lease=LEASE)


def send(broker: Broker, *bodies: bytes) -> None:
    broker.send("default", [Envelope(body, message_id=body.decode()) for body in bodies])


def test_a_timer_that_is_due_has_the_time_of_the_service(world: World) -> None:
    """It had that of the machine, whose clock may be ahead: here it is years ahead."""
    broker = world.broker("servicebus")
    broker.declare("default", QueueOptions(lease=LEASE))
    assert broker.send_timer("default", Envelope(b"a", message_id="a")) > 0
    world.time.move(1.0)
    assert len(broker.receiver("default", lease=LEASE).receive(1, 0.0)) == 1


def one(broker: Broker, receiver: Receiver) -> Delivery:
    send(broker, b"a")
    (delivery,) = receiver.receive(1, 0.0)
    return delivery


# -- the wire ------------------------------------------------------------------------------------


class Counter:
    """A service that counts."""

    def __init__(self, line: Line) -> None:
        self.value = 0
        self.touched = 0
        self._line = line

    def add(self) -> int:
        self.value += 1
        return self.value

    def touch(self) -> None:
        self.touched += 1

    def ask(self, patience: float = 10.0) -> int:
        return self._line.request(
            Service.TABLES, "add", self.add, place="t", patience=patience, touch=self.touch
        )


@pytest.fixture
def counter(world: World) -> Counter:
    return Counter(world.line)


def test_without_faults_a_request_is_carried_out_at_once(world: World, counter: Counter) -> None:
    before = world.time.now
    assert (counter.ask(), counter.ask()) == (1, 2)
    assert world.time.now == before
    assert world.wire.served == {(Service.TABLES, "add"): 2}
    assert [each.number for each in world.fate.seen] == [1, 2]
    assert world.fate.seen[0]._replace(number=0) == Request(
        0, "worker", Service.TABLES, "add", "t", 10.0, True
    )


@pytest.mark.parametrize(
    ("fault", "error", "value"),
    [
        (Fault.UNCONNECTED, Unconnected, 0),
        (Fault.NOT_ARRIVED, Unanswered, 0),
        (Fault.ANSWER_LOST, Unanswered, 1),
        (Fault.THROTTLED, Refused, 0),
        (Fault.FORBIDDEN, Refused, 0),
        (Fault.FAILED, Refused, 0),
        (Fault.FAILED_LATE, Refused, 1),
        (Fault.TIMED_OUT, Refused, 0),
        (Fault.CONFLICT, None, 1),
    ],
)
def test_every_fault_is_an_error_and_has_an_effect_or_none(
    world: World, counter: Counter, fault: Fault, error: type[Exception] | None, value: int
) -> None:
    world.fate.write(Outcome(fault, there=1.0, back=2.0))
    before = world.time.now
    if error is None:
        assert counter.ask() == 1
    else:
        with pytest.raises(error):
            counter.ask()
    assert counter.value == value
    assert counter.touched == (fault is Fault.CONFLICT)
    assert world.time.now - before == (1.0 if fault is Fault.UNCONNECTED else 3.0)
    assert world.wire.struck == {fault: 1}


def test_all_faults_are_tried() -> None:
    (cases,) = (
        mark.args[1]
        for mark in test_every_fault_is_an_error_and_has_an_effect_or_none.pytestmark  # type: ignore[attr-defined]
    )
    assert {case[0] for case in cases} == set(Fault)


def test_only_a_conditional_request_meets_a_conflict(world: World) -> None:
    world.line.request(Service.QUEUES, "put", lambda: None)
    assert Fault.CONFLICT not in world.fate.seen[0].faults
    assert set(world.fate.seen[0].faults) == set(Fault) - {Fault.CONFLICT}


def test_a_request_that_takes_too_long_arrives_all_the_same(world: World, counter: Counter) -> None:
    world.fate.write(Outcome(there=25.0))
    with pytest.raises(Unanswered):
        counter.ask(patience=10.0)
    assert (counter.value, world.wire.next_at) == (0, 1025.0)
    world.time.move(14.9)
    world.wire.arrive()
    assert counter.value == 0
    world.time.move(0.2)
    assert counter.ask() == 2, "it arrived before this one"


def test_an_answer_that_takes_too_long_is_not_seen(world: World, counter: Counter) -> None:
    world.fate.write(Outcome(there=4.0, back=30.0))
    with pytest.raises(Unanswered):
        counter.ask(patience=10.0)
    assert (counter.value, world.time.now) == (1, 1010.0)


def test_a_late_request_is_carried_out_at_its_own_time(world: World) -> None:
    world.queues.create("default", {})
    world.queues.put("default", "text", 0)
    world.fate.write(Outcome(there=20.0))
    with pytest.raises(Unanswered):
        world.line.request(
            Service.QUEUES,
            "receive",
            lambda: world.queues.receive("default", 1, 30),
            patience=5.0,
        )
    world.time.move(44.0)
    world.wire.arrive()
    assert world.time.now == 1049.0
    assert world.queues.receive("default", 1, 30) == [], "hidden until 1050"
    world.time.move(1.0)
    assert len(world.queues.receive("default", 1, 30)) == 1


def test_late_requests_arrive_in_the_order_of_their_times(world: World) -> None:
    arrived: list[str] = []
    for name, there in (("a", 50.0), ("b", 30.0), ("c", 40.0)):
        world.fate.write(Outcome(there=there))
        with pytest.raises(Unanswered):
            world.line.request(Service.QUEUES, "put", partial(arrived.append, name), patience=1.0)
    world.time.move(60.0)
    world.wire.arrive()
    assert arrived == ["b", "c", "a"]


class Died(BaseException):
    """The program is gone."""


@pytest.mark.parametrize(("sleeps", "value"), [(1, 0), (2, 1)], ids=["there", "back"])
def test_the_request_of_a_program_that_dies_arrives(world: World, sleeps: int, value: int) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == sleeps:
            raise Died
        world.time.move(seconds)

    clock = Clock(world.clock.monotonic, world.clock.wall, sleep)
    counter = Counter(world.wire.line("mortal", clock))
    world.fate.write(Outcome(there=1.0, back=1.0))
    with pytest.raises(Died):
        counter.ask()
    assert counter.value == value
    world.time.move(1.0)
    world.wire.arrive()
    assert counter.value == 1


# -- what the faults are to the adapters -----------------------------------------------------------


def test_a_refused_credential_is_an_error_of_the_configuration(
    world: World, broker: Broker, receiver: Receiver
) -> None:
    send(broker, b"a")
    receiver.receive(1, 0.0)
    for call in (lambda: send(broker, b"b"), lambda: receiver.receive(1, 0.0)):
        world.fate.write(Fault.FORBIDDEN)
        with pytest.raises(ConfigurationError):
            call()


def test_a_send_whose_answer_is_lost_is_unconfirmed_and_stored(
    world: World, broker: Broker, receiver: Receiver
) -> None:
    send(broker, b"a")  # its connection is open now
    for number, fault in enumerate((Fault.ANSWER_LOST, Fault.FAILED_LATE, Fault.NOT_ARRIVED)):
        world.fate.write(fault, operations=SENDS)
        with pytest.raises(SendUnconfirmed) as caught:
            send(broker, b"%d" % number)
        assert [each.message_id for each in caught.value.unconfirmed] == [str(number)]
    found = [each.envelope.body for _ in range(3) for each in receiver.receive(10, 0.0)]
    assert sorted(found) == [b"0", b"1", b"a"]


def test_a_busy_service_is_asked_again_or_reported(world: World, broker: Broker) -> None:
    send(broker, b"a")
    world.fate.write(*[Fault.THROTTLED] * 10)
    with pytest.raises(BrokerUnavailable):
        send(broker, b"b")
    world.fate.write()
    assert broker.stats("default").living == 1


def test_a_settlement_whose_answer_is_lost_is_found_settled(
    world: World, broker: Broker, receiver: Receiver
) -> None:
    delivery = one(broker, receiver)
    world.fate.write(Fault.ANSWER_LOST)
    assert receiver.settle([(delivery, Complete())]) == [Settled()]
    assert broker.stats("default").living == 0


def test_a_lease_that_lapsed_is_lost(world: World, broker: Broker, receiver: Receiver) -> None:
    delivery = one(broker, receiver)
    world.time.move(LEASE + 1.0)
    (again,) = receiver.receive(1, 0.0)
    assert again.delivery_count == 2
    assert [type(each) for each in receiver.renew([delivery])] == [Lost]
    assert [type(each) for each in receiver.settle([(delivery, Complete())])] == [Lost]
    assert receiver.settle([(again, Complete())]) == [Settled()]


def test_a_renewal_whose_answer_is_lost_leaves_the_receipt_stale(world: World) -> None:
    broker = world.broker("storagequeue")
    broker.declare("default")
    receiver = broker.receiver("default", lease=LEASE)
    delivery = one(broker, receiver)
    world.time.move(10.0)
    world.fate.write(Fault.ANSWER_LOST)
    (answer,) = receiver.renew([delivery])
    assert isinstance(answer, Unknown)
    (settled,) = receiver.settle([(delivery, Complete())])
    assert isinstance(settled, Unknown), "the receipt went with the answer"
    world.time.move(25.0)
    assert receiver.receive(1, 0.0) == [], "the renewal took effect at the service"
    world.time.move(10.0)
    assert len(receiver.receive(1, 0.0)) == 1


@pytest.fixture
def held(world: World) -> tuple[Receiver, Delivery]:
    """A delivery from a Storage queue."""
    broker = world.broker("storagequeue")
    broker.declare("default")
    receiver = broker.receiver("default", lease=LEASE)
    return receiver, one(broker, receiver)


def test_a_renewal_whose_answer_is_late_is_sent_again_and_confirmed(
    world: World, held: tuple[Receiver, Delivery]
) -> None:
    receiver, delivery = held
    world.time.move(10.0)
    world.fate.write(Outcome(back=12.0))
    (answer,) = receiver.renew([delivery])
    assert answer == Unknown("no answer yet", untouched=True)
    assert world.time.now == 1011.0, "one call waits for a second"
    world.time.move(6.0)
    (answer,) = receiver.renew([delivery])
    assert answer == Renewed(1010.0 + LEASE), "the second one is refused: the first took effect"
    world.time.move(6.0)
    assert receiver.settle([(delivery, Complete())]) == [Settled()], "with the receipt that came"


def test_a_settlement_waits_for_the_receipt_that_is_on_its_way(
    world: World, held: tuple[Receiver, Delivery]
) -> None:
    receiver, delivery = held
    world.fate.write(Outcome(there=1.0, back=5.0))
    (answer,) = receiver.renew([delivery])
    assert isinstance(answer, Unknown)
    assert receiver.settle([(delivery, Complete())]) == [Settled()]
    assert world.time.now == 1006.0


def test_a_renewal_that_arrives_after_the_lease_finds_another_receipt(
    world: World, held: tuple[Receiver, Delivery]
) -> None:
    receiver, delivery = held
    world.time.move(5.0)
    world.fate.write(Outcome(there=40.0))
    receiver.renew([delivery])
    world.time.move(27.0)
    (again,) = receiver.receive(1, 0.0)
    world.time.move(14.0)
    world.wire.arrive()
    assert receiver.settle([(again, Complete())]) == [Settled()]
    assert [type(each) for each in receiver.settle([(delivery, Complete())])] == [Lost]


def test_a_renewal_whose_answer_is_lost_is_repeated_on_service_bus(world: World) -> None:
    broker = world.broker("servicebus")
    broker.declare("default", QueueOptions(lease=LEASE))
    receiver = broker.receiver("default", lease=LEASE)
    delivery = one(broker, receiver)
    world.time.move(10.0)
    world.fate.write(Fault.ANSWER_LOST)
    assert [type(each) for each in receiver.renew([delivery])] == [Renewed]


def test_a_clone_that_cannot_be_sent_keeps_its_original(world: World) -> None:
    broker = world.broker("servicebus")
    broker.declare("default", QueueOptions(lease=LEASE))
    receiver = broker.receiver("default", lease=LEASE)
    delivery = one(broker, receiver)
    world.fate.write(Fault.THROTTLED, operations=SENDS)
    clone = Envelope(b"a", message_id="a~1")
    (answer,) = receiver.settle([(delivery, Resubmit(5.0, envelope=clone))])
    assert isinstance(answer, Unknown)
    world.time.move(LEASE + 1.0)
    assert len(receiver.receive(1, 0.0)) == 1


def test_the_messages_of_a_receive_whose_answer_is_lost_come_again(
    world: World, broker: Broker, receiver: Receiver
) -> None:
    receiver.receive(1, 0.0)
    send(broker, b"a")
    world.fate.write(Fault.ANSWER_LOST, operations=("receive",))
    with pytest.raises(BrokerUnavailable):
        receiver.receive(1, 0.0)
    assert receiver.receive(1, 0.0) == []
    world.time.move(LEASE + 1.0)
    (delivery,) = receiver.receive(1, 0.0)
    assert delivery.delivery_count == 2


def test_a_program_that_dies_releases_its_session(world: World) -> None:
    broker = world.broker("servicebus")
    broker.declare("default", QueueOptions(lease=LEASE, sessions=True))
    broker.send("default", [Envelope(b"a", session="s")])
    (first,) = broker.receiver("default", lease=LEASE, session="s").receive(1, 0.0)
    broker.cut()  # type: ignore[attr-defined]
    other = world.broker("servicebus").receiver("default", lease=LEASE, session="s")
    (again,) = other.receive(1, 0.0)
    assert (first.delivery_count, again.delivery_count) == (1, 1)


def test_a_restart_of_service_bus_voids_all_locks(world: World) -> None:
    broker = world.broker("servicebus")
    broker.declare("default", QueueOptions(lease=LEASE))
    receiver = broker.receiver("default", lease=LEASE)
    delivery = one(broker, receiver)
    world.bus.restart()
    assert [type(each) for each in receiver.settle([(delivery, Complete())])] == [Lost]
    assert len(receiver.receive(1, 0.0)) == 1


def test_a_storage_message_that_expires_is_gone_although_it_is_hidden(world: World) -> None:
    world.queues.create("default", {})
    world.queues.put("default", "text", 0, time_to_live=60.0)
    (found,) = world.queues.receive("default", 1, 30)
    receipt = world.queues.update("default", found.name, found.receipt, 100, None)
    world.time.move(61.0)
    with pytest.raises(Refused, match="does not exist"):
        world.queues.update("default", found.name, receipt, 100, None)


def test_a_receipt_is_valid_until_the_next_one_is_made(world: World) -> None:
    world.queues.create("default", {})
    world.queues.put("default", "text", 0)
    (found,) = world.queues.receive("default", 1, 30)
    world.time.move(31.0)
    receipt = world.queues.update("default", found.name, found.receipt, 30, None)
    with pytest.raises(Refused) as refused:
        world.queues.delete("default", found.name, found.receipt)
    assert (refused.value.status, refused.value.code) == (400, "PopReceiptMismatch")
    world.queues.delete("default", found.name, receipt)


def test_a_service_says_how_long_nothing_happens_by_itself(world: World) -> None:
    assert (world.queues.until_change(), world.bus.until_change()) == (math.inf, math.inf)
    for kind, service in (("storagequeue", world.queues), ("servicebus", world.bus)):
        broker = world.broker(kind)
        broker.declare("default", QueueOptions(lease=LEASE))
        receiver = broker.receiver("default", lease=LEASE)
        delivery = one(broker, receiver)
        assert service.until_change() == pytest.approx(LEASE)
        world.time.move(10.0)
        broker.send("default", [Envelope(b"later", delay=5.0)])
        assert service.until_change() == pytest.approx(5.0, abs=0.01)
        receiver.settle([(delivery, Complete())])
        world.time.move(6.0)
        assert service.until_change() == math.inf


# -- tables --------------------------------------------------------------------------------------


def keys(partition: str = "p", row: str = "r", /, **values: Any) -> dict[str, Any]:
    return {"PartitionKey": partition, "RowKey": row, **values}


def test_a_write_that_changes_nothing_makes_another_tag(world: World) -> None:
    world.tables.create("t")
    first = world.tables.change("t", RowChange(Action.CREATE, keys(a=1)))
    second = world.tables.change("t", RowChange(Action.REPLACE, keys(a=1), first))
    assert first != second
    with pytest.raises(Refused) as refused:
        world.tables.change("t", RowChange(Action.REPLACE, keys(a=2), first))
    assert refused.value.code == "UpdateConditionNotSatisfied"


def test_a_transaction_is_made_as_a_whole_or_not_at_all(world: World) -> None:
    world.tables.create("t")
    tag = world.tables.change("t", RowChange(Action.CREATE, keys("p", "old")))
    changes = [
        RowChange(Action.CREATE, keys("p", "new")),
        RowChange(Action.DELETE, keys("p", "old"), tag),
        RowChange(Action.MERGE, keys("p", "missing", a=1)),
    ]
    with pytest.raises(Refused):
        world.tables.together("t", changes)
    assert [each.values["RowKey"] for each in world.tables.tables["t"]] == ["old"]
    assert world.tables.together("t", changes[:2])[1] == ""
    assert [each.values["RowKey"] for each in world.tables.tables["t"]] == ["new"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ([keys("p", f"{n}") for n in range(101)], "InvalidInput"),
        ([keys("p"), keys("q")], "CommandsInBatchActOnDifferentPartitions"),
        ([keys(), keys()], "InvalidDuplicateRow"),
        ([keys(data=b"x" * 65537)], "PropertyValueTooLarge"),
        ([keys(**{f"d{n}": b"x" * 65536 for n in range(16)})], "EntityTooLarge"),
        ([keys(**{f"d{n}": 1 for n in range(253)})], "TooManyProperties"),
        ([keys("p", "a/b")], "OutOfRangeInput"),
        ([keys("p", "a" * 513)], "KeyValueTooLarge"),
    ],
)
def test_the_limits_of_tables(world: World, changes: list[dict[str, Any]], code: str) -> None:
    world.tables.create("t")
    with pytest.raises(Refused) as refused:
        world.tables.together("t", [RowChange(Action.CREATE, each) for each in changes])
    assert refused.value.code == code
    assert len(world.tables.tables["t"]) == 0


def test_a_conflict_makes_the_program_look_again(world: World) -> None:
    world.tables.create("t")
    requests = table_requests(world.tables, world.line, "t")
    tag = requests.insert(TimeBudget(), keys(a=1))
    assert tag is not None
    world.fate.write(Fault.CONFLICT)
    assert requests.replace(TimeBudget(), keys(a=2), tag) is None
    found = requests.read(TimeBudget(), "p", "r")
    assert found == keys(a=1)
    tag = cast("Any", found).metadata["etag"]
    assert requests.replace(TimeBudget(), keys(a=2), tag) is not None


def test_a_write_that_arrives_late_finds_another_tag(world: World) -> None:
    world.tables.create("t")
    requests = table_requests(world.tables, world.line, "t")
    tag = requests.insert(TimeBudget(), keys(a=1))
    assert tag is not None
    world.fate.write(Outcome(there=60.0))
    with pytest.raises(OutcomeUnknown):
        requests.replace(TimeBudget(), keys(a=2), tag)
    assert requests.replace(TimeBudget(), keys(a=3), tag) is not None
    world.time.move(60.0)
    assert requests.read(TimeBudget(), "p", "r") == keys(a=3)


def test_the_time_of_a_call_of_the_store_is_virtual(world: World) -> None:
    world.tables.create("t")
    requests = table_requests(world.tables, world.line, "t")
    began = world.time.now
    world.fate.write(*[Fault.ANSWER_LOST] * 3)
    requests.put(TimeBudget(), keys(a=1))
    assert world.time.now - began == pytest.approx(sum(PAUSES))
    world.fate.write(*[Outcome(there=9.0, back=9.0)] * 5)
    with pytest.raises(BrokerUnavailable, match="cannot be reached now"):
        requests.read(TimeBudget(), "p", "r")
    assert world.time.now - began < 25.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("PartitionKey eq 'p' and RowKey gt @b", ["c"]),
        ("PartitionKey ge @p and PartitionKey lt 'q'", ["a", "b", "c"]),
        ("( RowKey eq 'a' or RowKey eq 'c' ) and flag eq true", ["a"]),
        ("PartitionKey eq 'p' and (number lt @two or RowKey ge 'c')", ["a", "c"]),
        ("text eq 'it''s'", ["b"]),
        ("number ge 2.0 and number le 2", ["b"]),
        ("missing ne 'x'", []),
        ("Timestamp lt @at", []),
    ],
)
def test_filters(world: World, text: str, found: list[str]) -> None:
    world.tables.create("t")
    for row, values in (
        ("a", {"number": 1, "flag": True}),
        ("b", {"number": 2, "text": "it's"}),
        ("c", {"number": "2", "flag": "true"}),
    ):
        world.tables.change("t", RowChange(Action.CREATE, keys("p", row, **values)))
    from_world = {"b": "b", "p": "p", "two": 2, "at": world.tables.get("t", "p", "a").at}
    rows, rest = world.tables.query("t", filter_of(text), from_world, 10, None)
    assert [each.values["RowKey"] for each in rows] == found
    assert rest is None


def test_a_listing_goes_on_where_the_page_ended(world: World) -> None:
    world.tables.create("t")
    for number in range(25):
        world.tables.change("t", RowChange(Action.CREATE, keys(f"p{number % 3}", f"{number:02}")))
    world.tables.page = 10
    everything, after, pages = filter_of("PartitionKey ge ''"), None, 0
    found: list[tuple[str, str]] = []
    while True:
        rows, after = world.tables.query("t", everything, {}, 1000, after)
        found += [(each.values["PartitionKey"], each.values["RowKey"]) for each in rows]
        pages += 1
        if after is None:
            break
    assert (pages, len(found), found) == (3, 25, sorted(found))


def test_dead_letters_of_one_instant_are_all_noted(world: World) -> None:
    """Where the clock moves rarely, as on Windows, many notes are made in the same instant."""
    results = tables_results(world.tables, Blobs(world.clock), world.line)
    results.create()
    letters = [
        IndexedDeadLetter("q", Envelope(b"x", message_id=f"m{n}"), "why", "", 1.0, 1)
        for n in range(30)
    ]
    results.dead_index.note(letters)
    found = list(results.dead_index.notes("q"))
    assert {each.envelope.message_id for each in found} == {f"m{n}" for n in range(30)}


def test_waiting_for_a_result_costs_no_real_time(world: World) -> None:
    results = tables_results(world.tables, Blobs(world.clock), world.line)
    results.create()
    broker: Any = world.broker("storagequeue")
    broker.declare("default")
    app = App("sim", broker=broker, results=results)
    task = app.task(name="add")(lambda: None)
    sent, began = task.delay(), world.time.now
    with pytest.raises(ResultTimeout):
        sent.get(timeout=3600.0)
    assert 3600.0 <= world.time.now - began < 3610.0
    assert sent.cancel()
    assert sent.state == "cancelled"
    app.close()


# -- a whole worker on them ------------------------------------------------------------------------


class Dice:
    """A fate by chance: one request in `every` is struck, or late."""

    def __init__(self, seed: int, every: int) -> None:
        self._dice = random.Random(seed)
        self._every = every

    def of(self, request: Request) -> Outcome:
        if self._dice.randrange(self._every):
            return FINE
        faults = [each for each in request.faults if each is not Fault.FORBIDDEN]
        seconds = (0.0, 0.1, 1.0, 12.0)
        return Outcome(
            self._dice.choice([None, *faults]),
            self._dice.choice(seconds),
            self._dice.choice(seconds),
        )


class Working:
    """One worker on modelled services, whose steps are chosen by a seed."""

    def __init__(self, kind: str, seed: int, every: int) -> None:
        self.time, self.dice = Time(), random.Random(seed)
        clock = self.time.clock()
        self.ambient = ExitStack()
        self.ambient.enter_context(clocks.replaced(clock))
        self.ambient.enter_context(chance.replaced(random.Random(seed)))
        self.wire, self.faults = Wire(self.time), Dice(seed, every)
        quiet, line = self.wire.line("admin", clock), self.wire.line("worker", clock)
        tables, blobs = Tables(clock), Blobs(clock)
        make: Callable[[Line], Broker]
        if kind == "storagequeue":
            queues = StorageQueues(clock)
            make = lambda line: storage_queue_broker(queues, line)  # noqa: E731
        else:
            bus = ServiceBus(clock)
            make = lambda line: service_bus_broker(bus, line)  # noqa: E731
        self.admin = make(quiet)
        self.admin.declare("default", QueueOptions(lease=LEASE))
        tables_results(tables, blobs, quiet).create()
        broker: Any = make(line)
        owner = Owner(broker.identity, "sim")
        self.results = tables_results(tables, blobs, line, owner=owner)
        self.app = App("sim", broker=broker, results=self.results, retry=RETRY, lease=LEASE)
        self.machine = Machine(self.time, self.app, self._play)
        self.runs: list[int] = []

        @self.app.task(name="add")
        def add(number: int) -> int:
            self.runs.append(number)
            return number + 1

        self.add = add
        self.supervisor = self.machine.work(WorkerOptions(name="w", concurrency=4))
        self.sent: list[Any] = []

    def _play(self, message: Any) -> Play:
        return Play(seconds=self.dice.choice((0.0, 1.0, 50.0)))

    def run(self, tasks: int) -> None:
        """Send so many tasks while the worker works; until its queue is empty."""
        for _ in range(100_000):
            if len(self.sent) < tasks and self.dice.random() < 0.2:
                self.wire.fate = Calm()
                self.sent.append(self.add.delay(len(self.sent)))
            elif len(self.sent) == tasks and self._is_done():
                return
            self.wire.fate = self.faults
            steps = self.machine.steps()
            if steps:
                steps[self.dice.randrange(len(steps))].take()
            else:
                self.time.now = max(self.time.now, min(self.machine.next_at, self.wire.next_at))
                self.wire.arrive()
        raise AssertionError("the queue is never empty")

    def _is_done(self) -> bool:
        if self.dice.randrange(50):
            return False
        self.wire.fate = Calm()
        return self.admin.stats("default").living == 0

    def close(self) -> None:
        self.wire.fate = Calm()
        self.supervisor.close()
        self.app.close()
        self.ambient.close()


def course(kind: str, seed: int, every: int, tasks: int) -> tuple[Any, ...]:
    """One course of a world, and all that can be seen of it."""
    world = Working(kind, seed, every)
    try:
        world.run(tasks)
        world.wire.fate = Calm()
        states = [each.state for each in world.sent]
        values = [each.get(timeout=0) if each.successful() else None for each in world.sent]
        ids = [each.id for each in world.sent]
        dead = world.admin.stats("default").dead
        return states, values, dead, ids, world.runs, world.wire.served, world.time.now
    finally:
        world.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", ["storagequeue", "servicebus"])
def test_a_worker_loses_nothing_whatever_strikes_its_requests(kind: str, seed: int) -> None:
    threads = set(threading.enumerate())
    states, values, dead, *_ = course(kind, seed, every=15, tasks=40)
    assert states == ["succeeded"] * 40
    assert values == list(range(1, 41))
    assert dead == 0
    assert set(threading.enumerate()) <= threads, "no thread ran beside the steps"


def test_large_arguments_and_values_are_kept_in_blobs(world: World) -> None:
    broker: Any = world.broker("storagequeue")
    broker.declare("default")
    blobs = Blobs(world.clock)
    results = tables_results(world.tables, blobs, world.line)
    results.create()
    app = App("sim", broker=broker, results=results, payloads=URL, lease=LEASE)
    keep_payloads(app, blobs, world.line)
    task = app.task(name="double")(lambda text: 2 * text)
    threads = set(threading.enumerate())
    machine = Machine(world.time, app)
    supervisor = machine.work(WorkerOptions(name="w", concurrency=2))
    sent = [task.delay("x" * 200_000), *task.map([("y" * 200_000,), ("z" * 200_000,)])]
    assert len(blobs.containers["payloads"]) == 3
    for _ in range(3000):
        steps = machine.steps()
        if steps:
            steps[0].take()
        else:
            world.time.now = machine.next_at
    assert [len(each.get(timeout=0)) for each in sent] == [400_000] * 3
    left = [each for each in blobs.containers["payloads"] if each.startswith(PayloadKind.ARGUMENTS)]
    assert left == [], "they are removed when their task has ended"
    assert set(threading.enumerate()) <= threads
    supervisor.close()
    app.close()


@pytest.mark.parametrize("kind", ["storagequeue", "servicebus"])
def test_one_seed_is_one_course(kind: str) -> None:
    first, second = (course(kind, 7, every=10, tasks=20) for _ in range(2))
    assert first == second
    assert first != course(kind, 8, every=10, tasks=20)
