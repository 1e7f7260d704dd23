"""What Spark says of a query or a job, as aztask's errors: one line, not a plan and two stacks.

Rules
1. An error of ours that was raised in an executor or a planner is raised again under its own class.
2. A mistake in a query (an unknown column, a wrong expression, a path that exists) is a
   ConfigurationError; whatever else breaks a job is an AztaskError.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, PySparkException

from aztask.errors import AztaskError, ConfigurationError
from aztask.spark.failures import ours_in, what_is_missing
from aztask.spark.session import first_line
from aztask.support.masking import mask

_CONDITION: Final = re.compile(r"\[[A-Z0-9_.]+\] (.+?)(?: SQLSTATE: .*)?")


@contextmanager
def told_plainly() -> Iterator[None]:
    """Errors of Spark in the block become those of this module's rules."""
    # It writes every refused query to stderr, as JSON with the whole stack in it.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise plainly(error) from error


def plainly(error: BaseException) -> AztaskError:
    """What to raise instead of `error`."""
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
