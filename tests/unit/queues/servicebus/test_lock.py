"""Whether a lease is the queue's lock, told from messages by clocks that are off."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from azure.servicebus import ServiceBusReceivedMessage
from azure.servicebus._pyamqp.message import Message
from hypothesis import given
from hypothesis import strategies as some

from aztask.errors import BrokerError, BrokerUnavailable, ConfigurationError
from aztask.queues.servicebus import lock as servicebus_lock
from aztask.queues.servicebus.clock import DRIFT, BusClock, ClockCalibration
from aztask.queues.servicebus.lock import TOLERANCE, LockWatch
from aztask.queues.servicebus.reading import damaged
from aztask.support.clock import Clock

EPOCH = 1_800_000_000.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicebus_lock, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(servicebus_lock, "LONGEST_PAUSE", 0.001)


def message(
    number: int, enqueued: float, locked: float | None = None, **more: object
) -> ServiceBusReceivedMessage:
    annotations: dict[bytes, object] = {
        b"x-opt-sequence-number": number,
        b"x-opt-enqueued-time": round(enqueued * 1000),
    }
    if locked is not None:
        annotations[b"x-opt-locked-until"] = round(locked * 1000)
    annotations |= {name.encode().replace(b"_", b"-"): value for name, value in more.items()}
    return ServiceBusReceivedMessage(Message(message_annotations=annotations), receiver=None)


@dataclass
class World:
    """A service with a clock and a lock of its own, behind a network; time passes by hand."""

    lock: float
    lease: float
    ahead: float = 0.0
    up: float = 0.0
    down: float = 0.0
    drift: float = 0.0
    may_send: bool = True
    managed: float | None = None
    passed: float = 0.0
    number: int = 0
    probes: int = 0
    queue: list[tuple[int, float]] = field(default_factory=list)
    looks: int = 0
    skew: float = 0.0

    def __post_init__(self) -> None:
        self.clock = Clock(
            monotonic=lambda: 1000.0 + self.passed, wall=lambda: EPOCH + 1000.0 + self.passed
        )
        self.service_clock = BusClock(self.clock)
        calibration = ClockCalibration(self.service_clock, self.clock, self.probe, self.look)
        self.watch = LockWatch(
            "q", self.lease, calibration, lambda: self.managed, managed=self.managed is not None
        )

    def now(self) -> float:
        """By the service's clock."""
        return EPOCH + 1000.0 + self.ahead + self.passed * (1.0 + self.drift)

    def probe(self) -> None:
        if not self.may_send:
            raise ConfigurationError("no right to send")
        self.probes += 1
        after = self.clock.monotonic()
        self.passed += self.up
        written = self.now() + self.skew
        self.passed += self.down
        self.service_clock.pin(written, after, self.clock.monotonic())
        self.service_clock.learn(written)

    def look(self, start: int) -> ServiceBusReceivedMessage | None:
        self.looks += 1
        self.passed += self.up + self.down
        found = min((each for each in self.queue if each[0] >= start), default=None)
        return None if found is None else message(*found)

    def enqueue(self) -> tuple[int, float]:
        self.number += 1
        self.queue.append((self.number, self.now()))
        return self.queue[-1]

    def deliver(self, waited: float = 0.0, *, first: bool = False) -> str:
        """One message that lay in the queue for so long; the verdict on it."""
        number, enqueued = self.enqueue()
        self.passed += waited
        asked_at = self.clock.monotonic() if first else float("-inf")
        self.passed += self.up
        locked = self.now() + self.lock
        self.passed += self.down
        one = message(number, enqueued, locked)
        self.watch.messages([one], self.clock.monotonic(), asked_at)
        return self.settled()

    def settled(self) -> str:
        """The verdict, once nothing is being found out any more."""
        give_up_at = time.monotonic() + (30.0 if self.may_send else 0.02)
        while self.watch._thread is not None and time.monotonic() < give_up_at:
            time.sleep(0.001)
        return self.watch.refusal

    @property
    def confirmed(self) -> bool:
        return self.watch._confirmed


