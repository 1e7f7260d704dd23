"""What an expression of a project is to Celery: an app, a task, a signature, a result ...

Rules
1. An expression is judged by its names and by the assignment of its variable; nothing is computed.
2. In doubt there is no kind: a use that is not certain is not reported.
"""

from __future__ import annotations

from typing import Final

import libcst as cst

from aztask.migration.modules import APP_CLASSES, Definitions, Module

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
