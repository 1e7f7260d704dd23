"""The first look at a project: which apps, tasks and settings its modules define.

Rules: see `aztask.celery.migration.definitions`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider, QualifiedName, QualifiedNameProvider

# -- Modules ---------------------------------------------------------------------------------------
#
# The Python modules of a project: their names, their syntax trees, and what they define.
#
# Rules
# 1. No code of the project runs: the source is parsed, nothing is imported.
# 2. A module is named as its own project imports it: from the highest folder above it that is part
#    of a package.
# 3. What a project defines is collected from all its modules first, so that ``from shop.celery
#    import app`` means the same app everywhere.

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


# -- Definitions -----------------------------------------------------------------------------------


_APP_NAMES = frozenset({"app", "celery", "celery_app"})
"""Names of a Celery app that is not found, for example because another package defines it."""

_SHARED = frozenset({"celery.shared_task", "celery.app.shared_task", "celery.task"})


def collect(modules: Sequence[Module]) -> dict[Path, Definitions]:
    """What the modules of each import root see: apps and imports first, then what they decorate.

    A root sees its own modules. It also sees those of other roots, unless it has a module of the
    same name: two folders may both hold a ``tasks.py``.
    """
    own: dict[Path, Definitions] = {}
    for module in modules:
        visit(module, _Names(module, own.setdefault(module.path, Definitions())))
    seen = _by_root(modules, own)
    for module in modules:
        visit(module, _Tasks(module, seen[module.root], own[module.path]))
    return _by_root(modules, own)


def visit(module: Module, visitor: cst.CSTVisitor) -> bool:
    """Walk through a module; False if it is too deeply nested."""
    try:
        module.tree.visit(visitor)
    except RecursionError:
        return False
    return True


def _by_root(modules: Sequence[Module], own: Mapping[Path, Definitions]) -> dict[Path, Definitions]:
    names: dict[Path, set[str]] = {}
    for module in modules:
        names.setdefault(module.root, set()).add(module.name)
    merged = {root: Definitions() for root in names}
    for module in modules:
        for root, taken in names.items():
            if root == module.root or module.name not in taken:
                merged[root].add(own[module.path])
    return merged


class _Names(cst.CSTVisitor):
    """Collects apps, imports under other names, and where settings are."""

    def __init__(self, module: Module, found: Definitions) -> None:
        self._module = module
        self._found = found

    def visit_Assign(self, node: cst.Assign) -> None:
        """Remember ``app = Celery(...)``, and variables of other libraries."""
        if not isinstance(node.value, cst.Call):
            return
        kind = self._module.full_name(node.value.func)
        for target in node.targets:
            name = self._module.full_name(target.target)
            if name and kind in APP_CLASSES:
                self._found.apps.add(name)
            elif name and kind:
                self._found.others.add(name)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        """Remember that ``from .celery import app as celery_app`` makes an alias here."""
        if isinstance(node.names, cst.ImportStar):
            return
        dots = "." * len(node.relative)
        source = dots + (_dotted(node.module) if node.module else "")
        if dots:
            source = self._module.relative(source)
        for each in node.names:
            name = _dotted(each.name)
            alias = _dotted(each.asname.name) if each.asname else name
            here = f"{self._module.name}.{alias}"
            if f"{source}.{name}" != here:
                self._found.aliases[here] = f"{source}.{name}"

    def visit_Call(self, node: cst.Call) -> None:
        """Remember what ``config_from_object("proj.conf", namespace="CELERY")`` names."""
        if not (
            isinstance(node.func, cst.Attribute) and node.func.attr.value == "config_from_object"
        ):
            return
        for argument in node.args:
            text = text_of(argument.value)
            if argument.keyword is not None and argument.keyword.value == "namespace":
                if text:
                    self._found.namespaces.add(text)
            elif text is not None:
                self._found.config_objects.add(text.replace(":", "."))
            elif name := self._module.full_name(argument.value):
                self._found.config_objects.add(name)


class _Tasks(cst.CSTVisitor):
    """Collects the functions that are tasks."""

    def __init__(self, module: Module, seen: Definitions, own: Definitions) -> None:
        self._module = module
        self._seen = seen
        self._own = own

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        """Remember a function under ``@app.task`` or ``@shared_task``."""
        for decorator in node.decorators:
            if is_task_decorator(decorator.decorator, self._module, self._seen):
                self._own.tasks.add(self._module.full_name(node) or "")


def is_task_decorator(node: cst.BaseExpression, module: Module, found: Definitions) -> bool:
    """Whether a decorator makes a Celery task of a function."""
    if isinstance(node, cst.Call):
        node = node.func
    name = module.full_name(node)
    if name is None:
        return False
    name = found.resolve(name)
    if name in _SHARED:
        return True
    owner, _, last = name.rpartition(".")
    if last not in ("task", "periodic_task"):
        return False
    return owner in found.apps or (
        owner.rpartition(".")[2] in _APP_NAMES and owner not in found.others
    )


def is_bound(node: cst.BaseExpression) -> bool:
    """Whether the decorator has ``bind=True``."""
    return isinstance(node, cst.Call) and any(
        each.keyword is not None
        and each.keyword.value == "bind"
        and isinstance(each.value, cst.Name)
        and each.value.value == "True"
        for each in node.args
    )


def text_of(node: cst.BaseExpression) -> str | None:
    """The text of a string literal, else None."""
    if isinstance(node, cst.SimpleString | cst.ConcatenatedString):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    return None


def _dotted(node: cst.BaseExpression | None) -> str:
    if isinstance(node, cst.Attribute):
        return f"{_dotted(node.value)}.{node.attr.value}"
    return node.value if isinstance(node, cst.Name) else ""
