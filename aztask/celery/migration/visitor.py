"""The second look at a project: every use of a part of Celery in one module.

Rules: each use is reported once per line, at the line of the name that is used. See
`aztask.celery.migration.visitor` for what is recognised.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from aztask.celery.migration.answers import NAMES, Answer, Use, answers, setting_answer
from aztask.celery.migration.definitions import (
    APP_CLASSES,
    CERTAIN,
    GUESSED,
    Definitions,
    Module,
    Walk,
    is_bound,
    parameters,
    targets,
    text_of,
)

# -- what an expression of a project is to Celery: an app, a task, a signature, a result ---
#
# Rules
# 1. An expression is judged by its names and by the assignment of its variable; nothing is
#    computed.
# 2. In doubt there is no kind: a use that is not certain is not reported.


APP: Final = "app"
TASK: Final = "task"
REQUEST: Final = "request"
SIGNATURE: Final = "signature"
RESULT: Final = "result"
CONTROL: Final = "control"
CONF: Final = "settings"

_GLOBALS: Final = {
    "celery.current_app": APP,
    "celery.current_task": TASK,
    "celery.app.current_task": TASK,
}
_MAKERS: Final = {
    **dict.fromkeys(APP_CLASSES, APP),
    "celery.result.AsyncResult": RESULT,
    "celery.result.GroupResult": RESULT,
    "celery.app.control.Control": CONTROL,
    "celery.app.control.Inspect": CONTROL,
    **{
        f"{home}.{name}": SIGNATURE
        for home in ("celery", "celery.canvas")
        for name in ("chain", "group", "chord", "signature", "subtask", "maybe_signature")
    },
}
_ATTRIBUTES: Final = {
    (APP, "conf"): CONF,
    (APP, "control"): CONTROL,
    (APP, "current_task"): TASK,
    (TASK, "request"): REQUEST,
    (TASK, "app"): APP,
}
_METHODS: Final = {
    **{(TASK, name): SIGNATURE for name in ("s", "si", "signature", "subtask")},
    **{(TASK, name): SIGNATURE for name in ("chunks", "map", "starmap")},
    **{(SIGNATURE, name): SIGNATURE for name in ("set", "clone", "link", "link_error", "on_error")},
    **{(kind, name): RESULT for kind in (TASK, SIGNATURE) for name in ("delay", "apply_async")},
    (APP, "AsyncResult"): RESULT,
    (TASK, "AsyncResult"): RESULT,
    (APP, "send_task"): RESULT,
    (APP, "signature"): SIGNATURE,
    (CONTROL, "inspect"): CONTROL,
}


class Kinds:
    """The kinds of the expressions of one module. sure: whether the last one asked for is certain.

    `Definitions.guessed` tells which tasks are not.
    """

    def __init__(self, module: Module, found: Definitions) -> None:
        self._module = module
        self._found = found
        self._variables: dict[str, str] = {}
        self.sure = CERTAIN

    def assign(self, name: str | None, kind: str | None) -> None:
        """Remember what a variable is."""
        if name and kind:
            self._variables[name] = kind

    def of(self, node: ast.AST | None) -> str | None:
        """The kind of an expression, None if it is nothing of Celery's, or unknown."""
        self.sure = CERTAIN
        return self._of(node)

    def _of(self, node: ast.AST | None) -> str | None:
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return SIGNATURE if self._of(node.left) == SIGNATURE else None
        if isinstance(node, ast.Name | ast.Attribute):
            known = self._of_name(node)
            if known is None and isinstance(node, ast.Attribute):
                owner = self._of(node.value)
                known = _ATTRIBUTES.get((owner, node.attr)) if owner else None
            return known
        return None

    def _of_name(self, node: ast.Name | ast.Attribute) -> str | None:
        name = self._module.full_name(node)
        if name is None:
            return None
        if name in self._variables:
            return self._variables[name]
        name = self._found.resolve(name)
        if name in self._found.apps:
            return APP
        if name in self._found.tasks:
            if name in self._found.guessed:
                self.sure = GUESSED
            return TASK
        return _GLOBALS.get(name)

    def _of_call(self, node: ast.Call) -> str | None:
        name = self._module.full_name(node.func)
        if name is not None and (made := _MAKERS.get(self._found.resolve(name))):
            return made
        if isinstance(node.func, ast.Attribute):
            owner = self._of(node.func.value)
            return _METHODS.get((owner, node.func.attr)) if owner else None
        return None


_APP_OPTIONS: Final = {"broker": "broker_url", "backend": "result_backend"}
_SENDING: Final = frozenset({"apply_async", "send_task"})
_TASK_CLASSES: Final = frozenset({"celery.Task", "celery.app.task.Task"})
_OWN_ATTRIBUTE: Final = (
    "no, because a task has no attributes of its own: keep the value in a variable of the module"
)
UNKNOWN: Final = "unknown"
_UNKNOWN_TEXT: Final = (
    "no, because it is not in the table of what aztask has instead: look it up in its own "
    "documentation, and decide"
)
_PACKAGES: Final = frozenset({"celery", "kombu", "billiard", "vine", "amqp"})
"""Packages of which every name is listed, known or not; those of `_PLUGINS`, too."""

