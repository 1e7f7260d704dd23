"""The Python modules of a project: their names, their syntax trees, and what they define.

Rules
1. No code of the project runs: the source is parsed, nothing is imported.
2. A module is named as its own project imports it: from the highest folder above it that is part of
   a package.
3. What a project defines is collected from all its modules first, so that ``from shop.celery import
   app`` means the same app everywhere.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider, QualifiedName, QualifiedNameProvider

APP_CLASSES: Final = frozenset({"celery.Celery", "celery.app.base.Celery", "celery.app.Celery"})
SKIPPED_FOLDERS: Final = frozenset(
    {"__pycache__", "node_modules", "site-packages", "build", "dist"}
)
WORTH_PARSING: Final = re.compile(
    rb"celery|apply_async|send_task|chunks|starmap|\.(task|control)\b|\.(delay|retry|s|si)\("
    rb"|^\w*(task|worker|beat|broker|result|import|include|accept|timezone|security)\w* *[:=]",
    re.IGNORECASE | re.MULTILINE,
)
"""A file without any of these uses nothing of Celery. Parsing is the slow part."""


@dataclass
class Module:
    """One parsed file.

    * `path`, `shown`: where it is, and how messages name it.
    * `root`: the folder from which it is imported.
    * `name`, `package`: its dotted name, and what its relative imports start from.
    """

    path: Path
    root: Path
    shown: str
    name: str
    package: str
    tree: cst.Module
    positions: Mapping[cst.CSTNode, object]
    qualified: Mapping[cst.CSTNode, object]

    def line(self, node: cst.CSTNode) -> int:
        """The line on which `node` begins."""
        return int(self.positions[node].start.line)  # type: ignore[attr-defined]  # CodeRange

    def full_name(self, node: cst.CSTNode) -> str | None:
        """The dotted name that `node` means: through imports, or this module's own; else None."""
        found = self.qualified.get(node)
        if callable(found):  # libcst computes it when it is asked
            found = found()
        names: set[QualifiedName] = found or set()  # type: ignore[assignment]
        return min((self._absolute(each) for each in names), default=None)

    def code(self, node: cst.CSTNode) -> str:
        """The source text of `node`."""
        return self.tree.code_for_node(node)

    def _absolute(self, name: QualifiedName) -> str:
        text = name.name
        if name.source.name == "LOCAL":
            return f"{self.name}.{text}"
        if not text.startswith("."):
            return text
        return self.relative(text)

    def relative(self, text: str) -> str:
        """The absolute name of ``.celery.app`` in this module."""
        rest = text.lstrip(".")
        levels = len(text) - len(rest) - 1
        parts = self.package.split(".") if self.package else []
        kept = parts[: len(parts) - levels]
        return own_name(".".join([*kept, rest] if rest else kept))


@dataclass
class Definitions:
    """What the modules of a project define, by full names."""

    apps: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    """Variables that a call made: an ``app`` among them is the app of another library."""
    aliases: dict[str, str] = field(default_factory=dict)
    tasks: set[str] = field(default_factory=set)
    config_objects: set[str] = field(default_factory=lambda: {"celeryconfig"})
    namespaces: set[str] = field(default_factory=lambda: {"CELERY"})

    def add(self, other: Definitions) -> None:
        """Add what another module defines."""
        self.apps |= other.apps
        self.others |= other.others
        self.aliases.update(other.aliases)
        self.tasks |= other.tasks
        self.config_objects |= other.config_objects
        self.namespaces |= other.namespaces

    def resolve(self, name: str) -> str:
        """Follow ``from .celery import app as celery_app`` to where the name is defined."""
        for _ in range(20):  # a circular import in the project must not keep us here
            head, rest = name, ""
            while head and head not in self.aliases:
                head, _, last = head.rpartition(".")
                rest = f".{last}{rest}"
            if not head:
                break
            target = self.aliases[head] + rest
            if target == name:
                break
            name = target
        return name


def own_name(name: str) -> str:
    """The name of a project's module: one that is called ``celery`` is not Celery itself."""
    return f"own {name}" if name.split(".", maxsplit=1)[0] == "celery" else name


def project_files(root: Path) -> Iterator[Path]:
    """The files below `root`, without hidden folders, environments and built copies.

    Raises OSError if a folder cannot be read.
    """
    if root.is_file():
        yield root
        return
    for path in sorted(root.iterdir()):
        if path.is_dir():
            hidden = path.name.startswith(".") or path.name in SKIPPED_FOLDERS
            if not (hidden or path.is_symlink() or (path / "pyvenv.cfg").exists()):
                yield from project_files(path)
        elif path.is_file() or not path.exists():  # reading a FIFO waits for a writer
            yield path


def read_module(path: Path, source: bytes, shown: str) -> Module:
    """Parse one file. Raises SyntaxError, ValueError, RecursionError or MemoryError.

    Python's own parser goes first: libcst overflows the stack, and ends the process, where that one
    raises an error (thousands of brackets in one another).
    """
    ast.parse(source)
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    found = wrapper.resolve_many([PositionProvider, QualifiedNameProvider])
    parts = [] if path.stem == "__init__" else [path.stem]
    folder = path.parent
    packages: list[str] = []
    while (folder / "__init__.py").exists() and folder.name:
        packages.insert(0, folder.name)
        folder = folder.parent
    return Module(
        path,
        folder,
        shown,
        own_name(".".join([*packages, *parts])),
        ".".join(packages),
        wrapper.module,
        found[PositionProvider],
        found[QualifiedNameProvider],
    )
