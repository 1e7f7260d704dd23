"""Modules that were imported under another name in an earlier release, and still can be.

A program that imports the former name gets the module itself, not a copy: its classes are the same
objects, whichever name they were imported by.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

FORMER: Final = {
    "aztask.deadletters": "aztask.operate.deadletters",
    "aztask.deadletters.view": "aztask.operate.deadletters.view",
}
"""Names that documentation named, and where the module is now."""


class FormerNames(MetaPathFinder, Loader):
    """Finds the modules of `FORMER`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec; None for every other name."""
        return ModuleSpec(name, self) if name in FORMER else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its name of today."""
        module = import_module(FORMER[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back: it ran when it was imported under its own name."""
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state


def install() -> None:
    """Let this process import the former names. Calling it again changes nothing."""
    if not any(isinstance(each, FormerNames) for each in sys.meta_path):
        # First: the usual finder would load a copy from the folder of the package's new name.
        sys.meta_path.insert(0, FormerNames())
