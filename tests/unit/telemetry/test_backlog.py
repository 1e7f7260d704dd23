"""Events wait to be counted, in bounded number, and each is counted once."""

import threading

import pytest

from aztask.events.event import Event
from aztask.telemetry.prometheus.backlog import MOST_WAITING, Backlog


def event(number):
    return Event("started", str(number), "shop.add", "default")


def test_events_are_counted_when_that_is_asked_for():
    counted = []
    backlog = Backlog([counted.append])
    for number in range(3):
        backlog.add(event(number))
    assert counted == []
    backlog.count()
    backlog.count()
    assert counted == [event(number) for number in range(3)]


def test_no_more_than_a_bounded_number_waits():
    counted = []
    backlog = Backlog([counted.append, lambda each: None])
    for number in range(MOST_WAITING):
        backlog.add(event(number))
    assert len(counted) == MOST_WAITING


def test_an_event_that_cannot_be_counted_harms_no_other(caplog):
    counted = []

    def broken(each):
        if each.task_id == "1":
            raise ValueError("cannot be counted")
        counted.append(each.task_id)

    backlog = Backlog([broken])
    for number in range(3):
        backlog.add(event(number))
    backlog.count()
    assert counted == ["0", "2"]
    assert "an event was not counted" in caplog.text


@pytest.mark.parametrize("threads", [4])
def test_each_event_of_each_thread_is_counted_once(threads):
    counted = []
    backlog = Backlog([counted.append])

    def add(thread):
        for number in range(3 * MOST_WAITING):
            backlog.add(event(f"{thread}-{number}"))
            if number % 700 == 0:
                backlog.count()

    started = [threading.Thread(target=add, args=[thread]) for thread in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    backlog.count()
    assert len(counted) == len(set(counted)) == threads * 3 * MOST_WAITING
