"""The second look at a project: every use of a part of Celery in one module.

Rules: each use is reported once per line, at the line of the name that is used. See
`aztask.celery.migration.visitor` for what is recognised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import libcst as cst

from aztask.celery.migration.answers import Answer, Use, answers, setting_answer
from aztask.celery.migration.definitions import (
    APP_CLASSES,
    Definitions,
    Module,
    is_bound,
    is_task_decorator,
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
    """The kinds of the expressions of one module."""

    def __init__(self, module: Module, found: Definitions) -> None:
        self._module = module
        self._found = found
        self._variables: dict[str, str] = {}

    def assign(self, name: str | None, kind: str | None) -> None:
        """Remember what a variable is."""
        if name and kind:
            self._variables[name] = kind

    def of(self, node: cst.BaseExpression) -> str | None:
        """The kind of an expression, None if it is nothing of Celery's, or unknown."""
        if isinstance(node, cst.Call):
            return self._of_call(node)
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.BitOr):
            return SIGNATURE if self.of(node.left) == SIGNATURE else None
        if isinstance(node, cst.Name | cst.Attribute):
            known = self._of_name(node)
            if known is None and isinstance(node, cst.Attribute):
                owner = self.of(node.value)
                known = _ATTRIBUTES.get((owner, node.attr.value)) if owner else None
            return known
        return None

    def _of_name(self, node: cst.BaseExpression) -> str | None:
        name = self._module.full_name(node)
        if name is None:
            return None
        if name in self._variables:
            return self._variables[name]
        name = self._found.resolve(name)
        if name in self._found.apps:
            return APP
        if name in self._found.tasks:
            return TASK
        return _GLOBALS.get(name)

    def _of_call(self, node: cst.Call) -> str | None:
        name = self._module.full_name(node.func)
        if name is not None and (made := _MAKERS.get(self._found.resolve(name))):
            return made
        if isinstance(node.func, cst.Attribute):
            owner = self.of(node.func.value)
            return _METHODS.get((owner, node.func.attr.value)) if owner else None
        return None


_APP_OPTIONS: Final = {"broker": "broker_url", "backend": "result_backend"}
_SENDING: Final = frozenset({"apply_async", "send_task"})
_TASK_CLASSES: Final = frozenset({"celery.Task", "celery.app.task.Task"})
_OWN_ATTRIBUTE: Final = (
    "no, because a task has no attributes of its own: keep the value in a variable of the module"
)


