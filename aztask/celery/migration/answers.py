"""The table of Celery's parts and their counterparts in aztask: ``answers.toml`` as values.

Rules
1. The table is data: to change an answer, edit the one row in ``answers.toml`` and write the
   documentation again with ``python docs/generate/migration.py``.
2. Reading it needs neither Celery nor libcst.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

NO: Final = "no, because"
"""How the answer begins for a part that has no counterpart."""

NOT_NEEDED: Final = "not needed:"
"""How the answer begins for a part that you can delete."""

NAMES: Final = "names"

OLD_SETTINGS: Final = "old_settings"

SECTIONS: Final = {
    "settings": "Settings",
    "signals": "Signals",
    "task": "Tasks: options, attributes and methods",
    "request": "`self.request`",
    "send": "Options of `apply_async` and `send_task`",
    "app": "The `Celery` object",
    "names": "Other names that you import",
    "signature": "Signatures",
    "result": "Results",
    "control": "Remote control: `app.control` and `celery inspect`, `celery control`",
    "commands": "Commands",
    "worker": "Options of `celery worker`",
}
"""The sections of the table in order, and their headings."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What aztask has in the place of one part of Celery.

    * `section`: a key of `SECTIONS`.
    * `name`: the part's name in Celery.
    * `text`: what to write instead, or why not.
    """

    section: str
    name: str
    text: str

    @property
    def missing(self) -> bool:
        """True if aztask has no counterpart."""
        return self.text.startswith(NO)


@cache
def rows() -> Mapping[str, Mapping[str, str]]:
    """The file as it is: for each section the names of each row, with commas, and its answer."""
    file = resources.files("aztask.celery.migration") / "answers.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


@cache
def answers(section: str) -> Mapping[str, Answer]:
    """The answers of one section by name."""
    return {
        name: Answer(section, name, text)
        for names, text in rows()[section].items()
        for name in split_names(names)
    }


def split_names(names: str) -> Iterator[str]:
    """The names in the key of one row."""
    return (name.strip() for name in names.split(","))


def setting_answer(name: str) -> Answer | None:
    """The answer for a setting under its name of today or of before Celery 4; None if unknown."""
    known = answers("settings")
    new = rows()[OLD_SETTINGS].get(name, name.lower())
    return known.get(new)


# -- one use of a part of Celery in a project ----------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class Use:
    """A place where a project uses a part of Celery.

    * `file`: its path, as the user named the folder.
    * `line`: from 1.
    * `section`, `name`: the part, see `Answer`.
    * `text`: what to write instead, or why not.
    * `sure`: "certain"; "likely" if something was judged by its name; "unknown" for a name of
      Celery, Kombu or a package around them that the table does not have.
    """

    file: str
    line: int
    section: str
    name: str
    text: str
    missing: bool
    sure: str = "certain"

    @classmethod
    def of(cls, file: str, line: int, answer: Answer, sure: str = "certain") -> Use:
        """The use of the part that `answer` is about."""
        return cls(file, line, answer.section, answer.name, answer.text, answer.missing, sure)


@dataclass(frozen=True, slots=True)
class Unread:
    """A file that could not be read, and why."""

    file: str
    line: int
    reason: str
