"""The Spark session: the active one, or a new one.

Rules
1. A session that already runs (a notebook's, a platform's) is used unchanged and never stopped.
2. A new session runs where ``master`` says, else where ``SPARK_REMOTE`` says, spark-submit or
   Spark's settings, else on this machine. ``sc://HOST`` is a server of Spark Connect; see `kind`.
3. On this machine its Python workers run the driver's interpreter, not the first ``python3`` on the
   PATH, which may lack aztask. With PySpark's own Spark they also share imports (see `workers`).
4. `conf` overrides the settings of spark-submit, and those override our defaults.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.util import is_remote_only

from aztask import errors
from aztask.errors import AztaskError, ConfigurationError, SubmitFailed
from aztask.spark.kind import SPARK_ERRORS, is_remote, open_remote, remote_address
from aztask.spark.needs import check_java
from aztask.support.display import mask, one_line

if not is_remote_only():
    from pyspark import SparkConf, SparkContext

# -- Failures --------------------------------------------------------------------------------------
#
# Turns errors of Spark into errors of aztask: the cause on the executor, on one line.
#
# Spark passes a remote traceback on as text. If an aztask error is in it, the last one is raised
# again under its class; any other error is reported in Spark's own words, cut to one line.

_OURS: Final = re.compile(r"^(?:[\w.]+: )*aztask\.errors\.(\w+): (.+)$", re.MULTILINE)
_MISSING: Final = re.compile(r"(?:No module named|there is no module) '(\w+)")
_LAST: Final = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception)): (.+)$", re.MULTILINE)
_CAUSE: Final = re.compile(
    r"^Caused by: [\w.$]+: ((?:(?!\tat |\t\.\.\.|Caused by).*\n?)+)", re.MULTILINE
)
_CALL: Final = re.compile(r"An error occurred while calling \w+\.\w+\.$")
_FILE: Final = re.compile(r"while reading file (\S+?)\.?(?:\s|$)")
_DIED: Final = ("Python worker exited unexpectedly", "Python worker process terminated")
AGAIN: Final = (
    "some rows may have been sent: submit again under the same submission id, and workers with a "
    "result store run each key once"
)


def as_ours(error: BaseException, again: str = AGAIN) -> AztaskError:
    """The error of ours that replaces `error`, which a Spark job raised.

    again: what to do after a failure in the middle of the work.
    """
    text = str(error)
    ours = ours_in(text)
    if ours is None and any(each in text for each in _DIED):
        return SubmitFailed(f"a Python worker of Spark died (killed, or out of memory); {again}")
    if missing := what_is_missing(str(ours) if ours else text):
        return SubmitFailed(f"{missing}; those executors sent nothing")
    if ours:
        return ours
    if isinstance(error, AnalysisException):  # Spark analyses a query before it runs any of it
        return ConfigurationError(f"{translated(error)}; nothing was sent")
    return SubmitFailed(f"{_cause_in(text)}; {again}")


def file_in(text: str) -> str | None:
    """The file that Spark was reading when the error with this text was raised."""
    found = _FILE.search(text)
    return found[1] if found else None


def _cause_in(text: str) -> str:
    """The first cause in an error's text, and the file that Spark was reading."""
    file = file_in(text)
    where = f" in {file}" if file else ""
    if found := _CAUSE.findall(text):
        return f"{_short(' '.join(found[-1].split()))}{where}"
    if found := _LAST.findall(text):
        return f"{found[-1][0]}: {_short(found[-1][1])}{where}"
    return f"{_short(text.partition(chr(10))[0])}{where}"


def what_is_missing(text: str) -> str | None:
    """Advice about the module that executors cannot import; None if `text` names none."""
    found = _MISSING.findall(text)
    if not found:
        return None
    return (
        f"executors cannot import {found[-1]!r}: put it into a zip with aztask spark pack and pass "
        "that as --py-files (Spark does not import from wheels), or install it on the cluster"
    )


def ours_in(text: str) -> AztaskError | None:
    """The last error of ours in a remote traceback; None if there is none."""
    found = _OURS.findall(text)
    if not found:
        return None
    name, sentence = found[-1]
    kind = getattr(errors, name, AztaskError)
    made: AztaskError = kind(_short(sentence))
    return made


def ended_well(query: StreamingQuery, seconds: int) -> bool:
    """Wait so many seconds for a streaming query to end. True if it has; raises its failure."""
    try:
        return bool(query.awaitTermination(seconds))
    except SPARK_ERRORS as error:
        found = as_ours(error, _again(query))
        if is_remote(query) and what_is_missing(str(error)):
            # Spark 4.3 looks for a session's files in the server's own folder for them.
            found = type(found)(
                f"{found}. Executors of a stream do not find the files of a Spark Connect session: "
                "start the server with --files and the same zip, too"
            )
        raise found from error


