"""Arrow columns as Python values, which survive a message."""

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest

from aztask.message.codec import Codec
from aztask.spark.submission.matching import plain

AT = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
CASES = [
    (pa.bool_(), [True, False]),
    (pa.int8(), [1, -1]),
    (pa.int64(), [2**63 - 1, -(2**63)]),
    (pa.float32(), [1.5, float("inf")]),
    (pa.float64(), [0.1, -0.0]),
    (pa.string(), ["", "ключ", "a\x00b"]),
    (pa.large_string(), ["x"]),
    (pa.binary(), [b"", b"\x00\xff"]),
    (pa.decimal128(10, 2), [Decimal("1.50")]),
    (pa.date32(), [date(1, 1, 1), date(9999, 12, 31)]),
    (pa.timestamp("us", tz="UTC"), [AT]),
    (pa.timestamp("us"), [datetime(2026, 1, 2, 3, 4, 5, 6)]),
    (pa.duration("us"), [timedelta(days=-1, microseconds=1)]),
    (pa.list_(pa.int32()), [[1, None], []]),
    (pa.struct([("a", pa.int32()), ("b", pa.string())]), [{"a": 1, "b": None}]),
    (pa.map_(pa.string(), pa.int32()), [{"a": 1, "b": None}, {}]),
    (pa.list_(pa.map_(pa.int32(), pa.date32())), [[{1: date(2026, 1, 1)}]]),
    (pa.null(), [None]),
]


@pytest.mark.parametrize(("kind", "values"), CASES, ids=[str(kind) for kind, _ in CASES])
def test_values_and_nulls(kind, values):
    codec = Codec()
    given = [*values, None]
    column = pa.array(
        [list(v.items()) if isinstance(v, dict) and pa.types.is_map(kind) else v for v in given]
        if not pa.types.is_list(kind)
        else given,
        kind,
    )
    for found, expected in ((plain(column), given), (plain(column.slice(0, len(values))), values)):
        assert found == expected
        assert [type(value) for value in found] == [type(value) for value in expected]
        data = codec.encode_value(found)
        assert codec.decode_value(data) == expected


def test_times_are_told_in_utc():
    column = pa.array([AT], pa.timestamp("us", tz="Asia/Kolkata"))
    (found,) = plain(column)
    assert found == AT
    assert found.utcoffset() == timedelta(0)


def test_parts_of_an_array():
    column = pa.array(list(range(10))).slice(3, 4)
    assert plain(column) == [3, 4, 5, 6]
