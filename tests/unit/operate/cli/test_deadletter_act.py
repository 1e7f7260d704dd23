"""Acting on dead letters: what is asked, done and reported."""

import pytest

from aztask import App
from aztask.operate.cli.failures import CommandFailed
from aztask.operate.cli.letters import act_on
from aztask.operate.deadletters import DeadLetters, Report, Selection
from aztask.operate.deadletters.actions import OnLetters, SelectedLetters, replay
from aztask.operate.queues import LeftOut

ALL = Selection(everything=True)


class Act(OnLetters):
    """Acts on queues whose reports are given; an exception is raised."""

    name = "replay"

    def act_on(self, part, seen):
        self.acted.append(part.letters.queue)
        report = self.given[part.letters.queue]
        if isinstance(report, BaseException):
            seen(Report(done=2))
            raise report
        return report


def act(reports, *, selected=None, dry_run=False):
    """Act on queues a and b, whose results are `reports`; an exception is raised."""
    app, counts = App("shop", broker="local://:memory:"), selected or dict.fromkeys(reports, 3)
    parts = [
        SelectedLetters(DeadLetters(app, name), ALL, count)
        for name, count in counts.items()
        if count
    ]
    action = Act(app, sum(counts.values()), parts, LeftOut(), (), "")
    action.acted, action.given = [], reports
    try:
        act_on(action, dry_run=dry_run, yes=True)
    finally:
        act.acted = action.acted


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
    assert err.startswith("1 dead letter could not be read or sent again, so not replayed")


def test_lost_ones_are_a_failure(capsys):
    with pytest.raises(CommandFailed, match="2 dead letters could not be received"):
        act({"a": Report(done=1, lost=2)})
    assert capsys.readouterr().out == "replayed 1 dead letter\n"


def test_refused_ones_are_named_on_stderr_with_the_flag(capsys):
    act({"a": Report(done=2, refused=1), "b": Report(refused=2)})
    out, err = capsys.readouterr()
    assert out == "replayed 2 dead letters\n"
    assert err.startswith("3 dead letters not replayed, because workers refused them as too old")
    assert "--refused" in err


def test_a_replay_that_vouches_for_refused_ones_says_what_it_risks():
    app = App("shop", broker="local://:memory:")
    app.broker.declare("a")
    action = replay(app, ["a"], ALL, refused=True)
    assert str(action).endswith("they are signed anew and run, even if a stranger made them")
    assert action.refused