def _again(query: StreamingQuery) -> str:
    return (
        "some rows of the last batch may have been sent: start the query again with the same "
        "checkpoint. If that is damaged, start with a new one and, unless the query had a "
        f"submission id of its own, with the submission id {query.id}: then rows that were sent "
        "get the same task ids"
    )


def _short(text: str) -> str:
    return one_line(mask(text), 600)


# -- The session -----------------------------------------------------------------------------------


LOCAL = "local[*]"
SESSION_DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}
DEFAULTS = {**SESSION_DEFAULTS, "spark.ui.showConsoleProgress": "false"}
PYTHON_VARIABLE = "PYSPARK_PYTHON"
DAEMON_MODULE = "spark.python.daemon.module"
SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""The environment variable in which spark-submit gives Python the port of its JVM."""
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

    name: the application's, on Spark's own pages. master, conf: as for spark-submit; an active
    session ignores them. A master ``sc://HOST`` is a server of Spark Connect. conf overrides our
    defaults (time zone UTC, Arrow on). ui: whether to serve Spark's web page. log_level: the JVM's.
    A server of Spark Connect has its own name, page and log level. Raises ConfigurationError if
    Java is missing, Spark does not start, or no server answers.
    """
    active = active_session()
    if active is not None:
        return active
    address = remote_address(master, conf or {})
    if address is not None:
        try:
            return open_remote(address, {**SESSION_DEFAULTS, **(conf or {})})
        except PySparkException as error:
            raise ConfigurationError(
                f"Spark Connect refuses the session: {mask(first_line(error))}"
            ) from error
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
            "17 or newer; see Java's own messages above)"
        ) from error
    session.sparkContext.setLogLevel(log_level)
    bridge = logging.getLogger("py4j")
    if bridge.level == logging.NOTSET:
        bridge.setLevel(logging.WARNING)  # it logs every connection and every call
    return session


def surroundings(settings: Mapping[str, str], master: str | None) -> SparkConf:
    """The configuration of spark-submit and of Spark's files, overridden by `settings`.

    Only the JVM knows it: a SparkConf is empty until a JVM runs, even under spark-submit. So this
    starts the JVM, or connects to the one that spark-submit started.
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
    """The settings that make Python workers on this machine run what the driver runs.

    known: the configuration so far. Empty if that chooses a daemon or another Spark itself.
    """
    python = os.environ.setdefault(PYTHON_VARIABLE, sys.executable)
    chosen = "SPARK_HOME" in os.environ or known.contains(DAEMON_MODULE)
    return {} if chosen or python != sys.executable else {DAEMON_MODULE: WORKERS}


def active_session() -> SparkSession | None:
    """The session that already runs; None if there is none."""
    return SparkSession.getActiveSession()


def first_line(error: BaseException) -> str:
    """The first line of an error's text; a query plan and a stack follow it in Spark's errors.

    The first line of the bridge to Java only says which call failed, so that it is passed over.
    """
    lines = [line.strip(" :") for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if not _CALL.match(line)), lines[0] if lines else "")


# -- turns Spark's errors about queries into aztask's: one line, not a plan and two stacks -
#
# Rules
# 1. An aztask error that was raised in an executor or a planner is raised again under its own
#    class.
# 2. A mistake in a query (an unknown column, a wrong expression, a path that exists) becomes a
#    ConfigurationError, any other failure of a job an AztaskError.


_CONDITION: Final = re.compile(r"\[[A-Z0-9_.]+\] (.+?)(?: SQLSTATE: .*)?")


@contextmanager
def translated_errors() -> Iterator[None]:
    """Replace Spark's errors in the block by aztask's, see the module's rules."""
    # Spark logs every refused query to stderr, as JSON with the whole stack in it.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    try:
        yield
    except SPARK_ERRORS as error:
        raise translated(error) from error


def translated(error: BaseException) -> AztaskError:
    """The aztask error to raise instead of `error`."""
    ours = ours_in(str(error))
    if missing := what_is_missing(str(ours or error)):
        return AztaskError(missing)
    if ours:
        return ours
    line = first_line(error)
    match = _CONDITION.fullmatch(line)
    said = mask(match[1] if match else line)
    if isinstance(error, AnalysisException):
        return ConfigurationError(f"Spark refuses the query: {said}")
    return AztaskError(f"the Spark job failed: {said}")