@pytest.fixture
def world() -> Iterator[type[World]]:
    made: list[World] = []

    def make(*arguments: object, **options: object) -> World:
        made.append(World(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make  # type: ignore[misc]
    for each in made:
        each.watch.close()


OFF = pytest.mark.parametrize("ahead", [0.0, 3600.0, -3600.0])


@OFF
def test_a_lease_that_is_the_lock_is_confirmed(world, ahead) -> None:
    here = world(60.0, 60.0, ahead=ahead, up=0.05, down=0.05)
    here.watch.start()
    assert here.deliver() == ""
    assert here.confirmed
    assert here.service_clock.offset == pytest.approx(ahead, abs=0.11)


@OFF
@pytest.mark.parametrize("lock", [7.0, 30.0, 60.0, 300.0])
def test_a_lease_that_is_shorter_is_refused_at_the_first_message(world, ahead, lock) -> None:
    here = world(lock, 5.0, ahead=ahead, up=0.05, down=0.05)
    here.watch.start()
    assert here.settled() == "", "the first pin, before the message moves the clock"
    refusal = here.deliver()
    assert f"{lock:.1f} s" in refusal or f"{lock - 0.1:.1f} s" in refusal
    assert "not for 5 s" in refusal
    assert here.probes == 2, "another pin says the same"


@OFF
def test_a_lease_that_is_longer_is_refused_by_the_message_alone(world, ahead) -> None:
    here = world(30.0, 60.0, ahead=ahead, may_send=False)
    assert "holds its messages for 30.0 s at most, not for 60 s" in here.deliver()


def test_a_lease_that_is_longer_is_refused_though_messages_wait_for_hours(world) -> None:
    """The first pull of a link: nothing on its way was asked for before."""
    here = world(30.0, 60.0, up=0.05, down=0.05)
    here.watch.start()
    assert "not for 60 s" in here.deliver(7200.0, first=True)
    other = world(30.0, 60.0, up=0.05, down=0.05)
    other.watch.start()
    assert other.deliver(7200.0) == "", "later it cannot be known when it was locked"


@given(
    lock=some.floats(5.0, 300.0),
    ahead=some.sampled_from([0.0, 3600.0, -3600.0, 0.4, -86400.0]),
    network=some.lists(
        some.tuples(
            some.floats(0.0, 8.0), some.floats(0.0, 8.0), some.floats(0.0, 5000.0), some.booleans()
        ),
        min_size=1,
        max_size=6,
    ),
    drift=some.floats(-DRIFT / 2, DRIFT / 2),
    off=some.floats(-TOLERANCE / 2, TOLERANCE / 2),
    may_send=some.booleans(),
)
def test_a_lease_that_is_the_lock_is_never_refused(
    lock, ahead, network, drift, off, may_send
) -> None:
    """Whatever the network does, and however long messages wait, with a clock that is off."""
    here = World(lock, lock, ahead=ahead, drift=drift, may_send=may_send)
    here.lease = lock
    try:
        here.watch.start()
        for up, down, waited, first in network:
            here.up, here.down = up, down
            assert here.deliver(waited, first=first) == ""
            here.passed += waited
    finally:
        here.watch.close()


@given(
    lock=some.floats(6.0, 300.0),
    factor=some.floats(0.1, 0.8),
    ahead=some.sampled_from([0.0, 3600.0, -3600.0]),
    network=some.lists(
        some.tuples(some.floats(0.0, 0.4), some.floats(0.0, 0.4), some.floats(0.0, 5000.0)),
        min_size=3,
        max_size=3,
    ),
)
def test_a_lease_that_is_too_short_is_always_refused(lock, factor, ahead, network) -> None:
    lease = lock * factor
    # The network hides up to 0.8 s, and two clocks drift by up to 3 s in four hours of waiting.
    lease = min(lease, lock - 5 * TOLERANCE)
    here = World(lock, lease, ahead=ahead)
    try:
        here.watch.start()
        for up, down, waited in network:
            here.up, here.down = up, down
            here.deliver(waited)
        assert "not for" in here.settled()
    finally:
        here.watch.close()


def test_nothing_is_learned_from_a_lease_that_is_not_confirmed(world) -> None:
    """The clock comes from the probe, and is right although the lease is wrong."""
    here = world(60.0, 5.0, ahead=3600.0)
    here.watch.start()
    here.settled()
    here.deliver()
    assert here.service_clock.offset == pytest.approx(3600.0, abs=0.01)
    silent = world(60.0, 5.0, ahead=3600.0, may_send=False)
    silent.deliver()
    assert not silent.service_clock.known


@pytest.mark.parametrize("waited", [0.0, 1000.0])
def test_one_pin_alone_refuses_nothing(world, waited) -> None:
    """The queue's node is replaced by another, whose clock is three seconds ahead."""
    here = world(60.0, 60.0, skew=-3.0)
    here.watch.start()
    here.settled()
    here.skew = 0.0
    assert here.deliver(waited) == ""
    assert here.probes == 2
    assert here.deliver() == ""
    assert here.confirmed


@pytest.mark.parametrize("skew", [2 * 86400.0, -2 * 86400.0, -EPOCH])
def test_a_pin_that_cannot_be_is_dropped(world, skew) -> None:
    """A service that writes other times on scheduled messages than those of now."""
    here = world(60.0, 60.0, skew=skew)
    here.watch.start()
    here.settled()
    for _ in range(3):
        assert here.deliver() == ""
    assert not here.confirmed


def test_a_service_that_does_not_answer_leaves_it_open(world) -> None:
    here = world(60.0, 5.0)

    def silent() -> None:
        raise BrokerUnavailable("nothing")

    here.watch._calibration._probe = silent
    here.watch.start()
    assert here.deliver() == ""
    here.watch._calibration._probe = here.probe
    assert "not for 5 s" in here.settled()


# -- with the right to listen alone ---------------------------------------------------------------


@OFF
def test_the_end_of_the_queue_is_a_pin_too(world, ahead) -> None:
    """The first message may have lain there; two that come after a look are two pins."""
    here = world(60.0, 5.0, ahead=ahead, may_send=False, up=0.01, down=0.01)
    for _ in range(1000):
        here.enqueue()
    here.watch.start()
    time.sleep(0.05)
    assert here.deliver(600.0) == ""
    deadline = time.monotonic() + 5
    while not here.watch.refusal and time.monotonic() < deadline:
        here.passed += 0.5
        here.deliver()
    assert "not for 5 s" in here.watch.refusal


def test_with_the_right_to_listen_alone_a_right_lease_is_confirmed(world) -> None:
    here = world(60.0, 60.0, ahead=3600.0, may_send=False, up=0.01, down=0.01)
    here.watch.start()
    deadline = time.monotonic() + 5
    while not here.confirmed and time.monotonic() < deadline:
        time.sleep(0.01)
        assert here.deliver() == ""
    assert here.confirmed


def test_a_service_that_puts_no_time_on_scheduled_messages_is_looked_at(world) -> None:
    here = world(60.0, 60.0)

    def useless() -> None:
        raise BrokerError("no time")

    here.watch._calibration._probe = useless
    here.watch.start()
    deadline = time.monotonic() + 5
    while not here.confirmed and time.monotonic() < deadline:
        time.sleep(0.01)
        here.passed += 0.01
        assert here.deliver() == ""
    assert here.confirmed


# -- a lock that changes --------------------------------------------------------------------------


def test_a_lock_that_is_made_longer_is_noticed(world) -> None:
    here = world(60.0, 60.0, ahead=3600.0)
    here.watch.start()
    assert here.deliver() == ""
    offset = here.service_clock.offset
    here.lock = 120.0
    assert "120.0 s, not for 60 s" in here.deliver()
    assert here.service_clock.offset == pytest.approx(offset, abs=0.01)


def test_a_lock_that_is_made_shorter_is_noticed(world) -> None:
    here = world(60.0, 60.0)
    here.watch.start()
    assert here.deliver() == ""
    here.lock = 30.0
    assert "30.0 s at most, not for 60 s" in here.deliver()


def test_a_clock_of_the_service_that_is_set_is_followed(world) -> None:
    here = world(60.0, 60.0)
    here.watch.start()
    assert here.deliver() == ""
    here.ahead = 600.0
    assert here.deliver() == ""
    assert here.deliver() == ""
    assert here.confirmed
    assert here.service_clock.offset == pytest.approx(600.0, abs=0.01)


def test_with_the_right_to_manage_the_settings_decide(world) -> None:
    here = world(60.0, 60.0, managed=60.0)
    here.watch.start()
    assert here.confirmed and here.probes == 0
    assert here.deliver() == ""
    here.lock = here.managed = 120.0
    assert "for 120.0 s, not for 60 s" in here.deliver()
    assert here.probes == 0
    here.lock = here.managed = 60.0
    here.watch.try_again()
    here.settled()
    assert here.deliver() == ""
    assert here.confirmed


def test_a_refusal_is_lifted_by_a_confirmation_alone(world) -> None:
    here = world(60.0, 5.0)
    here.watch.start()
    assert here.deliver()
    here.watch.try_again()
    assert here.settled(), "nothing has come that says otherwise"
    here.lock = 5.0
    here.watch.try_again()
    assert here.deliver() == ""
    assert here.confirmed


def test_the_times_of_a_damaged_message_mean_nothing(world) -> None:
    """They may be the sender's, who would stop the worker with them."""
    here = world(60.0, 60.0)
    annotations = {b"x-opt-enqueued-time": 2**60, b"x-opt-locked-until": 7}
    inner = damaged(b"", "hostile", message_annotations=annotations)
    hostile = ServiceBusReceivedMessage(inner, receiver=None)
    here.watch.messages([hostile], here.clock.monotonic())
    assert here.settled() == ""
    assert here.deliver() == ""
    assert here.confirmed
