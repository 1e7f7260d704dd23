"""The daemon that forks Spark's Python workers on this machine: from the driver's PySpark, and from
what they all import.

1. Spark puts PySpark in front of its workers' path as an archive, and from an archive every worker
   compiles anew what it imports [measured with Spark 4.3: 1.0 s, 0.2 s from compiled files]. A
   session of our own on this machine runs the driver's PySpark instead: it names this module as
   ``spark.python.daemon.module``, as Spark's own tests do to measure coverage.
2. Spark's daemon imports nothing that its workers need, for pandas and Arrow start threads, and
   none may be there at a fork. Only two do, and both can be told not to: Spark itself sets
   ``OMP_NUM_THREADS``, and Arrow's second allocator listens to `QUIET`. So this daemon imports them
   first [measured: 0.4 s of every worker, and 40 ms of every task, whose collection of garbage went
   through all of it], and aztask's own sender with its Kombu [0.3 s of every worker that sends];
   should there be a thread after that, it starts over without.
3. At its first task a worker has Python's import system look again at all that it knows, and an
   archive is then read whole, though nothing is imported from it [40 ms]: so they are forgotten.
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
"""What Spark puts into its workers' path: PySpark, its bridge, and its own classes."""
DAEMON: Final = "pyspark.daemon"
SHARED: Final = ("pyspark.worker", "pyarrow", "pandas", "aztask.spark.submission.send")
QUIET: Final = ("JE_ARROW_MALLOC_CONF", "background_thread:false")
ALONE: Final = "--alone"
"""Says to the same program that it is to import nothing."""
THREADS: Final = Path("/proc/self/task")


def without_archives(path: Sequence[str]) -> list[str]:
    """The path without Spark's archives, if PySpark and its bridge are found elsewhere in it."""
    rest = [entry for entry in path if not ARCHIVE.search(entry)]
    found = all(PathFinder.find_spec(name, rest) for name in ("pyspark", "py4j"))
    return rest if found else list(path)


def leave_archives() -> None:
    """Take them out of the path of imports, and out of what the import system keeps of it."""
    before = list(sys.path)
    sys.path[:] = without_archives(before)
    for each in set(before).difference(sys.path):
        sys.path_importer_cache.pop(each, None)


def share() -> None:
    """Import what workers have in common. What cannot be imported is theirs to report."""
    os.environ.setdefault(*QUIET)
    for name in SHARED:
        with suppress(Exception):
            import_module(name)
    gc.freeze()


def main() -> None:
    """Run Spark's own daemon."""
    leave_archives()
    if THREADS.is_dir() and ALONE not in sys.argv:
        share()
        if len(list(THREADS.iterdir())) > 1:  # a lock that one holds stays locked in the forks
            os.execv(sys.executable, [*sys.orig_argv, ALONE])
    import_module(DAEMON).manager()


if __name__ == "__main__":
    main()
