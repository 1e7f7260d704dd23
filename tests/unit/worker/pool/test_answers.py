"""Answers to requests of running tasks."""

import threading

import pytest

from aztask.context import TaskLease
from aztask.errors import CapabilityError, LeaseLost, MessageTooLarge
from aztask.support.clock import boot_seconds
from aztask.worker.pool.packets import LOST, TOO_LARGE, Answers


@pytest.fixture
def lease():
    return TaskLease(boot_seconds() + 60.0, ask=lambda seconds: None)


def test_the_value_of_an_answer(lease):
    answers = Answers()
    answers.answer(1, "", {"page": 7})
    assert answers.wait(1, lease) == {"page": 7}


def test_an_answer_of_another_thread_is_waited_for(lease):
    answers = Answers()
    timer = threading.Timer(0.05, lambda: answers.answer(1, "", "late"))
    timer.start()
    assert answers.wait(1, lease) == "late"
    timer.join()


def test_each_delivery_gets_its_own(lease):
    answers = Answers()
    answers.answer(2, "", "two")
    answers.answer(1, "", "one")
    assert [answers.wait(number, lease) for number in (1, 2)] == ["one", "two"]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (LOST, LeaseLost, None),
        (f"{TOO_LARGE}70 KB", MessageTooLarge, "^70 KB$"),
        ("no result store", CapabilityError, "^no result store$"),
    ],
)
def test_errors_are_raised_in_the_task(lease, error, kind, words):
    answers = Answers()
    answers.answer(1, error)
    with pytest.raises(kind, match=words):
        answers.wait(1, lease)


def test_a_lease_that_ends_first_ends_the_wait():
    with pytest.raises(LeaseLost):
        Answers().wait(1, TaskLease(boot_seconds() - 1.0, ask=lambda seconds: None))
