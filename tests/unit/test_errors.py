"""Errors: their default texts, and the values that some carry."""

import inspect

import pytest

from aztask import errors
from aztask.errors import (
    AztaskError,
    BrokerUnavailable,
    LeaseLost,
    Reject,
    Retry,
    SendUnconfirmed,
    Snooze,
    StepFailed,
    TaskFailed,
    did_you_mean,
)

CLASSES = [
    each
    for each in vars(errors).values()
    if inspect.isclass(each) and issubclass(each, AztaskError)
]
NEEDS = {
    TaskFailed: ("KeyError", "'x'"),
    StepFailed: ("CardDeclined", "no such card"),
    Snooze: (5.0,),
    Reject: ("no such customer",),
}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_default_text_is_one_line(kind):
    text = str(kind(*NEEDS.get(kind, ())))
    assert text
    assert "\n" not in text


def test_the_default_text_is_the_first_line_of_the_docstring():
    assert str(BrokerUnavailable()) == "The broker cannot be reached now; try again."
    assert str(LeaseLost("the token is stale")) == "the token is stale"


def test_values_that_errors_carry():
    assert SendUnconfirmed("maybe", ["a"]).unconfirmed == ("a",)
    assert (Retry(delay=30).delay, Retry().delay) == (30, None)
    assert Snooze(5.0).delay == 5.0
    failed = TaskFailed("KeyError", "'x'", "Traceback ...")
    assert (failed.error_type, failed.error, failed.traceback) == (
        "KeyError",
        "'x'",
        "Traceback ...",
    )


def test_only_similar_names_are_suggested():
    assert did_you_mean("dealy", ["delay", "queue"]) == " Did you mean 'delay'?"
    assert did_you_mean("colour", ["delay", "queue"]) == ""
