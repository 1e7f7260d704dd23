"""What a listing skips, and the line on stderr that says so."""

from types import SimpleNamespace

import pytest

from aztask.errors import (
    BrokerUnavailable,
    ConfigurationError,
    QueueDisabled,
    QueueNotFound,
)
from aztask.operate.cli.output import say_left_out, warn_of_damage
from aztask.operate.queues import LeftOut, all_queues
from aztask.queues.base import Listing


def app_with(queues, foreign=()):
    broker = SimpleNamespace(listing=lambda: Listing(queues, foreign))
    return SimpleNamespace(broker=broker)


def test_queues_of_other_programs_are_named(capsys):
    left_out = LeftOut()
    assert all_queues(app_with(["a"], ["Other", "x\x1b[31m"]), left_out) == ["a"]
    say_left_out(left_out)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "aztask: skipped 2 queues that aztask cannot use: Other, x\\x1b[31m\n"


def test_without_any_nothing_is_said(capsys):
    left_out = LeftOut()
    assert all_queues(app_with(["a", "b"]), left_out) == ["a", "b"]
    say_left_out(left_out)
    assert capsys.readouterr().err == ""


def test_a_deleted_queue_is_skipped_silently(capsys):
    left_out = LeftOut()
    with left_out.reading("a"):
        raise QueueNotFound("gone")
    say_left_out(left_out)
    assert capsys.readouterr().err == ""


def test_a_disabled_queue_is_skipped_with_a_line(capsys):
    left_out = LeftOut()
    with left_out.reading("a"):
        raise QueueDisabled("queue a is disabled")
    say_left_out(left_out)
    assert capsys.readouterr().err == "aztask: skipped queue a: queue a is disabled\n"


@pytest.mark.parametrize("error", [BrokerUnavailable("down"), ConfigurationError("wrong")])
def test_other_errors_end_the_reading(error):
    with pytest.raises(type(error)), LeftOut().reading("a"):
        raise error


def test_no_damage_is_no_line(capsys):
    warn_of_damage("run", [], "look")
    assert capsys.readouterr().err == ""


def test_three_damaged_rows_are_named_and_the_others_counted(capsys):
    damaged = [("a", "torn"), ("", "no id"), ("c\n", "odd"), ("d", "odd"), ("e", "odd")]
    warn_of_damage("run", damaged, "see: aztask result")
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "aztask: warning: 5 damaged runs: a (torn); ? (no id); c (odd) and 2 more; "
        "see: aztask result"
    )
