"""A finding: one thing that was checked, its result, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from aztask.errors import AztaskError


class Level(Enum):
    """The severity: a warning works, but not well; a problem does not work."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    * `subject`: the thing that was checked, such as ``queue orders``.
    * `check`: a short, fixed word for programs.
    * `text`: what was found.
    * `advice`: what to do next, "" if nothing.
    * `error`: the error behind a problem, for the exit code.
    """

    level: Level
    subject: str
    check: str
    text: str
    advice: str = ""
    error: AztaskError | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        """Subject, text and advice on one line."""
        return f"{self.subject}: {self.text}" + (f"; {self.advice}" if self.advice else "")


def fine(subject: str, check: str, text: str) -> Finding:
    """A finding for a check that passed."""
    return Finding(Level.OK, subject, check, text)


def warning(subject: str, check: str, text: str, advice: str) -> Finding:
    """A finding for something that works, but not well."""
    return Finding(Level.WARNING, subject, check, text, advice)


def problem(
    subject: str, check: str, text: str, advice: str, error: AztaskError | None = None
) -> Finding:
    """A finding for something that does not work."""
    return Finding(Level.PROBLEM, subject, check, text, advice, error)


def failed(subject: str, check: str, error: AztaskError) -> Finding:
    """The problem that `error` reports; its text already says what to do next."""
    return Finding(Level.PROBLEM, subject, check, str(error), "", error)
