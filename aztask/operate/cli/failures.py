"""Turns errors into one line on stderr and an exit code; no other module does.

Exit codes: 0 ok, 1 failure, 2 usage or import error, 3 broker unreachable, 4 configuration or
permission, 5 not found; 130 after Ctrl-C. With AZTASK_DEBUG=1 the traceback is shown as well.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Final

import click

from aztask.errors import (
    AztaskError,
    BrokerUnavailable,
    ConfigurationError,
    InvalidQueueName,
    NotFound,
    QueueDisabled,
    QueueNotFound,
    SendUnconfirmed,
    UnknownTask,
)
from aztask.support.display import mask, visible

OK: Final = 0
FAILURE: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
CONFIGURATION: Final = 4
NOT_FOUND: Final = 5
INTERRUPTED: Final = 130

DEBUG_VARIABLE: Final = "AZTASK_DEBUG"

_CODES: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (QueueDisabled, CONFIGURATION),
    (BrokerUnavailable, UNREACHABLE),
    (SendUnconfirmed, UNREACHABLE),
    (ConfigurationError, CONFIGURATION),
    (InvalidQueueName, CONFIGURATION),
    (NotFound, NOT_FOUND),
    (QueueNotFound, NOT_FOUND),
    (UnknownTask, NOT_FOUND),
)


class CommandFailed(click.ClickException):
    """The command could not do its work, or its task failed."""

    exit_code = FAILURE


class ImportFailed(click.ClickException):
    """The module that -A names cannot be imported."""

    exit_code = USAGE


def report(error: BaseException) -> int:
    """Write what happened on one line, and return the exit code."""
    code, line = diagnose(error)
    if os.environ.get(DEBUG_VARIABLE) and not isinstance(error, SystemExit):
        trace = "".join(traceback.format_exception(error))
        _write(mask(trace))
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        _write(error.format_message() + "\n")
    elif line:
        _write(f"aztask: error: {one_line(line)}\n")
    return code


def diagnose(error: BaseException) -> tuple[int, str]:
    """(exit code, the line to write); the line is "" after Ctrl-C or a broken pipe."""
    if isinstance(error, click.Abort):
        interrupted = isinstance(error.__cause__, KeyboardInterrupt)
        return (INTERRUPTED, "") if interrupted else (FAILURE, "aborted; nothing was changed")
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, ""
    if isinstance(error, click.ClickException):
        return error.exit_code, _click_text(error)
    if isinstance(error, SystemExit | OSError):
        return _of_the_system(error)
    code = next((code for kind, code in _CODES if isinstance(error, kind)), FAILURE)
    if isinstance(error, AztaskError):
        return code, str(error)
    return code, (
        f"unexpected {type(error).__name__}: {_text(error)} "
        f"({DEBUG_VARIABLE}=1 shows where; please report it)"
    )


def _of_the_system(error: SystemExit | OSError) -> tuple[int, str]:
    """Exits and file errors. Stdout may be the file that failed: nothing is written to it."""
    _forget_stdout()
    if isinstance(error, SystemExit):  # how click ends when the reader of our output has closed
        return (error.code if isinstance(error.code, int) else FAILURE), ""
    if isinstance(error, BrokenPipeError):
        return FAILURE, ""
    code = CONFIGURATION if isinstance(error, PermissionError) else FAILURE
    where = f": {os.fsdecode(error.filename)}" if error.filename is not None else ""
    return code, f"{error.strerror or type(error).__name__}{where}"


def one_line(text: str) -> str:
    """`text` for a terminal: without secrets, line breaks and control characters."""
    return visible(mask(" ".join(line.strip() for line in text.splitlines() if line.strip())))


def _click_text(error: click.ClickException) -> str:
    text = error.format_message().replace("is not a valid integer range", "is not a whole number")
    if isinstance(error, click.UsageError) and error.ctx is not None:
        text = text.rstrip(".")
        text += f"{' See' if text.endswith('?') else '; see'} {error.ctx.command_path} --help"
    return text


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001  # user code may define __str__
        return f"(its text cannot be read: {type(broken).__name__})"


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()


def _forget_stdout() -> None:
    """Discard what is buffered for a failing stdout; else Python complains at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