class UsesVisitor(cst.CSTVisitor):
    """Collects the uses of one module in `uses`."""

    def __init__(self, module: Module, found: Definitions) -> None:
        self.uses: set[Use] = set()
        self._module = module
        self._found = found
        self._kinds = Kinds(module, found)
        self._referenced: set[str] = set()
        self._imported: dict[str, cst.CSTNode] = {}
        self._is_config = module.name in found.config_objects
        self._inner: set[cst.CSTNode] = set()
        self._depth = 0

    # -- imports and names -------------------------------------------------------------------

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        """Names that are imported and then not used in this module are reported here."""
        if (
            node.module is not None
            and not node.relative
            and not isinstance(node.names, cst.ImportStar)
        ):
            source = self._module.code(node.module)
            for each in node.names:
                self._imported[f"{source}.{self._module.code(each.name)}"] = each
        return False

    def visit_Import(self, node: cst.Import) -> bool:
        """``import celery`` uses nothing yet."""
        return False

    def leave_Module(self, original_node: cst.Module) -> None:
        """Report imported names that nothing in the module refers to."""
        for name, node in self._imported.items():
            if name not in self._referenced:
                self._refer(name, node)

    def visit_Name(self, node: cst.Name) -> None:
        """Report a plain name, such as ``crontab(...)`` or ``chain(...)``."""
        if node not in self._inner and (name := self._module.full_name(node)):
            self._refer(name, node)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        """Report an attribute of something of Celery's, such as ``self.request.retries``."""
        self._inner.add(node.attr)
        kind = self._kinds.of(node.value)
        if kind == CONF:
            self._setting(node.attr.value, node)
        elif kind:
            self._report(answers(kind).get(node.attr.value), node)
        elif node not in self._inner:
            name = self._module.full_name(node)
            if name and self._refer(name, node):
                self._hide(node.value)

    def _refer(self, name: str, node: cst.CSTNode) -> bool:
        """Report a use by its full name; a longer name may refer to a shorter one."""
        name = self._found.resolve(name)
        self._referenced.add(name)
        if not name.startswith("celery."):
            return False
        if name.startswith("celery.signals."):
            answer = answers("signals").get(name.split(".")[2])
            self._referenced.add(".".join(name.split(".")[:3]))
            return self._report(answer, node)
        while name.count(".") >= 1:
            self._referenced.add(name)
            if answer := answers("names").get(name):
                return self._report(answer, node)
            name = name.rpartition(".")[0]
        return False

    def _hide(self, node: cst.BaseExpression) -> None:
        """The names inside an attribute that was reported as a whole are not reported again."""
        while isinstance(node, cst.Attribute):
            self._inner |= {node, node.attr}
            node = node.value
        self._inner.add(node)

    # -- definitions -------------------------------------------------------------------------

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        """Options of a task, and its ``self``."""
        self._depth += 1
        for decorator in node.decorators:
            if is_task_decorator(decorator.decorator, self._module, self._found):
                if isinstance(decorator.decorator, cst.Call):
                    self._task_options(decorator.decorator.args)
                if is_bound(decorator.decorator):
                    self._first_parameter(node)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        """Count the depth: settings of a module stand outside of functions."""
        self._depth -= 1

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        """Classes of tasks, and classes that hold settings."""
        self._depth += 1
        bases = {self._found.resolve(self._module.full_name(b.value) or "") for b in node.bases}
        app_tasks = {f"{app}.Task" for app in self._found.apps}
        for statement in node.body.body:
            if bases & (_TASK_CLASSES | app_tasks):
                if isinstance(statement, cst.FunctionDef):
                    self._first_parameter(statement)
                    self._report(answers(TASK).get(statement.name.value), statement)
                for name, target in assigned(statement):
                    self._report(answers(TASK).get(name), target)
            if self._module.full_name(node) in self._found.config_objects:
                for name, target in assigned(statement):
                    self._setting(name, target)

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        """Count the depth: settings of a module stand outside of classes."""
        self._depth -= 1

    def _first_parameter(self, node: cst.FunctionDef) -> None:
        parameters = [*node.params.posonly_params, *node.params.params]
        if parameters:
            scope = self._module.full_name(node)
            self._kinds.assign(f"{scope}.<locals>.{parameters[0].name.value}", TASK)

    def _task_options(self, args: Sequence[cst.Arg]) -> None:
        for each in args:
            if each.keyword is not None:
                name = each.keyword.value
                answer = answers(TASK).get(name) or Answer(TASK, name, _OWN_ATTRIBUTE)
                self._report(answer, each)

    # -- calls and settings ------------------------------------------------------------------

    def visit_Arg(self, node: cst.Arg) -> None:
        """A keyword is not a name that is used."""
        if node.keyword is not None:
            self._inner.add(node.keyword)

    def visit_Call(self, node: cst.Call) -> None:
        """Options of apps, sends and signatures, and settings that a call gives."""
        name = self._found.resolve(self._module.full_name(node.func) or "")
        if name in APP_CLASSES:
            self._settings_of(node.args, _APP_OPTIONS)
        if not isinstance(node.func, cst.Attribute):
            return
        method, owner = node.func.attr.value, self._kinds.of(node.func.value)
        sets_options = owner == SIGNATURE and method == "set"
        if method in _SENDING or sets_options:
            for each in node.args:
                if each.keyword is not None:
                    self._report(answers("send").get(each.keyword.value), each)
        elif owner == CONF and method in ("update", "setdefault"):
            self._settings_of(node.args, {})
        elif owner == APP and method in ("config_from_object", "add_defaults"):
            self._settings_of(node.args, {}, dicts_only=True)
        elif owner == CONTROL and method == "broadcast" and node.args:
            self._report(answers(CONTROL).get(text_of(node.args[0].value) or ""), node)

    def visit_Assign(self, node: cst.Assign) -> None:
        """Variables of a kind, ``app.conf["timezone"] = ...``, and settings of a module."""
        kind = self._kinds.of(node.value)
        for each in node.targets:
            target = each.target
            if isinstance(target, cst.Name):
                self._kinds.assign(self._module.full_name(target), kind)
                if not self._depth:
                    self._module_setting(target.value, target)
            elif isinstance(target, cst.Subscript) and self._kinds.of(target.value) == CONF:
                index = target.slice[0].slice
                if isinstance(index, cst.Index):
                    self._setting(text_of(index.value) or "", target)
            elif self._kinds.of(target) == CONF:
                self._dict_settings(node.value)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        """``result_expires: int = 60`` in a module of settings."""
        if isinstance(node.target, cst.Name) and not self._depth:
            self._module_setting(node.target.value, node.target)

    def _module_setting(self, name: str, node: cst.CSTNode) -> None:
        """A variable of a module is a setting by its module, its prefix or its old name."""
        for namespace in self._found.namespaces:
            prefix = f"{namespace}_"
            if name.startswith(prefix) and (answer := setting_answer(name[len(prefix) :])):
                self._report(answer, node)
                return
        if self._is_config or name.startswith("CELERY"):
            self._setting(name, node)

    def _settings_of(
        self, args: Sequence[cst.Arg], other_names: dict[str, str], *, dicts_only: bool = False
    ) -> None:
        for each in args:
            if each.keyword is None:
                self._dict_settings(each.value)
            elif not dicts_only:
                name = each.keyword.value
                self._setting(other_names.get(name, name), each)

    def _dict_settings(self, node: cst.BaseExpression) -> None:
        if isinstance(node, cst.Dict):
            for each in node.elements:
                if isinstance(each, cst.DictElement):
                    self._setting(text_of(each.key) or "", each.key)

    def _setting(self, name: str, node: cst.CSTNode) -> None:
        self._report(setting_answer(name), node)

    def _report(self, answer: Answer | None, node: cst.CSTNode) -> bool:
        if answer is not None:
            self.uses.add(Use.of(self._module.shown, self._module.line(node), answer))
        return answer is not None


def assigned(statement: cst.BaseStatement | cst.BaseSmallStatement) -> list[tuple[str, cst.Name]]:
    """The names that one line of a class or module assigns."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return []
    targets: list[cst.BaseExpression] = []
    for part in statement.body:
        if isinstance(part, cst.Assign):
            targets += [each.target for each in part.targets]
        elif isinstance(part, cst.AnnAssign):
            targets.append(part.target)
    return [(target.value, target) for target in targets if isinstance(target, cst.Name)]
