import io

import click
import pytest

from aztask import errors
from aztask.config import Secret
from aztask.operate.cli.failures import CommandFailed, ImportFailed, diagnose, one_line, report
from aztask.support.display import visible


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.AztaskError("x"), 1),
        (errors.TaskFailed("ValueError", "x"), 1),
        (errors.ResultTimeout("x"), 1),
        (errors.QueueFull("x"), 1),
        (errors.BrokerUnavailable("x"), 3),
        (errors.SendUnconfirmed("x"), 3),
        (errors.ConfigurationError("x"), 4),
        (errors.CapabilityError("x"), 4),
        (errors.InvalidQueueName("x"), 4),
        (errors.QueueNotFound("x"), 5),
        (errors.UnknownTask("x"), 5),
        (PermissionError(13, "Permission denied", "/x"), 4),
        (FileNotFoundError(2, "No such file or directory", "/x"), 1),
        (click.UsageError("x"), 2),
        (ImportFailed("x"), 2),
        (CommandFailed("x"), 1),
        (errors.NotFound("x"), 5),
        (ZeroDivisionError("x"), 1),
        (RecursionError(), 1),
    ],
)
def test_every_error_has_a_code_and_a_line(error, code):
    found, line = diagnose(error)
    assert found == code
    assert line


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 1),
        (SystemExit(143), 143),
        (SystemExit("x"), 1),
    ],
)
def test_some_ends_are_silent(error, code):
    assert diagnose(error) == (code, "")


def test_an_interrupt_that_click_wrapped_is_an_interrupt():
    abort = click.Abort()
    abort.__cause__ = KeyboardInterrupt()
    assert diagnose(abort) == (130, "")
    assert diagnose(click.Abort()) == (1, "aborted; nothing was changed")


def test_a_file_is_named():
    assert diagnose(PermissionError(13, "Permission denied", "/x"))[1] == "Permission denied: /x"


def test_an_unexpected_error_says_how_to_see_more():
    line = diagnose(ZeroDivisionError("division by zero"))[1]
    assert line.startswith("unexpected ZeroDivisionError: division by zero (AZTASK_DEBUG=1 shows")


def test_an_error_whose_text_fails_is_reported_all_the_same():
    class Broken(Exception):
        def __str__(self):
            raise ValueError

    assert "its text cannot be read: ValueError" in diagnose(Broken())[1]


def test_what_is_said_is_one_line_without_secrets(capsys):
    Secret("a-very-secret-key")
    code = report(errors.ConfigurationError("a\x1b[31m\nb a-very-secret-key\r\n\u202ec"))
    assert code == 4
    assert capsys.readouterr().err == "aztask: error: a\\x1b[31m b **** \\u202ec\n"


def test_the_traceback_is_shown_when_asked_for(capsys, monkeypatch):
    monkeypatch.setenv("AZTASK_DEBUG", "1")
    Secret("a-very-secret-key")
    try:
        raise errors.BrokerUnavailable("a-very-secret-key")
    except errors.AztaskError as error:
        report(error)
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "a-very-secret-key" not in err


def test_a_closed_stderr_is_no_error(monkeypatch):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr("sys.stderr", stream)
    assert report(errors.QueueNotFound("x")) == 5
    monkeypatch.setattr("sys.stderr", None)
    assert report(errors.QueueNotFound("x")) == 5


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ü 漢", "plain ü 漢"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\ud800", "\\ud800"),
        ("\u202e", "\\u202e"),
        ("\x00", "\\x00"),
    ],
)
def test_invisible_characters_are_shown_as_escapes(text, shown):
    assert visible(text) == shown
    assert visible(text).isprintable()


def test_several_lines_become_one():
    assert one_line("a\n\n  b\n") == "a b"
