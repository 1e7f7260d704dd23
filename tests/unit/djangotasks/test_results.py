"""What Django shows of stored runs: the path of an error's class, and the attempts."""

import traceback

import pytest

from aztask.django.results import class_path, errors_of, workers
from aztask.settlement import Complete, Resubmit
from aztask.stores.records.base import Outcome, RunKey, RunRecord, State


class Outer:
    """Holds a class, as projects do."""

    class InnerError(Exception):
        """An error with a path of three parts."""


def outcome_of(error):
    text = "".join(traceback.format_exception(error))
    return Outcome(State.FAILED, Complete(), None, type(error).__name__, str(error), text)


@pytest.mark.parametrize(
    ("error", "path"),
    [
        (ValueError("x"), "builtins.ValueError"),
        (ValueError("two\nlines: of.Text"), "builtins.ValueError"),
        (KeyError(), "builtins.KeyError"),
        (Outer.InnerError("x"), f"{__name__}.Outer.InnerError"),
        (Outer.InnerError(), f"{__name__}.Outer.InnerError"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"), "builtins.UnicodeDecodeError"),
    ],
)
def test_the_path_of_an_errors_class(error, path):
    assert class_path(outcome_of(error)) == path


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("TimeLimitExceeded", "aztask.errors.TimeLimitExceeded"),
        ("NoSuchError", "aztask.errors.TaskFailed"),
        ("SystemExit", "builtins.SystemExit"),
    ],
)
def test_the_path_without_a_traceback(name, path):
    assert class_path(Outcome(State.FAILED, Complete(), None, name, "x")) == path


def test_the_cause_of_an_error_is_not_taken_for_it():
    try:
        try:
            raise Outer.InnerError("first")
        except Outer.InnerError as inner:
            raise ValueError("second") from inner
    except ValueError as error:
        assert class_path(outcome_of(error)) == "builtins.ValueError"


def test_each_start_is_an_attempt_and_each_failure_an_error():
    failed = Outcome(State.RETRYING, Resubmit(1.0), None, "OSError", "disk", "", 2.0)
    history = [
        RunRecord(RunKey("a", 0, 0), "t", "q", State.RETRYING, "w1", 2, 1.0, failed),
        RunRecord(RunKey("a", 0, 1), "t", "q", State.STARTED, "w2", 1, 3.0),
        RunRecord(RunKey("a", 0, 2), "t", "q", State.PENDING),
    ]
    assert workers(history) == ["w1", "w1", "w2"]
    (error,) = [error for each in history for error in errors_of(each)]
    assert error.exception_class is OSError
    assert error.traceback == "OSError: disk\n"
