"""Turns errors of Spark into errors of aztask: the cause on the executor, on one line.

Spark passes a remote traceback on as text. If an aztask error is in it, the last one is raised
again under its class; any other error is reported in Spark's own words, cut to one line.
"""

from __future__ import annotations

import re
from typing import Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from aztask import errors
from aztask.errors import AztaskError, SubmitFailed
from aztask.support.display import one_line
from aztask.support.masking import mask

SPARK_ERRORS: Final = (PySparkException, Py4JError)
"""What a job raises: PySpark's own errors, and the Java bridge's for all others."""

_OURS: Final = re.compile(r"^(?:[\w.]+: )*aztask\.errors\.(\w+): (.+)$", re.MULTILINE)
_MISSING: Final = re.compile(r"(?:No module named|there is no module) '(\w+)")
_LAST: Final = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception)): (.+)$", re.MULTILINE)
_CAUSE: Final = re.compile(
    r"^Caused by: [\w.$]+: ((?:(?!\tat |\t\.\.\.|Caused by).*\n?)+)", re.MULTILINE
)
_DIED: Final = ("Python worker exited unexpectedly", "Python worker process terminated")
AGAIN: Final = (
    "some rows may have been sent: submit again under the same submission id, and workers with a "
    "result store run each key once"
)


def as_ours(error: BaseException) -> AztaskError:
    """The error of ours that replaces `error`, which a Spark job raised."""
    text = str(error)
    ours = ours_in(text)
    if ours is None and any(each in text for each in _DIED):
        return SubmitFailed(f"a Python worker of Spark died (killed, or out of memory); {AGAIN}")
    if missing := what_is_missing(str(ours) if ours else text):
        return SubmitFailed(f"{missing}; those executors sent nothing")
    if ours:
        return ours
    if found := _CAUSE.findall(text):
        return SubmitFailed(f"{_short(' '.join(found[-1].split()))}; {AGAIN}")
    if found := _LAST.findall(text):
        return SubmitFailed(f"{found[-1][0]}: {_short(found[-1][1])}; {AGAIN}")
    return SubmitFailed(f"{_short(text.partition(chr(10))[0])}; {AGAIN}")


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
        raise as_ours(error) from error


def _short(text: str) -> str:
    return one_line(mask(text), 600)
