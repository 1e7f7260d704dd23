"""Acknowledged messages of a remote broker, completed in the background."""

import threading

import pytest

from aztask.celery.transport import unacked as completions
from aztask.celery.transport.unacked import Completions


class Service:
    """Completes messages when the test allows it."""

    def __init__(self):
        self.batches = []
        self.asked = threading.Event()
        self.allowed = threading.Event()

    def complete(self, messages):
        self.batches.append(list(messages))
        self.asked.set()
        assert self.allowed.wait(10)
        if "bad" in messages:
            raise OSError("the service is unreachable")


@pytest.fixture
def service():
    service = Service()
    yield service
    service.allowed.set()


def test_what_is_acknowledged_meanwhile_goes_into_one_request(service):
    waiting = Completions(service.complete)
    waiting.add(1)
    assert service.asked.wait(10)
    for message in (2, 3, 4):
        waiting.add(message)
    service.allowed.set()
    assert waiting.close(10)
    assert service.batches == [[1], [2, 3, 4]]


def test_what_is_acknowledged_one_by_one_gathers_for_a_request(service):
    """A loop that runs quick tasks itself acknowledges them one at a time."""
    service.allowed.set()
    waiting = Completions(service.complete)
    for message in range(64):
        waiting.add(message)
    assert waiting.close(10)
    assert len(service.batches) <= 8
    assert [each for batch in service.batches for each in batch] == [*range(64)]


def test_one_that_fails_stops_no_other(service, caplog):
    service.allowed.set()
    waiting = Completions(service.complete)
    waiting.add("bad")
    assert service.asked.wait(10)
    waiting.add("good")
    assert waiting.close(10)
    assert [each for batch in service.batches for each in batch] == ["bad", "good"]
    assert "could not settle" in caplog.text


def test_closing_waits_no_longer_than_it_may(service):
    waiting = Completions(service.complete)
    waiting.add(1)
    assert not waiting.close(0.01)


def test_an_acknowledgement_never_waits_and_says_when_nothing_more_should_come(
    service, monkeypatch
):
    monkeypatch.setattr(completions, "MOST", 2)
    waiting = Completions(service.complete)
    waiting.add(0)
    assert service.asked.wait(10)
    assert not waiting.crowded
    for number in (1, 2, 3):
        waiting.add(number)
    assert waiting.crowded
    service.allowed.set()
    assert waiting.close(10)
    assert not waiting.crowded
    assert service.batches == [[0], [1, 2], [3]]


def test_nothing_to_complete_needs_no_thread(service):
    waiting = Completions(service.complete)
    assert waiting.close(0.0)
    assert service.batches == []
