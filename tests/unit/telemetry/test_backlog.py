"""Events wait to be counted, in bounded number, and each is counted once."""

import threading

import pytest

from aztask.stores.events.event import Event
from aztask.telemetry.prometheus.worker import MANY, Backlog


def event(task_id, task="shop.add"):
    return Event("started", str(task_id), task, "default")


class Counted:
    """A listener that keeps the groups, and fails for the task "broken"."""

    def __init__(self):
        self.groups = []

    def __call__(self, kind, queue, task, group):
        if task == "broken":
            raise ValueError("cannot be counted")
        self.groups.append((kind, queue, task, [each.task_id for each in group]))


def test_events_are_counted_in_groups_when_that_is_asked_for():
    counted = Counted()
    backlog = Backlog([counted])
    for each in (event(0), event(1, "shop.pay"), event(2), Event("received", "3", "", "mail")):
        backlog.add(each)
    assert counted.groups == []
    backlog.count()
    backlog.count()
    assert counted.groups == [
        ("started", "default", "shop.add", ["0", "2"]),
        ("started", "default", "shop.pay", ["1"]),
        ("received", "mail", "", ["3"]),
    ]


def test_no_more_than_a_bounded_number_waits():
    counted = Counted()
    backlog = Backlog([counted])
    for number in range(MANY - 1):
        backlog.add(event(number))
    backlog.tidy()
    assert counted.groups == []
    backlog.add(event(MANY))
    backlog.tidy()
    assert [len(ids) for *_, ids in counted.groups] == [MANY]


def test_events_that_cannot_be_counted_harm_no_others(caplog):
    first, second = Counted(), Counted()
    backlog = Backlog([first, second])
    for each in (event(0, "broken"), event(1), event(2, "broken"), event(3, "shop.pay")):
        backlog.add(each)
    backlog.count()
    assert [task for _, _, task, _ in first.groups] == ["shop.add", "shop.pay"]
    assert first.groups == second.groups
    assert "events were not counted: 2 of started" in caplog.text


@pytest.mark.parametrize("threads", [4])
def test_each_event_of_each_thread_is_counted_once(threads):
    counted = Counted()
    backlog = Backlog([counted])

    def add(thread):
        for number in range(3 * MANY):
            backlog.add(event(f"{thread}-{number}"))
            if number % 70 == 0:
                backlog.count()

    started = [threading.Thread(target=add, args=[thread]) for thread in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    backlog.count()
    ids = [task_id for *_, found in counted.groups for task_id in found]
    assert len(ids) == len(set(ids)) == threads * 3 * MANY
