"""A finding: one thing that was looked at, how it stands, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from aztask.errors import AztaskError


class Level(Enum):
    """How bad it is: a warning works, but not as one would wish; a problem does not work."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """subject: what it is about, such as ``queue orders``. check: a short, fixed word for programs.

    text: what was found. advice: what to do next, "" where nothing is to be done. error: what kind
    of error a problem is, for the exit code.
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
    """It is as it should be."""
    return Finding(Level.OK, subject, check, text)


def warning(subject: str, check: str, text: str, advice: str) -> Finding:
    """It works, but not as one would wish."""
    return Finding(Level.WARNING, subject, check, text, advice)


def problem(
    subject: str, check: str, text: str, advice: str, error: AztaskError | None = None
) -> Finding:
    """It does not work."""
    return Finding(Level.PROBLEM, subject, check, text, advice, error)


def failed(subject: str, check: str, error: AztaskError) -> Finding:
    """An error, which says itself what to do next."""
    return Finding(Level.PROBLEM, subject, check, str(error), "", error)
