"""Events wait to be counted, in bounded number, and each is counted once."""

import threading

import pytest

from aztask.events.event import Event
from aztask.telemetry.prometheus.backlog import MANY, Backlog


def event(number):
    return Event("started", str(number), "shop.add", "default")


def test_events_are_counted_together_when_that_is_asked_for():
    batches = []
    backlog = Backlog([batches.append])
    for number in range(3):
        backlog.add(event(number))
    assert batches == []
    backlog.count()
    backlog.count()
    assert batches == [[event(number) for number in range(3)], []]


def test_no_more_than_a_bounded_number_waits():
    batches = []
    backlog = Backlog([batches.append])
    for number in range(MANY - 1):
        backlog.add(event(number))
    backlog.tidy()
    assert batches == []
    backlog.add(event(MANY))
    backlog.tidy()
    assert [len(batch) for batch in batches] == [MANY]


def test_a_listener_that_fails_harms_no_other(caplog):
    batches = []

    def broken(events):
        raise ValueError("cannot be counted")

    backlog = Backlog([broken, batches.append])
    backlog.add(event(1))
    backlog.count()
    assert batches == [[event(1)]]
    assert "1 events were not counted" in caplog.text


@pytest.mark.parametrize("threads", [4])
def test_each_event_of_each_thread_is_counted_once(threads):
    counted = []
    backlog = Backlog([counted.extend])

    def add(thread):
        for number in range(3 * MANY):
            backlog.add(event(f"{thread}-{number}"))
            if number % 700 == 0:
                backlog.count()

    started = [threading.Thread(target=add, args=[thread]) for thread in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    backlog.count()
    assert len(counted) == len(set(counted)) == threads * 3 * MANY
