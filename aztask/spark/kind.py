"""What differs between the two kinds of Spark session: classic, and Spark Connect.

A classic session has a JVM in reach, and with it ``sparkContext``. A Connect session talks to a
server; `pyspark-client` alone is enough for it, which has neither ``SparkContext`` nor ``py4j``.
Everything else in `aztask.spark` works on both and asks no session for its kind.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.util import is_remote_only

from aztask.errors import ConfigurationError
from aztask.spark.needs import CONNECT_LIBRARIES, check_installed
from aztask.support.display import mask, printable

if is_remote_only():
    SPARK_ERRORS: tuple[type[Exception], ...] = (PySparkException,)
else:
    from py4j.protocol import Py4JError
    from pyspark import SparkFiles

    SPARK_ERRORS = (PySparkException, Py4JError)
    """What a job raises: PySpark's own errors, and the Java bridge's for all others."""

REMOTE: Final = "SPARK_REMOTE"
"""The environment variable with the address of a Connect server, as Spark itself reads it."""
SCHEME: Final = "sc://"
PORT: Final = 15002
CONNECT_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.3
MOST_CORES: Final = 1 << 16
_PROXIES: Final = ("grpc_proxy", "https_proxy", "http_proxy")


def is_remote(spark: SparkSession | StreamingQuery) -> bool:
    """Whether a session, or a query, is one of Spark Connect."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


# -- opening -------------------------------------------------------------------------------


def remote_address(master: str | None, conf: Mapping[str, str]) -> str | None:
    """The server that ``master``, ``spark.remote`` or the environment names; None: classic Spark.

    Raises ConfigurationError if they contradict each other, or if there is only the client here and
    no address.
    """
    told = master or conf.get("spark.remote") or conf.get("spark.master")
    address = os.environ.get(REMOTE) or None
    if told is not None and told.startswith(SCHEME):
        return told
    if told is not None and address is not None:
        raise ConfigurationError(
            f"{REMOTE} is set, and so is the master {mask(printable(told))}: unset one of them"
        )
    if address is None and is_remote_only():
        raise ConfigurationError(
            "only Spark's client is installed here, so the jobs need a Spark Connect server: set "
            f"{REMOTE}=sc://HOST, or give it as the master"
        )
    return address


def open_remote(address: str, settings: Mapping[str, str]) -> SparkSession:
    """A session of this server. Raises ConfigurationError if it cannot be reached.

    settings: those that the server lets a session change; it ignores the others.
    """
    check_installed(CONNECT_LIBRARIES, extra="spark-connect")
    _check_reachable(address)
    builder = SparkSession.builder.remote(address)
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    _ = session.version  # the first request, at which a wrong token or server shows
    return session


def _check_reachable(address: str) -> None:
    """Raise ConfigurationError at once: the client would try again for ten minutes."""
    parts = urlsplit(address)
    try:
        host, port = parts.hostname or "", parts.port or PORT
    except ValueError:
        host = ""
    if not address.startswith(SCHEME):
        return  # SPARK_REMOTE=local: PySpark starts a server of its own
    if not host:
        raise ConfigurationError(f"{mask(printable(address))} is not like sc://HOST:{PORT}")
    if any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES):
        return  # the proxy reaches the server, this machine need not
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigurationError(
            f"no Spark Connect server answers at {host}:{port}: {error.strerror or error}"
        ) from None


# -- what both kinds can do, each in its way -----------------------------------------------


def cores(spark: SparkSession) -> int:
    """How many tasks run at the same time, as Spark divides a range. Runs a small job."""
    divided = spark.range(MOST_CORES).select(F.spark_partition_id().alias("part"))
    return divided.distinct().count()


def add_code(spark: SparkSession, path: str) -> None:
    """Let executors import from a .py file or zip. A path with a scheme needs classic Spark."""
    if not is_remote(spark):
        spark.sparkContext.addPyFile(path)
        return
    if "://" in path:
        raise ConfigurationError(
            f"{printable(path)} is not on this machine, and Spark Connect uploads files from here: "
            "copy it here first"
        )
    spark.addArtifacts(path, pyfile=True)


@contextmanager
def code_folder(spark: SparkSession) -> Iterator[Path]:
    """A folder for files that are made for `add_code`. Classic Spark removes it at its end."""
    if is_remote(spark):
        with tempfile.TemporaryDirectory(prefix="aztask-code-") as folder:
            yield Path(folder)
    else:
        yield Path(SparkFiles.getRootDirectory())


def analyzed(frame: DataFrame) -> DataFrame:
    """The frame, checked by Spark now: Connect would report a wrong path or column at first use."""
    _ = frame.schema
    return frame


def kept(frame: DataFrame) -> DataFrame:
    """The frame, kept in memory or on disk where the platform can; else computed at each use."""
    try:
        return frame.persist()
    except PySparkException:  # serverless compute refuses
        return frame


def release(frame: DataFrame) -> None:
    """Free the memory and the disk of a frame that was kept."""
    with suppress(PySparkException):
        frame.unpersist()


@contextmanager
def watched_stages(spark: SparkSession, show: Callable[[int, int, int], None]) -> Iterator[None]:
    """Call `show` with (stage, its tasks, how many have ended) while the block runs jobs.

    It is called from another thread, or from inside a call of Spark.
    """
    if is_remote(spark):

        def handle(stages: Any, **rest: Any) -> None:
            running = [each for each in stages if not each.done]
            if running:
                newest = max(running, key=lambda each: each.stage_id)
                show(newest.stage_id, newest.num_tasks, newest.num_completed_tasks)

        session: Any = spark  # the method is not in the classic session's type
        session.registerProgressHandler(handle)
        try:
            yield
        finally:
            session.removeProgressHandler(handle)
        return
    ended = threading.Event()
    tracker = spark.sparkContext.statusTracker()

    def poll() -> None:
        while not ended.wait(POLL_SECONDS):
            stage = max(tracker.getActiveStageIds(), default=None)
            about = None if stage is None else tracker.getStageInfo(stage)
            if stage is not None and about is not None:
                show(stage, about.numTasks, about.numCompletedTasks)

    watcher = threading.Thread(target=poll, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
