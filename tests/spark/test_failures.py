"""Errors that Spark raises become errors of aztask, in one line."""

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException

from aztask.errors import BrokerUnavailable, ConfigurationError, QueueNotFound, SubmitFailed
from aztask.spark.session import as_ours, ended_well, ours_in, what_is_missing


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (
            "Traceback\naztask.errors.QueueNotFound: there is no queue 'x'\n",
            QueueNotFound,
            "no que",
        ),
        (
            "x.Y: aztask.errors.BrokerUnavailable: not there; AccountKey=c2VjcmV0c2VjcmV0\nat",
            BrokerUnavailable,
            r"AccountKey=\*\*\*\*",
        ),
        (
            "Job aborted: Python worker exited unexpectedly (crashed).",
            SubmitFailed,
            "worker .* died",
        ),
        ("ModuleNotFoundError: No module named 'shop'", SubmitFailed, "--py-files"),
        (
            "x\nTypeError: no such thing\n at y",
            SubmitFailed,
            "^TypeError: no such thing; some rows",
        ),
        (
            "An error occurred while calling o1.\n: a.B: Job aborted\n\tat x\nCaused by: c.D$E: "
            "The header is\n wrong.\nFile: x\n\tat y\n\t... 20 more\n",
            SubmitFailed,
            r"^The header is wrong\. File: x; some rows",
        ),
        ("something else\nat z", SubmitFailed, "^something else; some rows"),
        (
            "[FAILED_READ_FILE] Encountered error while reading file file:///in/a.json. SQLSTATE\n"
            "Caused by: org.E: [MALFORMED_RECORD] Malformed records.\n\tat y\n",
            SubmitFailed,
            r"Malformed records\. in file:///in/a\.json; some rows",
        ),
    ],
)
def test_an_error_of_spark_becomes_one_line(text, kind, words):
    made = as_ours(RuntimeError(text))
    assert type(made) is kind
    assert len(str(made).splitlines()) == 1
    with pytest.raises(kind, match=words):
        raise made


def test_a_refused_query_has_sent_nothing():
    made = as_ours(AnalysisException("[AMBIGUOUS_REFERENCE] Reference `n` is ambiguous."))
    assert type(made) is ConfigurationError
    assert str(made) == "Spark refuses the query: Reference `n` is ambiguous.; nothing was sent"


def test_a_query_with_a_damaged_checkpoint_is_started_with_a_new_one():
    """To submit again under the same id cannot help: only its own id makes the same task ids."""

    class Query:
        id = "0b6b"

        def awaitTermination(self, seconds):
            raise StreamingQueryException("Incomplete log file offsets/1")

    words = "Incomplete log file offsets/1; .* with a new one and, .* with the submission id 0b6b"
    with pytest.raises(SubmitFailed, match=words):
        ended_well(Query(), 1)


def test_a_text_without_an_error_of_ours():
    assert ours_in("ValueError: aztask.errors is a module") is None
    assert what_is_missing("x") is None