_PLUGINS: Final = re.compile(r"(django_celery_\w+|djcelery|celery_\w+|\w*redbeat|celerybeat\w*)\Z")
_IN_TEXT: Final = re.compile(r"[a-z_]+(\.\w+)+(:\w+)?\Z|django_celery_\w+\Z|djcelery\Z")
"""A text that names a module, such as an entry of INSTALLED_APPS or a class of a setting."""


class UsesVisitor(Walk):
    """Collects the uses of one module in `uses`."""

    def __init__(self, module: Module, found: Definitions) -> None:
        super().__init__(module)
        self.uses: set[Use] = set()
        self._found = found
        self._kinds = Kinds(module, found)
        self._referenced: set[str] = set()
        self._imported: dict[str, ast.AST] = {}
        self._is_config = module.name in found.config_objects
        self._inner: set[ast.AST] = set()
        self._depth = 0
        self._steps: dict[type[ast.AST], Callable[[Any], None]] = {
            ast.ImportFrom: self._import_from,
            ast.Import: self._import,
            ast.Name: self._name,
            ast.Attribute: self._attribute,
            ast.FunctionDef: self._function,
            ast.AsyncFunctionDef: self._function,
            ast.ClassDef: self._class,
            ast.Call: self._call,
            ast.Assign: self._assign,
            ast.AnnAssign: self._assign,
            ast.Constant: self._constant,
        }

    def step(self, node: ast.AST) -> None:
        """Report what this node uses."""
        step = self._steps.get(type(node))
        if step is not None:
            step(node)

    def leave(self, node: ast.AST) -> None:
        """Count the depth: settings of a module stand outside of functions and classes."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._depth -= 1

    # -- imports and names -------------------------------------------------------------------

    def _import_from(self, node: ast.ImportFrom) -> None:
        """Names that are imported and then not used in this module are reported in the end."""
        if node.module is not None and not node.level:
            for each in node.names:
                if each.name == "*":
                    self._refer(f"{node.module}.*", each)
                else:
                    self._imported.setdefault(f"{node.module}.{each.name}", each)

    def _import(self, node: ast.Import) -> None:
        """``import celery`` uses nothing yet; ``import celery.platforms`` names a module."""
        for each in node.names:
            if "." in each.name:
                self._imported.setdefault(each.name, each)

    def finish(self) -> None:
        """Report imported names that nothing in the module refers to."""
        for name, node in self._imported.items():
            if not any(each == name or each.startswith(f"{name}.") for each in self._referenced):
                self._refer(name, node)

    def _name(self, node: ast.Name) -> None:
        """Report a plain name, such as ``crontab(...)`` or ``chain(...)``."""
        if node not in self._inner and (name := self.module.full_name(node)):
            self._refer(name, node)

    def _attribute(self, node: ast.Attribute) -> None:
        """Report an attribute of something of Celery's, such as ``self.request.retries``."""
        kind, sure = self._kinds.of(node.value), self._kinds.sure
        if kind == CONF:
            self._setting(node.attr, node)
        elif kind:
            self._report(answers(kind).get(node.attr), node, sure)
        elif node not in self._inner:
            name = self.module.full_name(node)
            if name and self._refer(name, node):
                self._hide(node.value)

    def _constant(self, node: ast.Constant) -> None:
        """Report a text that names a module or class: ``"django_celery_beat"`` in a setting."""
        if isinstance(node.value, str) and len(node.value) < 200 and _IN_TEXT.match(node.value):
            name = node.value.replace(":", ".")
            answer = _answer(name)
            if (answer is not None and "." in answer.name) or self._of_plugin(name):
                self._refer(name, node, GUESSED)

    def _refer(self, name: str, node: ast.AST, sure: str = CERTAIN) -> bool:
        """Report a use by its full name; a longer name may refer to a shorter one."""
        name = self._found.resolve(name)
        self._referenced.add(name)
        package = name.partition(".")[0]
        if package not in _PACKAGES and not self._of_plugin(name):
            return False
        if name.startswith("celery.signals."):
            answer = answers("signals").get(name.split(".")[2])
            self._referenced.add(".".join(name.split(".")[:3]))
            if answer is not None:
                return self._report(answer, node, sure)
        if (answer := _answer(name)) is not None:
            self._referenced.add(answer.name)
            return self._report(answer, node, sure)
        if name in _PACKAGES:
            return False  # what is used of it comes behind a dot
        return self._report(Answer(NAMES, name, _UNKNOWN_TEXT), node, UNKNOWN)

    def _of_plugin(self, name: str) -> bool:
        """Whether a name belongs to a package that extends Celery, and not to the project."""
        package = name.partition(".")[0]
        return _PLUGINS.match(package) is not None and package not in self._found.modules

    def _hide(self, node: ast.AST) -> None:
        """The names inside an attribute that was reported as a whole are not reported again."""
        while isinstance(node, ast.Attribute):
            self._inner.add(node)
            node = node.value
        self._inner.add(node)

    # -- definitions -------------------------------------------------------------------------

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Options of a task, and its ``self``."""
        self._depth += 1
        for each in node.decorator_list:
            func = each.func if isinstance(each, ast.Call) else each
            sure = self._found.makes_task(self.module.full_name(func))
            if sure:
                if isinstance(each, ast.Call):
                    self._task_options(each.keywords, sure)
                if is_bound(each):
                    self._first_parameter(node)

    def _class(self, node: ast.ClassDef) -> None:
        """Classes of tasks, and classes that hold settings."""
        self._depth += 1
        bases = {self._found.resolve(self.module.full_name(each) or "") for each in node.bases}
        name = self.module.own(node.name)
        is_task = bases & (_TASK_CLASSES | {f"{app}.Task" for app in self._found.apps})
        for statement in node.body:
            if is_task:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    self._first_parameter(statement, name)
                    self._report(answers(TASK).get(statement.name), statement)
                for each in assigned(statement):
                    self._report(answers(TASK).get(each.id), each)
            if name in self._found.config_objects:
                for each in assigned(statement):
                    self._setting(each.id, each)

    def _first_parameter(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, within: str | None = None
    ) -> None:
        if names := parameters(node):
            prefix = within or self.module.scope.prefix
            self._kinds.assign(f"{prefix}.{node.name}.<locals>.{names[0]}", TASK)

    def _task_options(self, options: Sequence[ast.keyword], sure: str) -> None:
        for each in options:
            if each.arg is not None:
                answer = answers(TASK).get(each.arg) or Answer(TASK, each.arg, _OWN_ATTRIBUTE)
                self._report(answer, each, sure)

    # -- calls and settings ------------------------------------------------------------------

    def _call(self, node: ast.Call) -> None:
        """Options of apps, sends and signatures, and settings that a call gives."""
        name = self._found.resolve(self.module.full_name(node.func) or "")
        if name in APP_CLASSES:
            self._settings_of(node, _APP_OPTIONS)
        if not isinstance(node.func, ast.Attribute):
            return
        method, owner = node.func.attr, self._kinds.of(node.func.value)
        sure = self._kinds.sure if owner else GUESSED
        if method in _SENDING or (owner == SIGNATURE and method == "set"):
            for each in node.keywords:
                self._report(answers("send").get(each.arg or ""), each, sure)
        elif owner == CONF and method in ("update", "setdefault"):
            self._settings_of(node, {})
        elif owner == APP and method in ("config_from_object", "add_defaults"):
            self._settings_of(node, {}, dicts_only=True)
        elif owner == CONTROL and method == "broadcast" and node.args:
            self._report(answers(CONTROL).get(text_of(node.args[0]) or ""), node)

    def _assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        """Variables of a kind, ``app.conf["timezone"] = ...``, and settings of a module."""
        kind = self._kinds.of(node.value)
        for target in targets(node):
            if isinstance(target, ast.Name):
                self._kinds.assign(self.module.full_name(target), kind)
                if not self._depth:
                    self._module_setting(target.id, target)
            elif isinstance(target, ast.Subscript) and self._kinds.of(target.value) == CONF:
                self._setting(text_of(target.slice) or "", target)
            elif self._kinds.of(target) == CONF:
                self._dict_settings(node.value)

    def _module_setting(self, name: str, node: ast.AST) -> None:
        """A variable of a module is a setting by its module, its prefix or its old name."""
        for namespace in self._found.namespaces:
            prefix = f"{namespace}_"
            if name.startswith(prefix) and (answer := setting_answer(name[len(prefix) :])):
                self._report(answer, node, GUESSED)
                return
        if self._is_config:
            self._setting(name, node)
        elif name.startswith("CELERY"):
            self._report(setting_answer(name), node, GUESSED)

    def _settings_of(
        self, node: ast.Call, other_names: dict[str, str], *, dicts_only: bool = False
    ) -> None:
        for value in node.args:
            self._dict_settings(value)
        for each in node.keywords:
            if each.arg is None:
                self._dict_settings(each.value)
            elif not dicts_only:
                self._setting(other_names.get(each.arg, each.arg), each)

    def _dict_settings(self, node: ast.AST | None) -> None:
        if isinstance(node, ast.Dict):
            for key in node.keys:
                if key is not None:
                    self._setting(text_of(key) or "", key)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict":
            self._settings_of(node, {})

    def _setting(self, name: str, node: ast.AST) -> None:
        self._report(setting_answer(name), node)

    def _report(self, answer: Answer | None, node: ast.AST, sure: str = CERTAIN) -> bool:
        if answer is not None:
            line = getattr(node, "lineno", 1)
            self.uses.add(Use.of(self.module.shown, line, answer, sure))
        return answer is not None


def _answer(name: str) -> Answer | None:
    """The answer for the longest beginning of a full name that has one."""
    known = answers(NAMES)
    while name:
        if name in known:
            return known[name]
        name = name.rpartition(".")[0]
    return None


def assigned(statement: ast.stmt) -> list[ast.Name]:
    """The names that one line of a class or module assigns."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return []
    return [each for each in targets(statement) if isinstance(each, ast.Name)]
