"""Find the App that ``-A module:app`` names."""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

from aztask.app.app import App
from aztask.errors import AztaskError, ConfigurationError, did_you_mean
from aztask.support.display import safe_str

REASON_CHARACTERS = 1_000

PROGRAM = (
    " That is the name of the program that runs, in each process another one. Put an app that a "
    "program or a notebook defines into a module of its own, which a worker can import."
)

CELERY = (
    ": aztask queues, result, dlq, schedule and doctor work with a Celery app; its tasks are "
    "run by celery worker, or name an App"
)
"""What to do with a Celery application that a command does not understand."""

_OTHERS = (str(Path(__file__).parents[1]), str(Path(os.__file__).parent), "<frozen ")
"""How the files of aztask, of Python, and of its import system begin."""

_SPEC = re.compile(r"[A-Za-z_][\w.]*(:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)?\Z")


class AppNotLoaded(ConfigurationError):
    """There is no app of that name, or its module cannot be imported."""


def load_app(spec: str) -> App:
    """Import ``module:attribute`` and return the App there; the attribute is ``app`` by default.

    The modules that the app includes are imported too. Raises what `find_object` raises.
    """
    found = find_object(spec)
    if not isinstance(found, App):
        kind = type(found).__name__
        hint = CELERY if is_celery(found) else "; name the App object"
        raise AppNotLoaded(f"{spec!r} is a {kind}, not an aztask.App{hint}")
    for name in found.include:
        try:
            _imported(name)
        except ConfigurationError as error:
            error.args = (f"include of app {found.name!r}: {error}",)
            raise
    return found


def is_celery(found: object) -> bool:
    """Whether an object is a Celery application. Celery is not imported: its module has done so."""
    module = sys.modules.get("celery.app.base")
    return module is not None and isinstance(found, module.Celery)


def find_object(spec: str) -> object:
    """Import ``module:attribute`` and return what is there; the attribute is ``app`` by default.

    Modules in the working directory can be imported.

    Raises the ConfigurationError that a setting in the module raised, with the file and line added
    to its text. Anything else that the module raises during its import, SystemExit included,
    becomes one AppNotLoaded that names the cause.
    """
    if module_of := _file_hint(spec):
        raise AppNotLoaded(f"{spec!r} names a file, not a module; write {module_of}")
    if not _SPEC.match(spec):
        raise AppNotLoaded(
            f"{spec!r} does not name an app; write module:attribute, for example shop.tasks:app"
        )
    module_name, _, attribute = spec.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: object = _imported(module_name)
    for name in (attribute or "app").split("."):
        if not hasattr(found, name):
            apps = [key for key, value in vars(found).items() if isinstance(value, App)]
            hint = did_you_mean(name, apps) or (
                f" It has: {', '.join(apps)}."
                if apps
                else PROGRAM
                if module_name == "__main__"
                else " It holds no App: name the module that makes one."
            )
            raise AppNotLoaded(f"module {module_name!r} has no {name!r}.{hint}")
        found = getattr(found, name)
    return found


def _imported(name: str) -> ModuleType:
    """The module. Raises ConfigurationError, whatever the module raises."""
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except ConfigurationError as error:
        error.args = (f"{error}{_place(error)}",)  # of the same class: it decides the exit code
        raise
    except BaseException as error:
        raise AppNotLoaded(_import_failure(name, error)) from error


def _file_hint(spec: str) -> str:
    """``module:attribute`` for a spec that names a file, such as ``shop.py:app``; else ""."""
    path, _, attribute = spec.partition(":")
    parts = path.removesuffix(".py").removeprefix("./").replace("\\", "/").split("/")
    if not path.endswith(".py") or not all(part.isidentifier() for part in parts):
        return ""
    return f"{'.'.join(parts)}:{attribute or 'app'}"


def _import_failure(module: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name in (
        module,
        module.split(".", maxsplit=1)[0],
    ):
        parent, _, attribute = module.rpartition(".")
        if parent in sys.modules and hasattr(sys.modules[parent], attribute):
            return f"{module!r} is not a module; write {parent}:{attribute}"
        return f"there is no module {module!r}; run aztask where it can be imported"
    if isinstance(error, SystemExit):
        return f"module {module!r} exits while it is imported (status {error.code}); guard main()"
    text = safe_str(error, REASON_CHARACTERS)
    if isinstance(error, AztaskError):  # it says what to do, such as DuplicateTask
        return f"{text}{_place(error)}"
    return f"module {module!r} cannot be imported{_place(error)}: {type(error).__name__}: {text}"


def _place(error: BaseException) -> str:
    """Where the import failed: its last line in the user's own code; "" if that is not known."""
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if not each.filename.startswith(_OTHERS) and "site-packages" not in each.filename
    ]
    if isinstance(error, SyntaxError) or not frames:  # its text says where
        return ""
    return f" ({frames[-1].filename}, line {frames[-1].lineno})"
