"""From what Spark raises to an error of ours: the cause that an executor met, on one line.

Spark hands over a remote traceback as text. The last line of ours in it names the class and says
what to do; what else went wrong is said in Spark's own words, cut to one line.
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
"""What a job raises: an error that pyspark knows, or the bridge's own for all others."""

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
    """The error to raise instead of `error`, which a Spark job raised."""
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
    """What to do about a module that executors cannot import; None if a text names no such."""
    found = _MISSING.findall(text)
    if not found:
        return None
    return (
        f"executors cannot import {found[-1]!r}: put it into a zip with aztask spark pack and pass "
        "that as --py-files (Spark does not import from wheels), or install it on the cluster"
    )


def ours_in(text: str) -> AztaskError | None:
    """The error of ours that a remote traceback ends in, None where there is none."""
    found = _OURS.findall(text)
    if not found:
        return None
    name, sentence = found[-1]
    kind = getattr(errors, name, AztaskError)
    made: AztaskError = kind(_short(sentence))
    return made


def ended_well(query: StreamingQuery, seconds: int) -> bool:
    """Wait for the end of a streaming query; whether it has ended. Raises what it failed with."""
    try:
        return bool(query.awaitTermination(seconds))
    except SPARK_ERRORS as error:
        raise as_ours(error) from error


def _short(text: str) -> str:
    return one_line(mask(text), 600)
