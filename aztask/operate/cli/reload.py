"""``aztask worker --reload``: restart the worker when a source file of the app changes.

Watched are the files of the modules that the worker has imported from under the working directory.
After a change the worker drains as it does at SIGTERM, then replaces itself by a new process of the
same command. If a changed file does not compile, the worker logs that and keeps running.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from types import ModuleType

from aztask.errors import ConfigurationError
from aztask.support.late import install_command
from aztask.support.parts import Part

logger = logging.getLogger(__name__)

LIBRARY = "watchfiles"
RETRY_SECONDS = 10.0


class Reloader:
    """Calls `changed` once, on its own thread, after a source file has changed.

    due: whether that has happened.
    """

    def __init__(self, root: Path, changed: Callable[[], None]) -> None:
        """root: files elsewhere, such as installed libraries, are not watched."""
        self.due = False
        self._failing = False
        self._root = root.resolve()
        self._changed = changed
        self._stopping = threading.Event()
        self.part = Part("reload")
        self._thread = self.part.thread(self._run, "aztask-reload")

    def start(self) -> None:
        """Watch from now on. Call this when the app has been imported."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; returns when the thread has ended."""
        self._stopping.set()
        self.part.stop()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        sources = source_files(self._root, list(sys.modules.values()))
        if not sources:
            logger.warning("--reload watches nothing: no module came from under %s", self._root)
            return
        while not self._tried(sources) and not self._stopping.wait(RETRY_SECONDS):
            pass

    def _tried(self, sources: Set[Path]) -> bool:
        """Watch until there is nothing more to watch for; False if files cannot be watched now."""
        try:
            self._watch(sources)
        except OSError as error:  # such as the limit of inotify
            self.part.trouble(error)
            if not self._failing:
                self._failing = True
                logger.error(
                    "--reload cannot watch files, changes do not restart the worker; it is tried "
                    "again every %g s: %s",
                    RETRY_SECONDS,
                    error,
                )
            return False
        return True

    def _watch(self, sources: Set[Path]) -> None:
        for paths in self._changes(sources):
            if compiling := [path for path in sorted(paths) if compiles(path)]:
                logger.info("%s changed: the worker restarts", compiling[0].name)
                self.due = True
                self._changed()
                return

    def _changes(self, sources: Set[Path]) -> Iterator[set[Path]]:
        """The watched files that changed, each time that some have."""
        library = importlib.import_module(LIBRARY)  # an extra: `require_library` has found it
        # The folders are watched, not the files: most editors save by replacing a file.
        for events in library.watch(
            *sorted({path.parent for path in sources}),
            watch_filter=lambda _, name: Path(name) in sources,
            stop_event=self._stopping,
            raise_interrupt=False,
            recursive=False,
        ):
            yield {Path(name) for _, name in events}


def require_library() -> None:
    """Raise ConfigurationError unless the library that watches files is installed."""
    if importlib.util.find_spec(LIBRARY) is None:
        raise ConfigurationError(f"--reload needs {LIBRARY}: {install_command('reload')}")


def source_files(root: Path, modules: Iterable[ModuleType]) -> set[Path]:
    """The source files under `root` of these modules."""
    found = set()
    for module in modules:
        name = getattr(module, "__file__", None)
        if isinstance(name, str) and name.endswith(".py"):
            path = Path(name)
            if path.is_relative_to(root):
                found.add(path)
    return found


def compiles(path: Path) -> bool:
    """Whether the file can be read and is valid Python; if it is not valid, that is logged."""
    try:
        compile(path.read_bytes(), str(path), "exec")
    except OSError:
        return False  # it is being replaced: another change follows
    except (SyntaxError, ValueError) as error:
        logger.warning(
            "%s does not compile, the worker keeps running without the change: %s", path.name, error
        )
        return False
    return True
