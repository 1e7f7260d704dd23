"""The Spark session: the one that runs, or a new one.

Rules
1. A platform's session (a notebook's, spark-submit's) is used as it is, and never stopped by us.
2. A session of our own runs where ``master`` says, else where spark-submit or Spark's settings say,
   else on this machine, and then its Python workers run this very interpreter, not the first
   ``python3`` of the PATH, which may lack aztask. Where PySpark's own Spark runs them, they also
   import what the driver imports (see `workers`).
3. What spark-submit was given is stronger than our own defaults, and weaker than `conf`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from aztask.errors import ConfigurationError
from aztask.spark.needs import check_java

LOCAL = "local[*]"
DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
}
PYTHON_VARIABLE = "PYSPARK_PYTHON"
DAEMON_MODULE = "spark.python.daemon.module"
SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""The environment variable by which spark-submit tells Python where its Java machine is."""
WORKERS = "aztask.spark.workers"
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
LOGGING = Path(__file__).with_name("log4j2.properties")


def get_session(
    *,
    name: str = "aztask",
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    ui: bool = False,
    log_level: str = "ERROR",
) -> SparkSession:
    """The active session, or a new one.

    master, conf: as of spark-submit; they count for a new session only, and conf is stronger than
    our own defaults (time zone UTC, Arrow on). ui: whether its web page is served. log_level: of
    the JVM. Raises ConfigurationError where Java is missing or Spark does not start.
    """
    active = active_session()
    if active is not None:
        return active
    check_java()
    settings = {"spark.ui.enabled": str(ui).lower(), **DEFAULTS, **(conf or {})}
    where = master or settings.get("spark.master")
    try:
        known = surroundings(settings, where)
        where = where or known.get("spark.master") or LOCAL
        if SUBMITTED in os.environ:
            given = conf or {}
            settings = {
                key: value
                for key, value in settings.items()
                if key in given or not known.contains(key)
            }
        if where.startswith("local"):
            settings = {**own_workers(known), **settings}
        builder = SparkSession.builder.appName(name).master(where)
        for key, value in settings.items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
    except PySparkException as error:
        raise ConfigurationError(
            f"Spark did not start with master {where or LOCAL}: {first_line(error)} (it needs Java "
            "17 or newer; what Java itself said is above)"
        ) from error
    session.sparkContext.setLogLevel(log_level)
    bridge = logging.getLogger("py4j")
    if bridge.level == logging.NOTSET:
        bridge.setLevel(logging.WARNING)  # it tells of every connection and every call
    return session


def surroundings(settings: Mapping[str, str], master: str | None) -> SparkConf:
    """What spark-submit and Spark's settings say, with `settings` on top.

    Only Java knows: a SparkConf is empty until its machine runs, even under spark-submit. So this
    starts the machine, or finds the one that spark-submit started.
    """
    start = SparkConf(loadDefaults=False)
    for key, value in settings.items():
        start.set(key, value)
    if master is not None:
        start.set("spark.master", master)
    if (master or LOCAL).startswith("local") and not os.environ.get("SPARK_CONF_DIR"):
        start.setIfMissing(JAVA_OPTIONS, f"-Dlog4j2.configurationFile={LOGGING.as_uri()}")
    SparkContext._ensure_initialized(conf=start)
    return SparkConf()


def own_workers(known: SparkConf) -> dict[str, str]:
    """The settings by which Python workers on this machine run what the driver runs.

    known: what the surroundings set. Nothing where they choose workers, or another Spark.
    """
    python = os.environ.setdefault(PYTHON_VARIABLE, sys.executable)
    chosen = "SPARK_HOME" in os.environ or known.contains(DAEMON_MODULE)
    return {} if chosen or python != sys.executable else {DAEMON_MODULE: WORKERS}


def active_session() -> SparkSession | None:
    """The session that runs already, if one does."""
    return SparkSession.getActiveSession()


def first_line(error: BaseException) -> str:
    """The first line of an error's text: Spark's errors go on with a plan and a stack."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
