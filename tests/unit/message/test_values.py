"""Whatever is accepted comes back equal, or as the table in docs/reference/values.md says."""

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from uuid import UUID
from zoneinfo import ZoneInfo

import msgpack
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aztask import App
from aztask.errors import ContentRefused, EncodeError, TaskFailed
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage

MSGPACK, JSON = Codec(), Codec(serializer="json")
BERLIN = ZoneInfo("Europe/Berlin")
Point = namedtuple("Point", "x y")


class Lying(datetime):
    def isoformat(self, *args, **options):
        return "0001-01-01T00:00:00"

    def __str__(self):
        return "0001-01-01"


class LyingDate(date):
    def isoformat(self):
        return "0001-01-01"


class LyingTime(time):
    def isoformat(self, *args, **options):
        return "00:00:00"


class LyingDecimal(Decimal):
    def __str__(self):
        return "0"


class LyingId(UUID):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)

    @property
    def bytes(self):
        return bytes(16)

    @property
    def hex(self):
        return "0" * 32


class Span(timedelta):
    @property
    def days(self):
        return 0


class Color(enum.IntEnum):
    RED = 7


class Word(enum.StrEnum):
    HELLO = "hello"


class Zoneless(tzinfo):
    def utcoffset(self, dt):
        return None

    def dst(self, dt):
        return None

    def tzname(self, dt):
        return "?"


zones = st.none() | st.sampled_from([UTC, BERLIN, ZoneInfo("America/New_York")]) | st.builds(
    timezone, st.integers(-86_399, 86_399).map(lambda seconds: timedelta(seconds=seconds))
)  # fmt: skip
datetimes = st.datetimes(timezones=zones, allow_imaginary=True)
folded = st.builds(lambda at, fold: at.replace(fold=fold), datetimes, st.integers(0, 1))
times = st.builds(
    lambda at, fold: at.replace(fold=fold), st.times(timezones=zones), st.integers(0, 1)
)
stamps = st.builds(
    pd.Timestamp, st.integers(-(2**62), 2**62).map(lambda ns: ns // 1000 * 1000 + ns % 3)
)
library = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**200), 2**200), st.floats(), st.text(), st.binary(),
    folded, times, st.dates(), st.timedeltas(), st.uuids(), st.decimals(),
    st.binary().map(bytearray), st.complex_numbers(), st.fractions(),
    st.sampled_from([Color.RED, Word.HELLO, Point(1, 2), {1, 2}, ..., float, "\ud800"]),
    st.datetimes().map(lambda at: Lying(*at.timetuple()[:6], at.microsecond)),
    st.dates().map(lambda at: LyingDate(at.year, at.month, at.day)),
    st.times().map(lambda at: LyingTime(at.hour, at.minute, at.second, at.microsecond)),
    st.decimals().map(LyingDecimal), st.uuids().map(lambda each: LyingId(int=each.int)),
    st.timedeltas().map(lambda span: Span(span.days, span.seconds, span.microseconds)),
    st.just(time(1, 2, tzinfo=Zoneless())), st.just(datetime(2026, 1, 1, tzinfo=Zoneless())),
)  # fmt: skip
numbers = st.one_of(
    st.sampled_from([pd.NaT, pd.NA, np.nan, np.inf, np.datetime64("NaT"), np.bool_(1)]),
    stamps, stamps.map(lambda at: at.tz_localize(UTC)),
    st.integers(-(2**62), 2**62).map(lambda ns: pd.Timedelta(ns, "ns")),
    st.integers(-(2**62), 2**62).map(lambda ns: np.datetime64(ns, "ns")),
    st.integers(-(2**62), 2**62).map(lambda ns: np.timedelta64(ns, "ns")),
    st.integers(-(2**63), 2**63 - 1).map(np.int64), st.floats().map(np.float64),
    st.floats(width=32).map(np.float32), st.text().map(np.str_), st.binary().map(np.bytes_),
    st.just(np.arange(3)), st.just(pd.Series([1])), st.just(pd.Period("2026-01")),
)  # fmt: skip
keys = st.one_of(
    st.text(max_size=3), st.integers(-3, 3), st.sampled_from(["1", "true", "null", "NaN", "1.5"]),
    st.booleans(), st.none(), st.floats(), st.binary(max_size=2), st.dates(), st.tuples(),
    st.sampled_from(["__type__", "__value__"]),
)  # fmt: skip
values = st.recursive(
    library | numbers,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.text(max_size=2), inner, max_size=2).map(OrderedDict),
        st.fixed_dictionaries({"__type__": st.sampled_from(["date", "bytes"]), "__value__": inner}),
    ),
    max_leaves=6,
)  # fmt: skip

