"""The first look at a project: which apps, tasks and settings its modules define.

Rules
1. No code of the project runs: the source is parsed, nothing is imported.
2. A module is named as its own project imports it: from the highest folder above it that is part
   of a package.
3. What a project defines is collected from all its modules first, so that ``from shop.celery
   import app`` means the same app everywhere.
4. No syntax tree is kept: those of a large project do not fit in memory. A file that is worth it is
   parsed once for each look, which costs little beside walking through it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import decode_source
from pathlib import Path
from typing import Final

# -- Modules ---------------------------------------------------------------------------------------

APP_CLASSES: Final = frozenset({"celery.Celery", "celery.app.base.Celery", "celery.app.Celery"})
SKIPPED_FOLDERS: Final = frozenset(
    {"__pycache__", "node_modules", "site-packages", "build", "dist"}
)
WORTH_PARSING: Final = re.compile(
    rb"celery|kombu|redbeat|apply_async|send_task|chunks|starmap|\.(task|control)\b"
    rb"|\.(delay|retry|s|si)\("
    rb"|^[A-Z\w]*(TASK|WORKER|BEAT|BROKER|RESULT|IMPORTS|INCLUDE|ACCEPT_CONTENT)\w* *[:=]"
    rb"|^(task|worker|beat|broker|result|event|control|security)_\w+ *[:=]"
    rb"|^(imports|include|accept_content|timezone|enable_utc) *[:=]",
    re.MULTILINE,
)
"""A file without any of these uses nothing of Celery. Walking through a file is the slow part."""

_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class NameScope:
    """The names that a module, class or function binds, and the full names that they mean."""

    parent: NameScope | None
    prefix: str
    is_class: bool = False
    names: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    """Modules whose names a ``from ... import *`` brings in."""

    def bind(self, name: str) -> None:
        """A name that an assignment, a definition or a parameter binds. An import comes first."""
        self.names.setdefault(name, f"{self.prefix}.{name}")

    def find(self, name: str) -> str | None:
        """The full name that `name` means here; None for one that nothing here binds."""
        scope: NameScope | None = self
        while scope is not None:
            if name in scope.names and (scope is self or not scope.is_class):
                return scope.names[name]
            if scope.parent is None and scope.stars:
                return f"{scope.stars[-1]}.{name}"
            scope = scope.parent
        return None


@dataclass
class Module:
    """One file, and its syntax tree for one look.

    * `path`, `shown`: where it is, and how messages name it.
    * `root`: the folder from which it is imported.
    * `name`, `package`: its dotted name, and what its relative imports start from.
    * `scope`: of the place that is looked at.
    """

    path: Path
    root: Path
    shown: str
    name: str
    package: str
    tree: ast.Module
    scope: NameScope
    scopes: Mapping[ast.AST, NameScope]

    def full_name(self, node: ast.AST | None) -> str | None:
        """The dotted name that `node` means: through imports, or this module's own; else None."""
        if isinstance(node, ast.Name):
            return self.scope.find(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.full_name(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        return None

    def own(self, name: str) -> str:
        """The full name of what is defined in the present scope under this name."""
        return f"{self.scope.prefix}.{name}"


def read_module(path: Path, source: bytes, shown: str) -> Module:
    """Parse one file. Raises SyntaxError, ValueError, RecursionError or MemoryError."""
    tree = ast.parse(decode_source(source))  # in bytes, comments would not be checked
    parts = [] if path.stem == "__init__" else [path.stem]
    folder = path.parent
    packages: list[str] = []
    while (folder / "__init__.py").exists() and folder.name:
        packages.insert(0, folder.name)
        folder = folder.parent
    name, package = own_name(".".join([*packages, *parts])), ".".join(packages)
    top = NameScope(None, name)
    scopes: dict[ast.AST, NameScope] = {tree: top}
    _bind_all(tree.body, top, scopes, package)
    return Module(path, folder, shown, name, package, tree, top, scopes)


def _bind_all(
    nodes: Iterable[ast.AST], scope: NameScope, scopes: dict[ast.AST, NameScope], package: str
) -> None:
    """Note what `nodes` bind in `scope`, and the scopes below it."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                scope.bind(node.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            _bind_import(node, scope, package)
        elif isinstance(node, ast.ClassDef):
            scope.bind(node.name)
            waiting += [*node.decorator_list, *node.bases, *(each.value for each in node.keywords)]
            inner = scopes[node] = NameScope(scope, f"{scope.prefix}.{node.name}", is_class=True)
            _bind_all(node.body, inner, scopes, package)
        elif isinstance(node, _FUNCTIONS):
            waiting += _bind_function(node, scope, scopes, package)
        elif isinstance(node, _COMPREHENSIONS):
            inner = scopes[node] = NameScope(scope, f"{scope.prefix}.<locals>")
            _bind_all(ast.iter_child_nodes(node), inner, scopes, package)
        else:
            if isinstance(node, ast.ExceptHandler) and node.name:
                scope.bind(node.name)
            waiting += ast.iter_child_nodes(node)


def _bind_import(node: ast.ImportFrom | ast.Import, scope: NameScope, package: str) -> None:
    source = source_of(node, package) if isinstance(node, ast.ImportFrom) else ""
    for each in node.names:
        if isinstance(node, ast.Import):
            first = each.name.partition(".")[0]
            scope.names[each.asname or first] = each.name if each.asname else first
        elif each.name == "*":
            scope.stars.append(source)
        else:
            scope.names[each.asname or each.name] = f"{source}.{each.name}"


def _bind_function(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
    scope: NameScope,
    scopes: dict[ast.AST, NameScope],
    package: str,
) -> list[ast.AST]:
    """Note a function, and what it binds; returns what belongs to the scope around it."""
    name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
    inner = scopes[node] = NameScope(scope, f"{scope.prefix}.{name}.<locals>")
    for each in parameters(node):
        inner.bind(each)
    outside: list[ast.AST] = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
    if isinstance(node, ast.Lambda):
        _bind_all([node.body], inner, scopes, package)
        return outside
    scope.bind(name)
    _bind_all(node.body, inner, scopes, package)
    return [*outside, *node.decorator_list]


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[str]:
    """The names of all parameters, in order."""
    given = node.args
    found = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    found += [each for each in (given.vararg, given.kwarg) if each is not None]
    return [each.arg for each in found]


def source_of(node: ast.ImportFrom, package: str) -> str:
    """The absolute name of the module that names are imported from."""
    name = node.module or ""
    if not node.level:
        return name
    parts = package.split(".") if package else []
    kept = parts[: len(parts) - node.level + 1]
    return own_name(".".join([*kept, name] if name else kept))


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


# -- Definitions -----------------------------------------------------------------------------------

_APP_NAMES = frozenset({"app", "celery", "celery_app"})
"""Names of a Celery app that is not found, for example because another package defines it."""

_SHARED = frozenset({"celery.shared_task", "celery.app.shared_task", "celery.task"})


@dataclass
class Definitions:
    """What the modules of a project define, by full names.

    * `modules`: the names of the project's own files and folders.
    * `guessed`: tasks whose app was not found, and was judged by its name.
    * `decorated`: functions, and their decorators.
    """

    apps: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    """Variables that a call made: an ``app`` among them is the app of another library."""
    aliases: dict[str, str] = field(default_factory=dict)
    tasks: set[str] = field(default_factory=set)
    modules: frozenset[str] = frozenset()
    guessed: set[str] = field(default_factory=set)
    decorated: list[tuple[str, str]] = field(default_factory=list)
    config_objects: set[str] = field(default_factory=lambda: {"celeryconfig"})
    namespaces: set[str] = field(default_factory=lambda: {"CELERY"})

    def add(self, other: Definitions) -> None:
        """Add what another module defines."""
        self.apps |= other.apps
        self.others |= other.others
        self.aliases.update(other.aliases)
        self.decorated += other.decorated
        self.config_objects |= other.config_objects
        self.namespaces |= other.namespaces

    def find_tasks(self) -> None:
        """Decide which of the decorated functions are tasks."""
        for decorator, function in self.decorated:
            kind = self.makes_task(decorator)
            if kind:
                self.tasks.add(function)
            if kind == GUESSED:
                self.guessed.add(function)

    def makes_task(self, decorator: str | None) -> str:
        """How sure it is that a decorator makes a Celery task: `CERTAIN`, `GUESSED` or ""."""
        if decorator is None:
            return ""
        name = self.resolve(decorator)
        if name in _SHARED:
            return CERTAIN
        owner, _, last = name.rpartition(".")
        if last not in ("task", "periodic_task"):
            return ""
        if owner in self.apps or owner == "celery.current_app":
            return CERTAIN
        known = owner in self.others or owner.rpartition(".")[2] not in _APP_NAMES
        return "" if known else GUESSED

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


CERTAIN: Final = "certain"
GUESSED: Final = "likely"


def define(module: Module) -> Definitions:
    """What one module defines. Raises RecursionError if it is too deeply nested."""
    found = Definitions()
    _Defining(module, found).walk(module.tree)
    for name, target in module.scopes[module.tree].names.items():
        here = f"{module.name}.{name}"
        if target != here:
            found.aliases[here] = target
    return found


def merged(
    seen: Sequence[tuple[Path, str, Definitions]], modules: frozenset[str]
) -> dict[Path, Definitions]:
    """What the modules of each import root see.

    * `seen`: root, name and definitions of each module.
    * `modules`: the names of the project's own files and folders.

    A root sees its own modules. It also sees those of other roots, unless it has a module of the
    same name: two folders may both hold a ``tasks.py``.
    """
    names: dict[Path, set[str]] = {}
    for root, name, _ in seen:
        names.setdefault(root, set()).add(name)
    found = {root: Definitions(modules=modules) for root in names}
    for home, name, own in seen:
        for root, taken in names.items():
            if root == home or name not in taken:
                found[root].add(own)
    for each in found.values():
        each.find_tasks()
    return found


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


class Walk:
    """Walks through a module, and keeps the scope of the place.

    A subclass has a method for each class XX
    """

    def __init__(self, module: Module) -> None:
        self.module = module

    def step(self, node: ast.AST) -> None:
        """Look at one node, before what is in it."""

    def walk(self, node: ast.AST) -> None:
        """Look at a node, and at everything in it. Decorators and defaults belong outside."""
        self.step(node)
        inner = self.module.scopes.get(node)
        if inner is None or isinstance(node, ast.Module):
            for child in ast.iter_child_nodes(node):
                self.walk(child)
            return
        inside: list[ast.AST] = []
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for name, value in ast.iter_fields(node):
            nodes = [each for each in _listed(value) if isinstance(each, ast.AST)]
            if name == "body" or not named:
                inside += nodes
            else:
                for child in nodes:
                    self.walk(child)
        outer, self.module.scope = self.module.scope, inner
        for child in inside:
            self.walk(child)
        self.module.scope = outer
        self.leave(node)

    def leave(self, node: ast.AST) -> None:
        """A function or class has been walked through."""


class _Defining(Walk):
    """Collects apps, decorated functions, and where settings are."""

    def __init__(self, module: Module, found: Definitions) -> None:
        super().__init__(module)
        self._found = found

    def step(self, node: ast.AST) -> None:
        """Remember apps and variables of other libraries, functions, and settings' modules."""
        if isinstance(node, ast.Assign | ast.AnnAssign):
            self._assigned(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for each in node.decorator_list:
                func = each.func if isinstance(each, ast.Call) else each
                if name := self.module.full_name(func):
                    self._found.decorated.append((name, self.module.own(node.name)))
        elif isinstance(node, ast.Call):
            self._called(node)

    def _assigned(self, node: ast.Assign | ast.AnnAssign) -> None:
        if not isinstance(node.value, ast.Call):
            return
        kind = self.module.full_name(node.value.func)
        for target in targets(node):
            name = self.module.full_name(target)
            if name and kind in APP_CLASSES:
                self._found.apps.add(name)
            elif name and kind:
                self._found.others.add(name)

    def _called(self, node: ast.Call) -> None:
        """Remember what ``config_from_object("proj.conf", namespace="CELERY")`` names."""
        if not isinstance(node.func, ast.Attribute) or node.func.attr != "config_from_object":
            return
        for argument in node.args:
            text = text_of(argument)
            if text is not None:
                self._found.config_objects.add(text.replace(":", "."))
            elif name := self.module.full_name(argument):
                self._found.config_objects.add(name)
        for keyword in node.keywords:
            if keyword.arg == "namespace" and (text := text_of(keyword.value)):
                self._found.namespaces.add(text)


def targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    """What an assignment assigns to."""
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def is_bound(node: ast.expr) -> bool:
    """Whether the decorator has ``bind=True``."""
    return isinstance(node, ast.Call) and any(
        each.arg == "bind" and isinstance(each.value, ast.Constant) and each.value.value is True
        for each in node.keywords
    )


def text_of(node: ast.AST | None) -> str | None:
    """The text of a string literal, else None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None
