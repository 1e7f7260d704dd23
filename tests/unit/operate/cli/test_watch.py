import pytest

from aztask.errors import BrokerUnavailable
from aztask.operate.cli.queues import CLEAR, watch


class Nap:
    """Sleeps in no time, and is interrupted in the third sleep."""

    def __init__(self):
        self.slept = []

    def __call__(self, seconds):
        self.slept.append(seconds)
        if len(self.slept) == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("terminal", "redraw", "shown"),
    [
        (True, True, f"{CLEAR}x\n" * 3 + "\n"),
        (True, False, "x\n" * 3),
        (False, True, "x\n" * 3),
    ],
)
def test_it_repeats_until_interrupted(capsys, monkeypatch, terminal, redraw, shown):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda stream, color: False)
    nap = Nap()
    watch(lambda: print("x"), 2.5, redraw=redraw, sleep=nap)
    assert nap.slept == [2.5] * 3
    assert capsys.readouterr().out == shown


def test_an_outage_is_reported_and_watched_through(capsys):
    answers = iter([None, BrokerUnavailable("gone\nfor now"), None])

    def show():
        if error := next(answers):
            raise error
        print("x")

    watch(show, 2.5, sleep=Nap())
    assert capsys.readouterr() == ("x\nx\n", "aztask: gone for now; still watching\n")


def test_an_outage_at_the_start_is_an_error():
    def show():
        raise BrokerUnavailable

    with pytest.raises(BrokerUnavailable):
        watch(show, 2.5, sleep=Nap())


def test_an_error_ends_it():
    def fail():
        raise ValueError

    with pytest.raises(ValueError):
        watch(fail, 1.0)