BASES = (bool, int, float, str, bytes, datetime, date, time, timedelta, UUID, Decimal)


def same(sent, got, text_keys=False):
    """Whether `got` is what the table says of `sent`."""
    if sent is None:
        return got is None
    if isinstance(sent, list | tuple):
        return type(got) is list and all_same(sent, got, text_keys)
    if isinstance(sent, dict):
        wanted = [key_text(key) for key in sent] if text_keys else list(sent)
        return (
            type(got) is dict
            and all_same(wanted, list(got), text_keys)
            and all_same(list(sent.values()), list(got.values()), text_keys)
        )
    if isinstance(sent, bytearray):
        return type(got) is bytes and got == sent
    base = next((each for each in BASES if isinstance(sent, each)), None)
    return base is not None and type(got) is base and same_scalar(sent, got, base)


def all_same(sent, got, text_keys):
    pairs = zip(sent, got, strict=False)
    return len(sent) == len(got) and all(same(*pair, text_keys) for pair in pairs)


def same_scalar(sent, got, base):
    if base is Decimal:  # NaN as NaN, and the digits count
        return Decimal.as_tuple(sent) == Decimal.as_tuple(got)
    if base is float and math.isnan(sent):
        return math.isnan(got)
    if base in (datetime, time) and sent.tzinfo is not None:
        # the zone comes back as its offset
        return got.utcoffset() == sent.utcoffset() and bool(
            sent.replace(tzinfo=None, fold=0) == got.replace(tzinfo=None)
        )
    return bool(got == sent)  # which leaves out the fold of a time without a zone


def key_text(key):
    if key is None or isinstance(key, bool):
        return json.dumps(key)
    if isinstance(key, float):
        return float.__repr__(key).replace("nan", "NaN").replace("inf", "Infinity")
    return str(key)


def message_of(codec, args, kwargs):
    body, content_type, encoding = codec.encode_arguments(args, kwargs)
    return TaskMessage(
        id="a", task="t", queue="q", body=body, content_type=content_type,
        content_encoding=encoding,
    )  # fmt: skip


@pytest.mark.parametrize("codec", [MSGPACK, JSON], ids=["msgpack", "json"])
@settings(max_examples=600, deadline=None)
@given(value=values)
def test_arguments_come_back_or_are_refused(codec, value):
    try:
        message = message_of(codec, (value,), {"given": value})
    except (EncodeError, ContentRefused):
        return
    (first,), kwargs = codec.decode_arguments(message)
    for got in (first, kwargs["given"]):
        assert same(value, got, text_keys=codec is JSON), (value, got)


@settings(max_examples=600, deadline=None)
@given(value=values)
def test_results_checkpoints_and_stored_values_come_back_or_are_refused(value):
    for large in (False, True):
        try:
            data = MSGPACK.encode_value(value, large=large)
        except (EncodeError, ContentRefused):
            return
        assert same(value, MSGPACK.decode_value(data)), value


LOSSY = [
    pd.NaT,
    pd.Timestamp(1),
    pd.Timestamp(1, tz="UTC"),
    pd.Timedelta(1, "ns"),
    np.datetime64(1, "ns"),
    np.timedelta64(1, "ns"),
    pd.NA,
    time(2, 30, tzinfo=BERLIN),
    [{"deep": (pd.NaT,)}],
]
PLAIN = [
    Lying(2026, 1, 2, 3, 4, 5, 6),
    LyingDate(2026, 1, 2),
    LyingTime(1, 2, 3, 4),
    LyingDecimal("1.50"),
    LyingId(int=7),
    pd.Timestamp("2026-01-02 03:04:05.000006"),
    pd.Timestamp("2026-10-25 12:30", tz="Europe/Berlin"),
    datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1),
    datetime(2026, 10, 25, 2, 30, fold=1),
    time(2, 30, fold=1),
    Color.RED,
    Word.HELLO,
    np.float64(1.5),
    np.str_("a"),
    Counter("abca"),
    defaultdict(list, a=[1]),
    Point(1, 2),
]


