"""The names under which an app registers its tasks.

Rules
1. A task is named "APP.FUNCTION", or as ``name=`` says. Nothing else plays a part: messages carry
   the name, and every program that sends or runs the task must arrive at the same one.
2. So a second function of the same name is an error. If aztask added the module to the second name,
   the names would depend on the order of imports; and a program that imports only one of the two
   modules would still use the short name, for a task that workers know under another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aztask.errors import ConfigurationError, DuplicateTask
from aztask.support.checks import shown


def task_name(app: str, function: object, given: str | None) -> str:
    """The name of a task. Raises ConfigurationError if `function` is none, or has no name.

    * `given`: the option ``name``, or None.
    """
    if not callable(function):
        hint = ""
        if isinstance(function, str):
            hint = f"; options need their names, for example @app.task(name={function!r})"
        raise ConfigurationError(f"a task is a function, not {shown(function)}{hint}")
    own = getattr(function, "__name__", None)
    if given is None and own is None:
        raise ConfigurationError(
            f"{shown(function)} has no name of its own; write app.task(name=...)"
        )
    return given or f"{app}.{own}"


def refuse_second(
    app: str, name: str, earlier: Callable[..., Any], function: Callable[..., Any]
) -> None:
    """Raise DuplicateTask: both functions would be registered as `name`."""
    first, second = _module(earlier), _module(function)
    if _place(function) is not None and _place(function) == _place(earlier) and first != second:
        raise DuplicateTask(
            f"task {name!r} is registered twice, because its file is imported twice: as module "
            f"{first} and as {second}; import it under one name, and start programs from a file "
            "that defines no tasks"
        )
    proposal = f"{app}.{second}.{getattr(function, '__name__', name)}"
    raise DuplicateTask(
        f"two functions are registered as {name!r}: {_full_name(earlier)} and "
        f"{_full_name(function)}; give one of them a name, for example "
        f"@app.task(name={proposal!r})"
    )


def _module(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__module__", None) or "?")


def _full_name(function: Callable[..., Any]) -> str:
    return f"{_module(function)}.{getattr(function, '__qualname__', repr(function))}"


def _place(function: Callable[..., Any]) -> tuple[str, int] | None:
    """The file and line of the function's source; None if it was not written in Python."""
    code = getattr(function, "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)
