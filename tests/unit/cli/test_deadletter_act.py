"""Acting on dead letters: what is asked, done and reported."""

from dataclasses import dataclass

import pytest

from aztask.cli.deadletter_act import act_on
from aztask.cli.failures import CommandFailed
from aztask.deadletters.view import Report

WORDS = ("replay", "replayed")


@dataclass
class Letters:
    """The dead letters of one queue."""

    queue: str


def act(reports, *, selected=None, dry_run=False):
    """Act on queues a and b, whose results are `reports`; an exception is raised."""
    acted = []

    def replay(letters, progress):
        acted.append(letters.queue)
        report = reports[letters.queue]
        if isinstance(report, BaseException):
            progress(Report(done=2))
            raise report
        return report

    counts = selected or dict.fromkeys(reports, 3)
    try:
        act_on(
            [(Letters(name), count) for name, count in counts.items()],
            WORDS,
            replay,
            dry_run=dry_run,
            yes=True,
        )
    finally:
        act.acted = acted


def test_the_sum_of_all_queues_is_reported(capsys):
    act({"a": Report(done=3), "b": Report(done=1)})
    assert capsys.readouterr() == ("replayed 4 dead letters\n", "")


def test_a_queue_without_any_is_left_alone(capsys):
    act({"a": Report(done=3), "b": Report()}, selected={"a": 3, "b": 0})
    assert act.acted == ["a"]


def test_nothing_selected_is_said(capsys):
    act({}, selected={"a": 0})
    assert capsys.readouterr().out == "there is nothing to replay\n"


def test_a_dry_run_does_nothing(capsys):
    act({"a": Report(done=1)}, dry_run=True)
    assert capsys.readouterr().out == "would replay 3 dead letters (3 of a)\n"
    assert act.acted == []


def test_what_was_done_is_reported_even_after_an_interruption(capsys):
    with pytest.raises(KeyboardInterrupt):
        act({"a": Report(done=3), "b": KeyboardInterrupt()})
    assert capsys.readouterr().out == "replayed 5 dead letters\n"


def test_unreadable_ones_are_named_on_stderr(capsys):
    act({"a": Report(done=2, unreadable=1)})
    out, err = capsys.readouterr()
    assert out == "replayed 2 dead letters\n"
    assert err.startswith("1 dead letter could not be read, so not replayed")


def test_lost_ones_are_a_failure(capsys):
    with pytest.raises(CommandFailed, match="2 dead letters could not be received"):
        act({"a": Report(done=1, lost=2)})
    assert capsys.readouterr().out == "replayed 1 dead letter\n"
