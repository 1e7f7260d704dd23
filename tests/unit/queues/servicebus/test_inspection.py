"""What the Service Bus inspector says, by hand-made answers."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

from aztask.address.addresses import ServiceBusAddress
from aztask.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    InvalidQueueName,
    QueueNotFound,
)
from aztask.queues.servicebus import inspection
from aztask.queues.servicebus.clock import BusClock
from aztask.queues.servicebus.inspection import BusInspector
from aztask.support.clock import Clock

PROPERTIES = SimpleNamespace(
    requires_session=True,
    max_delivery_count=9,
    status="Active",
    requires_duplicate_detection=True,
    duplicate_detection_history_time_window=timedelta(seconds=60),
    lock_duration=timedelta(seconds=30),
    enable_partitioning=False,
)


def answer(value):
    """Gives the value, or raises it."""

    def given(*arguments):
        if isinstance(value, Exception):
            raise value
        return value

    return given


def inspector(*, recent=PROPERTIES, tier="Standard", listen=None, send=None, **options):
    clock = BusClock(Clock(wall=lambda: 1000.0))
    return BusInspector(
        ServiceBusAddress("shop.servicebus.windows.net", **options),
        SimpleNamespace(recent=answer(recent), tier=answer(tier), hint=lambda: "; set A"),
        clock,
        listen=answer(listen),
        send=answer(send),
        learn=lambda queue: clock.learn(1003.0) if queue == "q" else None,
    )


def test_the_settings_of_a_queue():
    facts = inspector().facts("q")
    assert (facts.exists, facts.active, facts.sessions) == (True, True, True)
    assert (facts.lease_seconds, facts.duplicate_window, facts.max_deliveries) == (30.0, 60.0, 9)


def test_without_duplicate_detection_there_is_no_window():
    properties = SimpleNamespace(**{**vars(PROPERTIES), "requires_duplicate_detection": False})
    assert inspector(recent=properties).facts("q").duplicate_window == 0.0


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (BrokerUnavailable("x"), "does not answer; set A"),
        (ConfigurationError(f"managing 'q' {inspection.MANAGE}: x"), inspection.MANAGE),
        (BrokerError("something else"), "something else"),
    ],
)
def test_what_could_not_be_read_is_said(error, says):
    facts = inspector(recent=error).facts("q")
    assert facts.exists is None
    assert says in facts.unread


def test_a_queue_that_is_not_there_and_a_name_that_cannot_be():
    assert inspector(recent=QueueNotFound("x")).facts("q").exists is False
    with pytest.raises(InvalidQueueName):
        inspector().facts("/q")


def test_permissions_are_tried():
    denied = ConfigurationError("no")
    found = inspector(send=denied).rights("q")
    assert [(each.name, each.error) for each in found] == [("listen", None), ("send", denied)]
    with pytest.raises(BrokerUnavailable):
        inspector(listen=BrokerUnavailable("down")).rights("q")


def test_the_clock_is_learned_when_it_is_asked_for():
    assert inspector().clock_offset("q") == 3.0
    assert inspector().clock_offset("elsewhere") is None


def test_the_tier_the_sdk_and_the_entity(monkeypatch):
    (tier,) = inspector().surroundings()
    assert tier.level.name == "OK"
    (tier,) = inspector(tier="Basic").surroundings()
    assert tier.level.name == "WARNING" and "no duplicate detection" in tier.text
    assert inspector(tier=ConfigurationError("no permission")).surroundings() == []
    monkeypatch.setattr(inspection.private, "available", lambda: False)
    checks = [each.check for each in inspector(entity="q").surroundings()]
    assert checks == ["tier", "sdk", "entity"]
