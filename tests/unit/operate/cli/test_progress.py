import io

import pytest

from aztask.operate.cli.output import ProgressLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Times:
    now = 0.0

    def __call__(self):
        return self.now


def test_elsewhere_than_on_a_terminal_a_line_now_and_then(capsys):
    clock = Times()
    progress = ProgressLine(100, "tasks", clock=clock)
    for second in range(6):
        clock.now = float(second)
        progress.show(10 * second, ", 3 wait")
    progress.show(100, last=True)
    progress.clear()
    assert capsys.readouterr().err.splitlines() == [
        "20 of 100 tasks, 10/s, 3 wait",
        "40 of 100 tasks, 10/s, 3 wait",
        "100 of 100 tasks, 20/s",
    ]


@pytest.mark.parametrize("columns", [20, 80])
def test_on_a_terminal_one_line_is_rewritten(monkeypatch, columns):
    terminal, clock = Terminal(), Times()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = ProgressLine(4, "tasks", clock=clock)
    for done in range(5):
        clock.now += 0.2
        progress.show(done, last=done == 4)
    drawn = terminal.getvalue().replace("\x1b[K", "").split("\r")[1:]
    assert len(drawn) == 5
    assert all(len(line.rstrip("\n")) < columns for line in drawn)
    assert [line.count("#") for line in drawn] == (
        [0, 7, 15, 22, 30] if columns == 80 else [0, 7, 15, 18, 18]
    )
    assert [line.endswith("\n") for line in drawn] == [False] * 4 + [True]


def test_a_terminal_is_not_drawn_on_too_often(monkeypatch):
    terminal, clock = Terminal(), Times()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = ProgressLine(1000, "tasks", clock=clock)
    for done in range(1000):
        clock.now += 0.001
        progress.show(done)
    assert terminal.getvalue().count("\r") <= 11


def test_nothing_to_do_is_no_division_by_zero(capsys):
    ProgressLine(0, "tasks", clock=Times()).show(0, last=True)
    assert "0 of 0 tasks" in capsys.readouterr().err
