"""Lines become rows as `aztask.stores.events.sink` reads them, in bounded memory."""

import io
import json
import tracemalloc

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.spark.events import lines as eventlines
from aztask.spark.events.lines import (
    ARROW,
    BLOCK,
    CLOCK_BACK,
    CORRUPT,
    EMPTY,
    EVENT_COLUMNS,
    NEWER,
    NOT_AN_EVENT,
    NULS,
    TOO_LONG,
    TORN,
    read_lines,
)
from aztask.stores.events.event import EVENT_KINDS, Event, from_line, quote, to_line
from aztask.stores.events.sink import LINE_LIMIT, EventReader

GOOD = {
    "id": "n-1",
    "v": 1,
    "event": "succeeded",
    "ts": 100.5,
    "task_id": "i",
    "task": "t",
    "queue": "q",
    "worker": "w",
}


def line(**values):
    return json.dumps({**GOOD, **values}).encode() + b"\n"


def rows(data):
    """(event rows, odd rows), as dicts."""
    batches = list(read_lines(io.BytesIO(data), "a.jsonl"))
    assert all(batch.schema == ARROW for batch in batches)
    table = pa.Table.from_batches(batches, ARROW).to_pylist()
    return [row for row in table if row["odd"] is None], [row for row in table if row["odd"]]


def odd(data):
    return [(row["odd"], row["odd_line"]) for row in rows(data)[1]]


def as_event(row):
    fields = {name: row[name] for name in EVENT_COLUMNS}
    return Event(**fields)


@pytest.fixture(params=["whole blocks", "line by line"])
def way(request, monkeypatch):
    """Both ways through the parser."""
    if request.param == "line by line":
        monkeypatch.setattr(eventlines, "_parsed_whole", lambda block, lines: None)


@pytest.mark.usefixtures("way")
def test_every_field_arrives():
    event = Event(
        "failed",
        "id-1",
        "shop.resize",
        "default",
        2,
        1,
        1.25,
        0.5,
        60.0,
        -0.5,
        "OSError",
        "no space",
        12.5,
        "worker-1",
        "n-1",
        2.5,
        3,
    )
    text = to_line(event, event.id, event.ts, quote(event.worker)).encode()
    events, others = rows(text + line())
    assert [as_event(row) for row in events] == [event, from_line(line())]
    assert others == []


@pytest.mark.usefixtures("way")
def test_what_an_operator_did_arrives():
    event = Event(
        "operator_acted",
        "",
        "",
        "orders",
        ts=12.5,
        worker="ann@desk",
        id="n-1",
        reason="purge 3 dead letters (3 of orders)",
        by="ann@desk",
        action="purge",
        selected=3,
        done=2,
    )
    events, others = rows(to_line(event, event.id, event.ts, quote(event.worker)).encode())
    assert [as_event(row) for row in events] == [event]
    assert others == []


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (b"\n", EMPTY),
        (b"[1]\n", NOT_AN_EVENT),
        (b'{"v":1}\n', NOT_AN_EVENT),
        (b"{}{}\n", NOT_AN_EVENT),
        (line(v=2), NEWER),
        (line(v=2, event="exploded", ts="soon"), NEWER),
        (line(v=0), NOT_AN_EVENT),
        (line(event="exploded", ts="1"), NOT_AN_EVENT),
        (line(ts="1"), NOT_AN_EVENT),
        (line(ts=float("nan")), NOT_AN_EVENT),
        (line(ts=1e16), NOT_AN_EVENT),
        (line(task=None), NOT_AN_EVENT),
        (line(lease_seconds=None), NOT_AN_EVENT),
        (line(delivery_count=1.0), NOT_AN_EVENT),
        (line(delivery_count=2**63), NOT_AN_EVENT),
        (line(renewals=True), NOT_AN_EVENT),
        (line(event="exploded"), NEWER),
        (b'{"id":"\xff"}\n', NOT_AN_EVENT),
        (b"\0" * 4096 + b"\n", NULS),
        (line(error="x" * LINE_LIMIT), TOO_LONG),
    ],
)
def test_a_bad_line_is_told_and_its_neighbours_are_read(bad, what):
    events, others = rows(line() + bad + line())
    assert len(events) == 2
    assert [(row["odd"], row["odd_file"], row["odd_line"]) for row in others] == [
        (what, "a.jsonl", 2)
    ]


