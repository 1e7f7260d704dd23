"""Errors of queries and jobs become one line, without Spark's plan and stacks."""

import pytest
from pyspark.errors import AnalysisException, PySparkException

from aztask.errors import AztaskError, ConfigurationError, DecodeError
from aztask.spark.session import translated, translated_errors

STACK = "\n'Project ['x]\n\tat org.apache.spark.sql.Dataset\n"


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            AnalysisException(f"[UNRESOLVED_COLUMN.X] no column `x`. SQLSTATE: 42703{STACK}"),
            ConfigurationError,
            "Spark refuses the query: no column `x`.",
        ),
        (
            PySparkException(f"Job aborted; AccountKey=c2VjcmV0c2VjcmV0{STACK}"),
            AztaskError,
            "the Spark job failed: Job aborted; AccountKey=****",
        ),
        (
            PySparkException("x\naztask.errors.DecodeError: the document is damaged\n"),
            DecodeError,
            "the document is damaged",
        ),
    ],
)
def test_an_error_of_spark_becomes_one_line(error, kind, words):
    made = translated(error)
    assert type(made) is kind
    assert str(made) == words
    with pytest.raises(kind), translated_errors():
        raise error


def test_a_module_that_executors_lack_is_named_with_what_to_do():
    made = translated(PySparkException("ModuleNotFoundError: No module named 'shop'"))
    assert "cannot import 'shop'" in str(made)
    assert "aztask spark pack" in str(made)


def test_other_errors_pass_unchanged():
    with pytest.raises(KeyError), translated_errors():
        raise KeyError("x")
