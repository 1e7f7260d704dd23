"""Asking before something is done that cannot be undone."""

import io

import click
import pytest

from aztask.operate.cli.options import confirm


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_dry_run_says_what_would_be_done(capsys):
    assert not confirm("purge 3", dry_run=True, yes=True)
    assert capsys.readouterr().out == "would purge 3\n"


def test_yes_does_not_ask(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert confirm("purge 3", dry_run=False, yes=True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("stdin", [None, io.StringIO("y\n")], ids=["closed", "a pipe"])
def test_without_a_terminal_yes_is_needed(monkeypatch, stdin):
    monkeypatch.setattr("sys.stdin", stdin)
    with pytest.raises(click.UsageError, match="this would purge 3; add --yes"):
        confirm("purge 3", dry_run=False, yes=False)


def test_a_terminal_is_asked(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert confirm("purge 3", dry_run=False, yes=False)
    assert "purge 3? [y/N]" in capsys.readouterr().err


def test_no_aborts(monkeypatch):
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    with pytest.raises(click.Abort):
        confirm("purge 3", dry_run=False, yes=False)
