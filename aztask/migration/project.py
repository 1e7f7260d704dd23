"""Read a project and list what it uses of Celery.

Rules: files that cannot be read are reported and skipped; no code of the project runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import libcst as cst

from aztask.migration.commandlines import command_uses, is_command_file
from aztask.migration.definitions import collect, visit
from aztask.migration.modules import WORTH_PARSING, Module, project_files, read_module
from aztask.migration.use import Unread, Use
from aztask.migration.visitor import UsesVisitor

_UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    RecursionError,
    MemoryError,
    cst.ParserSyntaxError,
)


TOO_DEEP: Final = "too deeply nested"


class Reading(NamedTuple):
    """What was found in a project, in the order of files and lines."""

    uses: list[Use]
    unread: list[Unread]
    files: int
    """How many files were looked at."""


def read_project(root: Path) -> Reading:
    """Every use of a part of Celery below `root`, a folder or one file.

    Raises OSError if `root` itself cannot be read.
    """
    modules: list[Module] = []
    unread: list[Unread] = []
    uses: set[Use] = set()
    count = 0
    for path in project_files(root):
        is_python = path.suffix == ".py"
        if not (is_python or is_command_file(path)):
            continue
        count += 1
        shown = str(path)
        try:
            source = path.read_bytes()
            if not is_python:
                uses |= command_uses(source.decode(errors="replace"), shown)
            elif WORTH_PARSING.search(source):
                modules.append(read_module(path, source, shown))
        except _UNREADABLE as error:
            line = error.lineno if isinstance(error, SyntaxError) else None
            unread.append(Unread(shown, line or 1, _reason(error)))
    found = collect(modules)
    for module in modules:
        visitor = UsesVisitor(module, found[module.root])
        if not visit(module, visitor):
            unread.append(Unread(module.shown, 1, TOO_DEEP))
        uses |= visitor.uses
    return Reading(sorted(uses), unread, count)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, RecursionError | MemoryError):
        return TOO_DEEP
    if isinstance(error, SyntaxError):
        return f"syntax error: {error.msg}"
    if isinstance(error, cst.ParserSyntaxError):
        return f"syntax error: {error.message.splitlines()[0]}"
    return " ".join(str(error).split())
