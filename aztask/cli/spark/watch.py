"""Progress of Spark jobs on stderr: the finished partitions of the newest stage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aztask.cli.progress import Progress

POLL_SECONDS = 0.3


@contextmanager
def watched(session: Any) -> Iterator[None]:
    """Show progress while the block runs jobs of this SparkSession."""
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(session.sparkContext, ended), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _watch(context: Any, ended: threading.Event) -> None:
    tracker = context.statusTracker()
    shown: tuple[int, Progress] | None = None
    while not ended.wait(POLL_SECONDS):
        stage = max(tracker.getActiveStageIds(), default=None)
        about = None if stage is None else tracker.getStageInfo(stage)
        if stage is None or about is None:
            continue
        if shown is None or shown[0] != stage:
            shown = (stage, Progress(about.numTasks, "partitions"))
        shown[1].show(about.numCompletedTasks, f", step {stage + 1}")
    if shown is not None:
        shown[1].clear()
