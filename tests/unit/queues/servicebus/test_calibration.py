"""Pins of the service's clock: where they are found, and what is none."""

from __future__ import annotations

import pytest
from azure.servicebus import ServiceBusReceivedMessage
from azure.servicebus._pyamqp.message import Message

from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.queues.servicebus.clock import MAX_PEEKS, PARTITIONED, BusClock, ClockCalibration
from aztask.queues.servicebus.reading import damaged
from aztask.support.clock import Clock

EPOCH = 1_800_000_000.0


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


def test_with_the_right_to_send_no_message_is_looked_at() -> None:
    probes: list[int] = []

    def look(number: int) -> None:
        raise AssertionError("looked")

    clock = Clock()
    calibration = ClockCalibration(BusClock(clock), clock, lambda: probes.append(1), look)
    calibration.once()
    calibration.once()
    assert len(probes) == 2


def test_a_probe_is_not_repeated_once_it_was_refused_but_it_is_while_the_service_is_down() -> None:
    errors: list[Exception] = [BrokerUnavailable("down"), ConfigurationError("no right to send")]

    def probe() -> None:
        raise errors.pop(0)

    clock = Clock()
    calibration = ClockCalibration(BusClock(clock), clock, probe, lambda number: None)
    with pytest.raises(BrokerUnavailable):
        calibration.once()
    calibration.once()
    calibration.once()
    assert errors == []


@pytest.mark.parametrize("backlog", [0, 1, 5, 1000, 123_457])
@pytest.mark.parametrize("start", [1, 10**9])
def test_the_end_is_found_in_few_looks(backlog, start) -> None:
    looked, last = [], start + backlog - 1

    def look(number: int) -> ServiceBusReceivedMessage | None:
        looked.append(number)
        return None if number > last or last < start else message(max(number, start), EPOCH)

    def probe() -> None:
        raise ConfigurationError("no right to send")

    clock = Clock(monotonic=lambda: 1000.0 + len(looked))
    service_clock = BusClock(clock)
    calibration = ClockCalibration(service_clock, clock, probe, look)
    calibration.once()
    assert len(looked) <= MAX_PEEKS / 2
    assert service_clock.pinned is None
    last += 1
    calibration.once()
    pin = service_clock.pinned
    assert pin is not None, "what is there now came after the last look"
    assert pin.high - pin.low == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize(
    "more",
    [
        {"x_opt_scheduled_enqueue_time": 5},
        {"x_opt_enqueue_sequence_number": 3},
    ],
)
def test_a_message_whose_time_may_be_older_is_no_pin(more) -> None:
    clock = Clock()
    service_clock = BusClock(clock)
    found: list[ServiceBusReceivedMessage] = []
    calibration = ClockCalibration(
        service_clock, clock, lambda: None, lambda number: next(iter(found), None)
    )
    calibration._may_send = False
    calibration.once()
    assert not calibration.message(message(1, EPOCH, **more), clock.monotonic())
    calibration.once()
    assert calibration.message(message(2, EPOCH), clock.monotonic())


def test_partitions_say_nothing_of_each_other() -> None:
    clock = Clock()
    service_clock = BusClock(clock)
    calibration = ClockCalibration(service_clock, clock, lambda: None, lambda number: None)
    calibration._may_send = False
    calibration.once()
    assert not calibration.message(message(PARTITIONED + 1, EPOCH), clock.monotonic())
    calibration._peek = lambda number: message(PARTITIONED + number % PARTITIONED, EPOCH)
    calibration.once()
    assert service_clock.pinned is None


def test_a_damaged_message_is_no_pin_and_says_no_number() -> None:
    clock = Clock()
    service_clock = BusClock(clock)
    calibration = ClockCalibration(service_clock, clock, refused, lambda number: None)
    calibration.once()  # the queue is empty
    inner = damaged(b"", "hostile", message_annotations={b"x-opt-sequence-number": 2**62})
    assert not calibration.message(ServiceBusReceivedMessage(inner, receiver=None), 1.0)
    assert service_clock.pinned is None
    assert calibration.message(message(1, EPOCH), clock.monotonic())


def refused() -> None:
    raise ConfigurationError("no right to send")
