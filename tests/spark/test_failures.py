"""Errors that Spark raises become errors of aztask, in one line."""

import pytest

from aztask.errors import BrokerUnavailable, QueueNotFound, SubmitFailed
from aztask.spark.session import as_ours, ours_in, what_is_missing


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
    ],
)
def test_an_error_of_spark_becomes_one_line(text, kind, words):
    made = as_ours(RuntimeError(text))
    assert type(made) is kind
    assert len(str(made).splitlines()) == 1
    with pytest.raises(kind, match=words):
        raise made


def test_a_text_without_an_error_of_ours():
    assert ours_in("ValueError: aztask.errors is a module") is None
    assert what_is_missing("x") is None
