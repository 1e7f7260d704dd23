"""Turns Spark's errors about queries into aztask's: one line, not a plan and two stacks.

Rules
1. An aztask error that was raised in an executor or a planner is raised again under its own class.
2. A mistake in a query (an unknown column, a wrong expression, a path that exists) becomes a
   ConfigurationError, any other failure of a job an AztaskError.
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
def translated_errors() -> Iterator[None]:
    """Replace Spark's errors in the block by aztask's, see the module's rules."""
    # Spark logs every refused query to stderr, as JSON with the whole stack in it.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    try:
        yield
    except (PySparkException, Py4JError) as error:
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
