"""What the local inspector says of a queue, and of the place of its file."""

import shutil
from collections import namedtuple

import pytest

from aztask.errors import InvalidQueueName
from aztask.queues.base import QueueOptions
from aztask.queues.engine import Database
from aztask.queues.local import inspection
from aztask.queues.local.broker import LocalBroker

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def broker(tmp_path):
    database = Database(str(tmp_path / "q.db"))
    yield LocalBroker(database)
    database.close()


def found(broker):
    return {each.check: each for each in broker.inspector().surroundings()}


def test_a_queue_that_is_not_there_yet_is_no_fault(broker):
    facts = broker.inspector().facts("later")
    assert (facts.exists, facts.made_on_use) == (False, True)


def test_the_settings_of_a_queue(broker):
    broker.declare("q", QueueOptions(duplicate_window=60.0, max_deliveries=7, sessions=True))
    facts = broker.inspector().facts("q")
    assert (facts.duplicate_window, facts.max_deliveries, facts.sessions) == (60.0, 7, True)
    assert facts.exists and facts.active and facts.dead_letters
    assert facts.lease_seconds is None  # the receiver decides


def test_a_name_that_is_not_allowed_is_refused(broker):
    with pytest.raises(InvalidQueueName):
        broker.inspector().facts("../x")


def test_queues_in_memory_are_warned_about():
    database = Database(":memory:")
    (only,) = LocalBroker(database).inspector().surroundings()
    database.close()
    assert only.level.name == "WARNING"
    assert "no worker can reach them" in only.text


def test_a_disk_that_is_nearly_full_is_warned_about(broker, monkeypatch):
    assert found(broker)["room"].level.name == "OK"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, inspection.LEAST_ROOM - 1))
    assert found(broker)["room"].level.name == "WARNING"


@pytest.mark.parametrize(("durability", "says"), [("process", "durable=full"), ("full", "power")])
def test_what_survives_is_said(tmp_path, durability, says):
    database = Database(str(tmp_path / "d.db"), durability=durability)
    text = found(LocalBroker(database))["durability"].text
    database.close()
    assert says in text
    assert ("may lose" in text) is (durability == "process")
