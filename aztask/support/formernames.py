"""Modules that were imported under another name in an earlier release, and still can be.

A program that imports the former name gets the module itself, not a copy: its classes are the same
objects, whichever name they were imported by. So pickles, dotted names in a configuration and
``python -m`` keep working as well.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Final

FORMER: Final = {
    "aztask.adaptive": "aztask.leaseadvice",
    "aztask.backend": "aztask.celery.backend",
    "aztask.brokers": "aztask.queues",
    "aztask.canvas": "aztask.workflows",
    "aztask.canvas.limits": "aztask.limits.declaration",
    "aztask.cli": "aztask.operate.cli",
    "aztask.cli.spark": "aztask.spark.cli",
    "aztask.connections": "aztask.stores.connections",
    "aztask.deadletters": "aztask.operate.deadletters",
    "aztask.embedded": "aztask.celery.embedded",
    "aztask.engine": "aztask.queues.engine",
    "aztask.events": "aztask.stores.events",
    "aztask.lease": "aztask.queues.lease",
    "aztask.migration": "aztask.celery.migration",
    "aztask.payloads": "aztask.stores.payloads",
    "aztask.payloads.place": "aztask.address.urls",
    "aztask.results": "aztask.stores.records",
    "aztask.support.hooks": "aztask.hooks",
    "aztask.top": "aztask.operate.top",
    "aztask.transport": "aztask.celery.transport",
}
"""Former names and where the modules are now: a package's modules are in what it is named now, but
for those that are listed themselves."""


def present_name(name: str) -> str | None:
    """What the module of a former name is called today; None for a name that is no former one."""
    parts = name.split(".")
    for count in range(len(parts), 1, -1):
        now = FORMER.get(".".join(parts[:count]))
        if now is not None:
            return ".".join((now, *parts[count:]))
    return None


class FormerNames(MetaPathFinder, Loader):
    """Finds the modules of `FORMER`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec; None for every other name."""
        present = _present(name)
        if present is None:
            return None
        spec = ModuleSpec(name, self, origin=present.origin)
        spec.submodule_search_locations = present.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its name of today."""
        module = import_module(str(present_name(spec.name)))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back: it ran when it was imported under its own name."""
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state

    def get_code(self, name: str) -> CodeType | None:
        """The code of the module, which ``python -m`` runs."""
        spec = _present(name)
        loader = spec.loader if spec is not None else None
        return loader.get_code(spec.name) if spec and isinstance(loader, InspectLoader) else None


def _present(name: str) -> ModuleSpec | None:
    now = present_name(name)
    try:
        return find_spec(now) if now is not None else None
    except ModuleNotFoundError as error:
        if error.name is not None and now is not None and f"{now}.".startswith(f"{error.name}."):
            return None
        raise


def install() -> None:
    """Let this process import the former names. Calling it again changes nothing."""
    if not any(isinstance(each, FormerNames) for each in sys.meta_path):
        # First: the usual finder would load a copy from the folder of the package's new name.
        sys.meta_path.insert(0, FormerNames())
