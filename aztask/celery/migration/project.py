"""Read a project and list what it uses of Celery.

Rules: files that cannot be read are reported and skipped; no code of the project runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from aztask.celery.migration.answers import Answer, Unread, Use, answers
from aztask.celery.migration.definitions import (
    WORTH_PARSING,
    Definitions,
    define,
    merged,
    project_files,
    read_module,
)
from aztask.celery.migration.visitor import UsesVisitor

# Command lines of Celery in the files that start programs: scripts, Procfiles, services, YAML.
#
# Rules
# 1. Only the words after the word ``celery`` are read, up to the end of that command.
# 2. Quotes, commas and brackets are ignored, so that a list in YAML reads like a line of a script.


_SUFFIXES: Final = frozenset({".sh", ".bash", ".yml", ".yaml", ".service", ".ini", ".conf", ".mk"})
_NAMES: Final = re.compile(
    r"Dockerfile.*|.*\.Dockerfile|Procfile.*|Makefile|justfile|supervisord.*"
)
_CELERY: Final = re.compile(r"(?<![\w.:/@-])(?:[\w./-]*/)?celery(?=[\s\"',\]])(?!\s*[=:\[])")
_WORD: Final = re.compile(r"[^\s\"',\[\]]+")
_END: Final = frozenset({"&&", "||", "|", ";", "&", ">", ">>", "2>&1"})
_VALUES: Final = frozenset({"-A", "--app", "-b", "--broker", "--result-backend", "--config"})
_CONTROL: Final = frozenset({"inspect", "control"})


def is_command_file(path: Path) -> bool:
    """Whether programs are started from such a file."""
    return path.suffix in _SUFFIXES or _NAMES.fullmatch(path.name) is not None


def command_uses(text: str, shown: str) -> set[Use]:
    """The commands of Celery in a file, and the options of its workers."""
    uses = set()
    for number, line in _lines(text):
        for match in _CELERY.finditer(line):
            words = _words(line[match.end() :])
            uses |= {Use.of(shown, number, answer) for answer in _answers(words)}
    return uses


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without comments; a line that ends in a backslash goes on."""
    start, joined = 1, ""
    for number, line in enumerate(text.splitlines(), 1):
        if not joined:
            start = number
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1] + " "
            continue
        joined += line
        if not joined.lstrip().startswith("#"):
            yield start, joined
        joined = ""


def _words(text: str) -> list[str]:
    """The words of one command, quotes and brackets (of a YAML list) left out."""
    words = []
    for word in _WORD.findall(text):
        if word in _END:
            break
        words.append(word.rstrip(";"))
        if word.endswith(";"):
            break
    return words


def _answers(words: list[str]) -> Iterator[Answer]:
    name, rest = "celery", list(words)
    known = answers("commands")
    while rest:
        word = rest.pop(0)
        if word in _VALUES:
            rest[:1] = []
        elif f"{name} {word}" in known:
            name = f"{name} {word}"
            if not any(other.startswith(f"{name} ") for other in known):
                break
        elif not word.startswith("-"):
            break
    if name not in known:
        return
    yield known[name]
    if name == "celery worker":
        yield from _worker_options(words)
    elif name.removeprefix("celery ") in _CONTROL:
        control = answers("control")
        yield from (control[word] for word in rest[:1] if word in control)


def _worker_options(words: list[str]) -> Iterator[Answer]:
    """Options as Celery's command line takes them: ``--name=VALUE``, ``--name VALUE``, ``-c4``."""
    options = answers("worker")
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--"):
            short = name
        elif name.startswith("-") and len(name) > 1:
            short = name[:2]
        else:
            continue
        if short in options:
            yield options[short]


_UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    RecursionError,
    MemoryError,
)


TOO_DEEP: Final = "too deeply nested"


class Reading(NamedTuple):
    """What was found in a project, in the order of files and lines."""

    uses: list[Use]
    unread: list[Unread]
    files: int
    """How many files were looked at."""


def read_project(root: Path, progress: Callable[[int], None] = lambda count: None) -> Reading:
    """Every use of a part of Celery below `root`, a folder or one file.

    * `progress`: called with the number of files that were looked at, each time it grows.

    Raises OSError if `root` itself cannot be read.
    """
    unread: dict[str, Unread] = {}
    uses: set[Use] = set()
    worth: list[Path] = []
    own: set[str] = set()
    defined: list[tuple[Path, str, Definitions]] = []
    count = 0
    for path in project_files(root):
        is_python = path.suffix == ".py"
        if not (is_python or is_command_file(path)):
            continue
        count += 1
        progress(count)
        try:
            source = path.read_bytes()
            if not is_python:
                uses |= command_uses(source.decode(errors="replace"), str(path))
                continue
            own |= {path.stem, *path.parent.parts[len(root.parts) :]}
            if WORTH_PARSING.search(source):
                module = read_module(path, source, str(path))
                defined.append((module.root, module.name, define(module)))
                worth.append(path)
        except _UNREADABLE as error:
            unread[str(path)] = _unread(path, error)
    seen = merged(defined, frozenset(own))
    for path in worth:
        try:
            module = read_module(path, path.read_bytes(), str(path))
            visitor = UsesVisitor(module, seen[module.root])
            visitor.walk(module.tree)
            visitor.finish()
            uses |= visitor.uses
        except _UNREADABLE as error:
            unread[str(path)] = _unread(path, error)
    return Reading(sorted(uses), list(unread.values()), count)


def _unread(path: Path, error: Exception) -> Unread:
    line = error.lineno if isinstance(error, SyntaxError) else None
    return Unread(str(path), line or 1, _reason(error))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, RecursionError | MemoryError):
        return TOO_DEEP
    if isinstance(error, SyntaxError):
        return f"syntax error: {error.msg}"
    return " ".join(str(error).split())