@pytest.mark.parametrize("codec", [MSGPACK, JSON], ids=["msgpack", "json"])
@pytest.mark.parametrize("value", LOSSY, ids=repr)
def test_what_would_lose_a_part_is_refused(codec, value):
    with pytest.raises(EncodeError) as raised:
        codec.encode_arguments((value,), {})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("codec", [MSGPACK, JSON], ids=["msgpack", "json"])
@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_a_subclass_comes_back_as_its_base(codec, value):
    ((got,), _) = codec.decode_arguments(message_of(codec, (value,), {}))
    assert same(value, got, text_keys=codec is JSON), got


@pytest.mark.parametrize(
    "value",
    [
        {1: "a", "1": "b"},
        {True: "a", "true": "b"},
        {None: "a", "null": "b"},
        {1.5: "a", "1.5": "b"},
        [{"x": {-1: "a", "-1": "b"}}],
        {float("nan"): 1, "NaN": 2},
    ],
)
def test_json_refuses_keys_that_become_one(value):
    with pytest.raises(EncodeError, match="two keys of a dict are both written as"):
        JSON.encode_arguments((value,), {})
    ((got,), _) = MSGPACK.decode_arguments(message_of(MSGPACK, (value,), {}))
    assert same(value, got)


def test_json_refuses_a_dict_that_looks_like_another_type():
    value = {"__type__": "date", "__value__": "2026-01-02"}
    for each in (value, [date(2026, 1, 1), {"x": value}]):
        with pytest.raises(EncodeError, match="__type__ and __value__"):
            JSON.encode_arguments((each,), {})
    fine = {**value, "more": '{"__type__":'}
    ((got, day), _) = JSON.decode_arguments(message_of(JSON, (fine, date(2026, 1, 1)), {}))
    assert (got, day) == (fine, date(2026, 1, 1))


def test_a_task_that_returns_what_would_change_fails_once(tmp_path):
    app = App("shop", broker=f"local://{tmp_path}/q.db", results=f"local://{tmp_path}/q.db")

    @app.task(name="nat")
    def nat():
        return {"at": pd.NaT}

    @app.task_with_context(name="save")
    def save(context):
        context.checkpoint(pd.Timestamp(1))

    with app.inline():
        for task in (nat, save):
            result = task.delay()
            with pytest.raises(TaskFailed, match="would lose a part"):
                result.get(timeout=0)
            assert len(app.results.history(result.id)) == 1
        with pytest.raises(EncodeError, match="would lose a part"):
            app.put([pd.NaT])
        with pytest.raises(EncodeError, match="would lose a part"):
            app.send("nat", [pd.NaT])
    app.close()


def test_what_older_releases_wrote_is_read_as_before():
    """Bytes that are no longer written: nanoseconds, equal keys, a marked dict."""
    stamp = msgpack.packb(msgpack.ExtType(1, b"2026-01-02T03:04:05.000006007"))
    assert MSGPACK.decode_value(stamp) == datetime(2026, 1, 2, 3, 4, 5, 6)
    fold = msgpack.packb(msgpack.ExtType(1, b"2026-10-25T02:30:00"))
    assert MSGPACK.decode_value(fold) == datetime(2026, 10, 25, 2, 30)
    body = (
        b'[[{"1": "a", "1": "b"}, {"__type__": "date", "__value__": "2026-01-02"},'
        b' {"__type__": "datetime", "__value__": "2026-01-02T03:04:05.000006007"}], {}, {}]'
    )
    message = TaskMessage(
        id="a", task="t", queue="q", body=body, content_type="application/json",
        content_encoding="utf-8",
    )  # fmt: skip
    args, _ = JSON.decode_arguments(message)
    assert args == ({"1": "b"}, date(2026, 1, 2), datetime(2026, 1, 2, 3, 4, 5, 6))
