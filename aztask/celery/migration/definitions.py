"""The first look at a project: which apps, tasks and settings its modules define.

Rules: see `aztask.celery.migration.modules`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import libcst as cst

from aztask.celery.migration.modules import APP_CLASSES, Definitions, Module

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
