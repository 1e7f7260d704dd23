"""Events as DataFrames: each event once, and every problem counted."""

import json
import random
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from events_reference import compare, groups
from events_site import BEGIN, line, make_hostile, random_event, write_log

from aztask.errors import ConfigurationError
from aztask.spark import compact, place_of, read_events, statistics
from aztask.spark.events.frame import without_duplicates
from aztask.spark.events.statistics import columns, plain
from aztask.spark.recommendation.recommend import recommend
from aztask.spark.report.page import render
from aztask.spark.report.summary import summarize
from aztask.stores.events.sink import read_events as read_plainly

NOW = 2_000_000_000.0
SIZE = 3000
HOSTILE = "\\udc80\0\x1b[31m<b>\u2028"
"""As it is stored: half a surrogate pair is the text of its escape."""


def make_hard(folder):
    """Put such lines and files into the folder of an hour; how many events are among them."""
    raw = HOSTILE.replace("\\udc80", "\udc80")
    good = {"id": "h", "v": 1, "event": "succeeded", "ts": BEGIN, "task_id": "i", "task": "t",
            "queue": "q", "worker": "w", "held_seconds": 1.0}  # fmt: skip
    changes = [
        *({name: raw, "id": f"{raw}-{name}"} for name in ("task", "queue", "worker", "error")),
        {"event": "failed", "error_type": raw},
        *({"ts": ts} for ts in (9e14, -9e14, 1.79e12)),
        *({"task": "many", "renewals": 2**62} for _ in range(4)),
        *({"delivery_count": 2**63 - 1, "resubmit_count": 2**63 - 1} for _ in range(2)),
        *({name: 9e14} for name in ("duration_seconds", "lease_seconds", "margin_seconds")),
    ]
    lines = [{**good, "id": f"h-{number}", **change} for number, change in enumerate(changes)]
    ordered = sorted(lines, key=lambda each: each["ts"])
    (folder / "hard-1.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ordered))
    with open(bytes(folder) + b"/name-\xff.jsonl", "wb") as stream:  # noqa: PTH123  # no UTF-8
        stream.write(b"x\n")
    foreign = {"id": ["f-1", None, "f-2"], "event": ["succeeded", "succeeded", None]}
    events = {name: [good[name]] * 3 for name in ("ts", "task_id", "task", "queue", "worker")}
    pq.write_table(pa.table({**foreign, **events, "renewals": [1, 2, 3]}), folder / "other.parquet")
    pq.write_table(pa.table({"a": [1, 2]}), folder / "quite-other.parquet")
    texts = pa.table({**foreign, **events, "ts": ["x", "y", "z"]})
    pq.write_table(texts, folder / "texts.parquet")
    (folder / "no.parquet").write_bytes(b"PAR1 and then something else")
    return len(lines) + 1


@pytest.fixture
def log(tmp_path):
    """(directory, its events), with `SIZE` events."""
    draw = random.Random(1)
    events = [random_event(draw, number) for number in range(SIZE)]
    write_log(tmp_path / "a log [1]", events)
    return tmp_path / "a log [1]", events


def ids(frame):
    return sorted(row["id"] for row in frame.select("id").collect())


def test_a_hostile_directory_is_read_and_every_oddity_counted(spark, log):
    directory, events = log
    expected = make_hostile(directory)
    read = read_events(spark, directory)
    assert read.counts.odd == expected
    assert read.counts.skipped == {
        "folder": 1,
        "hidden name": 3,
        "link": 1,
        "not an event file": 1,
    }
    copied = len(
        (directory / "date=2026-09-21").glob("hour=*/copy*").__next__().read_bytes().splitlines()
    )
    assert read.counts.duplicates == copied
    assert ids(read.events) == sorted(
        [event.id for event in events] + [f"back-{n}" for n in range(3)]
    )
    assert read.counts.events == SIZE + 3
    assert read.corrupt.count() == sum(expected.values()) - expected["clock went back"]
    check_statistics(read.events, read_plainly(directory, published_only=True))


def check_statistics(events, plain_events):
    """Every figure of every level, against plain Python."""
    figures = statistics(events)
    expected = groups(plain_events)
    compared = 0
    for level, frame in (
        ("task", figures.by_task),
        ("queue", figures.by_queue),
        ("queue_hour", figures.by_queue_hour),
        ("total", figures.total),
    ):
        keys = [name for name in ("task", "queue", "hour") if name in frame.columns]
        rows = {tuple(row[key] for key in keys): row for row in plain(frame)}
        assert rows.keys() == expected[level].keys()
        assert frame.columns == [*keys, *columns()]
        for key, row in rows.items():
            compared += compare(row, expected[level][key])
    figures.close()
    return compared


def test_one_bad_line_or_file_harms_nothing_else(spark, log):
    """Values that are allowed and hard to handle, and files that are damaged or not ours."""
    directory, _ = log
    compact(spark, place_of(directory), now=BEGIN + 2.5 * 3600)  # the first of three hours
    folder = sorted(directory.glob("date=*/hour=*"))[0]
    hard = make_hard(folder)
    told = []
    for _ in range(2):  # as lines, and compacted
        read = read_events(spark, directory)
        told.append(read.counts)
        summary = summarize(read)
        assert [row["renewals_mean"] for row in summary.tasks if row["task"] == "many"] == [2**62]
        assert "\0" not in render(summary)
        assert {each.queue for each in recommend(read.events)} >= {HOSTILE, "queue-0"}
        read.close()
        compact(spark, place_of(directory), now=NOW)
    assert told[0].odd == {"damaged Parquet file": 2, "not an event": 2}
    assert told[0].skipped == {"damaged Parquet file": 1, "not an event file": 1}
    assert told[0].events == SIZE + hard
    assert (told[1].events, told[1].odd) == (told[0].events, told[0].odd)


def test_compacted_and_not_the_same_numbers(spark, log):
    """Some hours compacted, some not, and a file that came late."""
    directory, _ = log
    expected = make_hostile(directory)
    before = read_events(spark, directory)
    late = line(random_event(random.Random(2), SIZE))
    told = before.counts
    everything = sorted([*ids(before.events), f"e-{SIZE}"])
    report = compact(spark, place_of(directory), now=BEGIN + 2.5 * 3600)
    assert report.events < told.events
    (directory / "date=2026-09-21" / "hour=00").mkdir(parents=True, exist_ok=True)
    hours = sorted(directory.glob("date=*/hour=*"))
    (hours[0] / "late-1.jsonl").write_bytes(late)
    for _ in range(2):  # half, and then all of it
        after = read_events(spark, directory)
        assert after.counts.events == told.events + 1
        assert after.counts.duplicates == told.duplicates
        assert after.counts.odd == expected
        assert ids(after.events) == everything
        compact(spark, place_of(directory), now=NOW)
    assert after.counts.compacted_files > 0
    assert not list(directory.glob("date=*/hour=*/[!._]*.jsonl"))


def test_many_tasks_and_the_data_source_read_the_same_rows(spark, log, monkeypatch):
    """Lines, a compacted hour and what is odd, dealt out to more tasks than one."""
    directory, _ = log
    make_hostile(directory)
    compact(None, place_of(directory), now=BEGIN + 2.5 * 3600)
    whole = read_events(spark, directory, check_duplicates=False)
    expected = rows(whole.events), rows(whole.odd)
    monkeypatch.setattr("aztask.spark.events.source.PARTITION_BYTES", 40_000)
    dealt = read_events(spark, directory, check_duplicates=False)
    assert dealt.events.rdd.getNumPartitions() > whole.events.rdd.getNumPartitions() > 1
    assert (rows(dealt.events), rows(dealt.odd)) == expected
    source = spark.read.format("aztask_events").load(str(directory))
    odd = source.where("odd IS NOT NULL").select(whole.odd.columns)
    assert (rows(source.where("odd IS NULL").select(whole.events.columns)), rows(odd)) == expected
    assert len(expected[0]) > SIZE
    assert expected[1]


def rows(frame):
    return sorted(map(repr, frame.collect()))


def test_sources_that_are_kept_do_not_count_twice(spark, log):
    directory, _ = log
    report = compact(None, place_of(directory), now=NOW, keep=True)
    read = read_events(spark, directory)
    assert report.removed == 0
    assert read.counts.events == SIZE
    assert read.counts.duplicates == 0
    assert read.counts.skipped == {"compacted already": report.source_files}
    again = compact(None, place_of(directory), now=NOW, keep=True)
    assert again.compacted_files == 0


def test_a_damaged_parquet_file_is_told_and_its_sources_are_read(spark, log, caplog):
    directory, _ = log
    compact(None, place_of(directory), now=NOW, keep=True)
    victim = sorted(directory.glob("date=*/hour=*/*.parquet"))[0]
    victim.write_bytes(victim.read_bytes()[:-100])
    read = read_events(spark, directory)
    assert read.counts.events == SIZE
    assert read.counts.skipped["damaged Parquet file"] == 1
    assert victim.name in caplog.text


@pytest.mark.parametrize("few", [100_000, 3])
def test_duplicates_by_id_alone(spark, monkeypatch, few):
    """A few repeated ids are looked at alone; many take the plain way."""
    monkeypatch.setattr("aztask.spark.events.frame.MAX_BROADCAST_IDS", few)
    rows = spark.range(0, 10, 1, 2).unionByName(spark.range(0, 5, 1, 2))
    frame = rows.selectExpr("concat('e-', id) AS id", "id AS ts")
    once, dropped = without_duplicates(frame)
    assert dropped == 5
    assert ids(once) == sorted(f"e-{number}" for number in range(10))
    alone = "LeftAnti" in once._jdf.queryExecution().toString()
    assert alone == (few > 5)


def test_an_empty_directory_and_none_at_all(spark, tmp_path):
    read = read_events(spark, tmp_path)
    assert (read.counts.events, read.events.count()) == (0, 0)
    (total,) = plain(statistics(read.events).total) or [None]
    assert total is None or total["events"] == 0
    with pytest.raises(ConfigurationError, match="cannot be listed"):
        read_events(spark, tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="neither a directory nor blob://"):
        place_of("abfss://x@y/z")


@pytest.fixture
def lake(spark, tmp_path):
    """A scheme of Hadoop's own for the test's folder: a mount table, as data lakes have them."""
    name = "fs.viewfs.mounttable.lake.link./events"
    spark.conf.set(name, f"file://{tmp_path}")
    yield "viewfs://lake/events"
    spark.conf.unset(name)


@pytest.mark.parametrize("scheme", ["file", "viewfs"])
def test_spark_reads_what_a_directory_holds_at_any_path_that_it_knows(spark, log, lake, scheme):
    """Lines, compacted hours beside their sources, damaged files, and what is odd."""
    directory, _ = log
    expected = make_hostile(directory)
    compact(None, place_of(directory), now=BEGIN + 2.5 * 3600, keep=True)
    (whole,) = directory.glob("date=*/hour=*/*.parquet")
    beside = whole.parent.parent / "hour=07"
    beside.mkdir()
    behind = bytearray(whole.read_bytes())
    behind[100:2100] = bytes(2000)
    (beside / "damaged.parquet").write_bytes(behind)
    (beside / "cut.parquet").write_bytes(whole.read_bytes()[:-100])
    plain_read = read_events(spark, directory)
    path = f"file://{directory}" if scheme == "file" else f"{lake}/{directory.name}"
    read = read_events(spark, path)
    assert read.counts.odd == plain_read.counts.odd
    assert read.counts.odd.items() >= (expected | {"damaged Parquet file": 1}).items()
    assert read.counts.skipped["damaged Parquet file"] == 1
    assert read.counts.skipped["compacted already"] > 0
    for name in ("files", "compacted_files", "events", "duplicates"):
        assert getattr(read.counts, name) == getattr(plain_read.counts, name)
    assert ids(read.events) == ids(plain_read.events)
    where = ("odd", "odd_file", "odd_line")
    told = [sorted(tuple(row[n] or "" for n in where[:2]) for row in each.odd.collect())
            for each in (read, plain_read)]  # fmt: skip
    assert told[0] == told[1]
    read.close()
    plain_read.close()


def test_a_path_that_spark_cannot_list_is_one_line(spark, tmp_path):
    with pytest.raises(ConfigurationError, match=r"nowhere' cannot be listed: .*PATH_NOT_FOUND"):
        read_events(spark, f"file://{tmp_path}/nowhere")
    with pytest.raises(ConfigurationError, match=r"cannot be listed: .*nosuch"):
        read_events(spark, "nosuch://x/y")
    read = read_events(spark, f"file://{tmp_path}")
    assert (read.counts.events, read.events.count()) == (0, 0)


def test_a_file_that_vanishes_while_it_is_read_fails_loudly(spark, log):
    directory, _ = log
    read = read_events(spark, directory, check_duplicates=False)
    shutil.rmtree(directory / "date=2026-09-21")
    with pytest.raises(Exception, match="read again"):
        read.events.count()


@pytest.mark.parametrize(("folder", "file"), [(0o755, 0o644), (0o750, 0o640), (0o700, 0o600)])
def test_compacted_files_are_read_by_the_readers_of_their_directory_alone(log, folder, file):
    directory, _ = log
    for hour in directory.glob("date=*/hour=*"):
        hour.chmod(folder)
    compact(None, place_of(directory), now=NOW)
    made = list(directory.glob("date=*/hour=*/*.parquet"))
    assert [path.stat().st_mode & 0o777 for path in made] == [file] * 3