@pytest.mark.usefixtures("way")
def test_a_torn_line_at_the_end():
    assert odd(line() + line()[:-5]) == [(TORN, 2)]


@pytest.mark.usefixtures("way")
def test_an_event_behind_nuls_counts_and_the_nuls_are_told():
    """What a power cut leaves: a block of NULs, then what a later writer appended."""
    events, others = rows(line() + b"\0" * 512 + line())
    assert len(events) == 2
    assert [row["odd"] for row in others] == [NULS]


def test_half_a_surrogate_pair_becomes_text():
    (event,), others = rows(b'{"task_id":"\\ud800",' + line()[1:].replace(b'"task_id": "i", ', b""))
    assert event["task_id"] == "\\ud800"
    assert others == []


@pytest.mark.usefixtures("way")
def test_a_clock_that_goes_back_is_told_and_its_events_stay():
    told = [10.0, 11.0, 5.0, 5.5, 12.0, 11.5]
    data = b"".join(line(ts=ts) for ts in told) + line(event="started", ts=1.0)
    events, others = rows(data)
    assert len(events) == 7
    assert [(row["odd"], row["odd_line"]) for row in others] == [(CLOCK_BACK, 3)]
    assert others[0]["odd_text"] == "by 6.0 s, to 5.000000"


def test_a_step_back_between_two_blocks_is_told(monkeypatch):
    monkeypatch.setattr(eventlines, "BLOCK", len(line(ts=100.5)))
    assert odd(line(ts=100.5) + line(ts=90.25)) == [(CLOCK_BACK, 2)]


def test_secrets_in_odd_lines_are_masked():
    ((text,),) = [[row["odd_text"] for row in rows(b"GET https://h/q?sig=abcdefgh x\n")[1]]]
    assert "abcdefgh" not in text


class Zeros(io.RawIOBase):
    """A line of `size` bytes, made as it is read."""

    def __init__(self, size, end):
        self._left, self._end = size, end

    def read(self, size=-1):
        if self._left > 0:
            count = min(size, self._left)
            self._left -= count
            return b"x" * count
        data, self._end = self._end, b""
        return data


def test_a_line_of_100_mb_takes_a_blocks_memory():
    tracemalloc.start()
    batches = list(read_lines(Zeros(100 << 20, b"\n" + line()), "a.jsonl"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert {odd for batch in batches for odd in batch.column("odd").to_pylist()} == {TOO_LONG, None}
    assert peak < 5 * BLOCK


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
)
changes = st.dictionaries(
    st.sampled_from([*EVENT_COLUMNS, "v", "colour"]) | st.text(max_size=4), values, max_size=2
)
lines = st.one_of(
    st.builds(
        lambda kind, ts: line(event=kind, ts=ts),
        st.sampled_from(sorted(EVENT_KINDS)),
        st.floats(0, 1e10),
    ),
    st.builds(lambda change: json.dumps({**GOOD, **change}).encode() + b"\n", changes),
    st.binary(max_size=20).map(lambda data: data + b"\n"),
    st.builds(lambda cut: line()[:cut] + b"\n", st.integers(0, 100)),
    st.just(line()[:-1]),
)


@given(st.lists(lines, max_size=12), st.sampled_from([b"", b"{", b"\0"]))
def test_any_file_is_read_as_the_plain_reader_reads_it(parts, end):
    data = b"".join(parts) + end
    reader = EventReader(".")
    plain = list(reader._lines_of(io.BytesIO(data)))
    events, others = rows(data)
    assert sum(row["odd"] in CORRUPT for row in others) == reader.skipped
    assert [as_event(row)[:10] for row in events] == [event_as_stored(each)[:10] for each in plain]


def event_as_stored(event):
    """Half surrogate pairs as the text of their escape, numbers as floats."""
    return Event(
        *(
            value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
            for value in event
        )
    )
