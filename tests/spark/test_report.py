"""The report of a submission adds up, or raises."""

import pytest

from aztask.errors import SubmitFailed
from aztask.spark.submission.send import PartitionReport
from aztask.spark.submission.submit import SubmitReport

ABOUT = {"submission_id": "one", "task": "shop.resize", "queue": "default", "seconds": 1.23456}


def report(*parts, rows=None):
    return SubmitReport.of([PartitionReport(*part) for part in parts], rows=rows, **ABOUT)


def test_the_sum_of_the_partitions():
    made = report((0, 10, 10, 3, 0), (1, 5, 5, 0, 0), rows=15)
    made.check()
    assert (made.rows, made.sent, made.retried, made.partitions) == (15, 15, 3, 2)
    assert made.as_dict()["seconds"] == 1.235


@pytest.mark.parametrize(
    ("parts", "rows", "words"),
    [
        ([(0, 10, 9, 0, 0)], None, "do not add up: 10 rows, 9 sent and 0 failed"),
        ([(0, 10, 10, 0, 0)], 12, "do not add up: 12 rows, 10 sent"),
        ([(0, 10, 11, 0, 0)], 10, "do not add up"),
        ([(0, 10, 9, 0, 1, "key 'a': too long")], 10, "1 of 10 rows could not be sent.*too long"),
    ],
)
def test_what_does_not_add_up_raises(parts, rows, words):
    made = report(*parts, rows=rows)
    with pytest.raises(SubmitFailed, match=words) as caught:
        made.check()
    assert caught.value.report is made
