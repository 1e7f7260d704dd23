"""The daemon that forks Spark's Python workers on this machine, made faster.

Rules
1. Workers import the driver's PySpark, not Spark's archive of it. Spark puts that archive at the
   front of their path, and every worker would compile what it imports from it [measured with
   Spark 4.3: 1.0 s, 0.2 s from compiled files]. A session of our own names this module as
   ``spark.python.daemon.module``, as Spark's own tests do to measure coverage.
2. The daemon imports what all workers need before it forks them. Spark's daemon does not, because
   pandas and Arrow start threads, and no thread may run at a fork. Only two of their parts do, and
   both can be switched off: Spark itself sets ``OMP_NUM_THREADS``, and Arrow's second allocator
   obeys `NO_ARROW_THREAD`. This saves 0.4 s of every worker and 40 ms of every task, whose garbage
   collection went through all of it, and 0.3 s of every worker that sends, for aztask's sender and
   Kombu [measured]. If a thread runs all the same, the daemon starts over without the imports.
3. The archives are removed from the import system's caches too. At its first task a worker
   refreshes them, and would read each archive completely though it imports nothing from it [40 ms].
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

ARCHIVE: Final = re.compile(r"/(?:pyspark\.zip|py4j-[^/]*-src\.zip|spark-core_[^/]*\.jar)$")
"""What Spark adds to its workers' path: PySpark, its bridge to Java, and Spark's own classes."""
DAEMON: Final = "pyspark.daemon"
SHARED: Final = ("pyspark.worker", "pyarrow", "pandas", "aztask.spark.submission.send")
NO_ARROW_THREAD: Final = ("JE_ARROW_MALLOC_CONF", "background_thread:false")
ALONE: Final = "--alone"
"""The argument with which this program starts over, to import nothing."""
THREADS: Final = Path("/proc/self/task")


def without_archives(path: Sequence[str]) -> list[str]:
    """The path without Spark's archives, if PySpark and its bridge are elsewhere on it too."""
    rest = [entry for entry in path if not ARCHIVE.search(entry)]
    found = all(PathFinder.find_spec(name, rest) for name in ("pyspark", "py4j"))
    return rest if found else list(path)


def leave_archives() -> None:
    """Remove Spark's archives from ``sys.path`` and from the import system's cache of it."""
    before = list(sys.path)
    sys.path[:] = without_archives(before)
    for each in set(before).difference(sys.path):
        sys.path_importer_cache.pop(each, None)


def share() -> None:
    """Import what all workers need. A failed import is skipped here: the worker reports it."""
    os.environ.setdefault(*NO_ARROW_THREAD)
    for name in SHARED:
        with suppress(Exception):
            import_module(name)
    gc.freeze()


def main() -> None:
    """Run Spark's own daemon, after the preparations of this module's rules."""
    leave_archives()
    if THREADS.is_dir() and ALONE not in sys.argv:
        share()
        if len(list(THREADS.iterdir())) > 1:  # a lock that it holds would stay locked in the forks
            os.execv(sys.executable, [*sys.orig_argv, ALONE])  # noqa: S606  # this command again
    import_module(DAEMON).manager()


if __name__ == "__main__":
    main()
