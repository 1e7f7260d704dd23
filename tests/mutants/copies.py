"""Copies of the tree, in which mutants are written: whatever imports the package there gets them.

An import hook would not do. pytest puts a hook of its own before all others, which loads every
module of a distribution that has a plugin of pytest, as this one does, from its file; and a process
that a test starts knows no hook at all.

A changed module ends with a line that names its mutant. `proof` reads that name back from the
module that the tests have imported, so a run cannot pass because its mutants were never loaded.
"""

from __future__ import annotations

import compileall
import hashlib
import os
import shutil
import sys
from pathlib import Path
from py_compile import PycInvalidationMode

from .making import Mutant

ROOT = Path(__file__).parents[2]
ASIDE = shutil.ignore_patterns(
    *("__pycache__", ".*", "build", "dist", "node_modules", "*.egg-info", "installed", "_build")
)
MARK = "__mutant__"


class Copy:
    """The tree in `folder`, for one process at a time. `broken`: the module that is changed now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._changes = 0
        self._broken: Path | None = None

    @classmethod
    def of_tree(cls, folder: Path) -> Copy:
        """Copy the whole tree; its modules are compiled once, by their content."""
        shutil.copytree(ROOT, folder, ignore=ASIDE, symlinks=True)
        compileall.compile_dir(
            folder / "aztask", quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH
        )
        return cls(folder)

    def another(self, folder: Path) -> Copy:
        """The same again, for a second process."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Copy(folder)

    def put(self, mutant: Mutant) -> None:
        """Write a mutant; the one before it is taken back.

        The file gets a time of its own: pytest keeps the modules that it compiles by time and size.
        """
        self.restore()
        path = self.folder / mutant.source.relative
        self._broken = path
        self._changes += 1
        path.write_text(f"{mutant.code}\n{MARK} = {token(mutant)!r}\n", encoding="utf-8")
        os.utime(path, (1e9 + self._changes, 1e9 + self._changes))

    def restore(self) -> None:
        """Take the change back."""
        if self._broken is not None:
            shutil.copy2(ROOT / self._broken.relative_to(self.folder), self._broken)
            self._broken = None

    def enter(self) -> None:
        """Called in a forked process: import from here alone, and so do the processes it starts."""
        os.chdir(self.folder)
        aside = {"", str(ROOT)}
        sys.path[:] = [str(self.folder), *(each for each in sys.path if each not in aside)]
        os.environ["PYTHONPATH"] = str(self.folder)
        for name in list(sys.modules):
            if name.partition(".")[0] in ("aztask", "tests"):
                del sys.modules[name]


def token(mutant: Mutant) -> str:
    """A name for the changed source."""
    return hashlib.sha256(mutant.code.encode()).hexdigest()[:16]


def proof(mutant: Mutant) -> bool | None:
    """Whether the module that this process has imported is the mutant; None if it has none."""
    module = sys.modules.get(mutant.source.name)
    return None if module is None else getattr(module, MARK, None) == token(mutant)
