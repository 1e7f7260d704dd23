"""``aztask worker --reload``: start anew when a source file of the app changes.

Watched are the files of loaded modules under the working directory, by modification time, about
twice a second. A file that does not compile is waited for: the worker goes on with what it has.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5


class Reloader:
    """Calls `changed` once, on its own thread, when something changed. `due`: whether it did."""

    def __init__(self, root: Path, changed: Callable[[], None]) -> None:
        self.due = False
        self._root = root.resolve()
        self._changed = changed
        self._seen: dict[Path, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aztask-reload", daemon=True)

    def start(self) -> None:
        """Remember how the files are now, and watch."""
        self.look()
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopping.set()

    def look(self) -> list[Path]:
        """The files that changed since the last look and compile; new ones are only noted."""
        changed = []
        for path in source_files(self._root, list(sys.modules.values())):
            try:
                modified = path.stat().st_mtime
            except OSError:
                continue  # being replaced: the next look finds it
            if modified == self._seen.get(path, modified):
                self._seen[path] = modified
            elif _compiles(path):
                self._seen[path] = modified
                changed.append(path)
        return changed

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            if changed := self.look():
                logger.info("%s changed: starting anew", changed[0].name)
                self.due = True
                self._changed()
                return


def source_files(root: Path, modules: list[ModuleType]) -> list[Path]:
    """The source files under `root` of these modules."""
    found = []
    for module in modules:
        name = getattr(module, "__file__", None)
        if isinstance(name, str) and name.endswith(".py"):
            path = Path(name)
            if path.is_relative_to(root):
                found.append(path)
    return found


def _compiles(path: Path) -> bool:
    try:
        compile(path.read_bytes(), str(path), "exec")
    except OSError:
        return False
    except (SyntaxError, ValueError) as error:
        logger.warning("%s does not compile: %s", path.name, error)
        return False
    return True
