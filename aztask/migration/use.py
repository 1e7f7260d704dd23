"""One use of a part of Celery in a project."""

from __future__ import annotations

from dataclasses import dataclass

from aztask.migration.answers import Answer


@dataclass(frozen=True, slots=True, order=True)
class Use:
    """A place where a project uses a part of Celery.

    * `file`: its path, as the user named the folder.
    * `line`: from 1.
    * `section`, `name`: the part, see `Answer`.
    * `text`: what to write instead, or why not.
    """

    file: str
    line: int
    section: str
    name: str
    text: str
    missing: bool

    @classmethod
    def of(cls, file: str, line: int, answer: Answer) -> Use:
        """The use of the part that `answer` is about."""
        return cls(file, line, answer.section, answer.name, answer.text, answer.missing)


@dataclass(frozen=True, slots=True)
class Unread:
    """A file that could not be read, and why."""

    file: str
    line: int
    reason: str
