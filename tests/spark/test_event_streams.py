"""A stream of events reads each file once as it appears, over restarts."""

import json
import random
import time

import pytest
from events_site import line, random_event
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxFiles

from aztask.azure.container import container_client
from aztask.errors import AztaskError, ConfigurationError
from aztask.spark import compact, place_of, stream_events
from aztask.spark.events.compactfiles import CompactedOrigin
from aztask.spark.events.stream import EventFilesStream

FOLDER = "date=2026-09-21/hour=10"
SETTLE = 0.2


def events(*numbers):
    draw = random.Random(4)
    return b"".join(line(random_event(draw, number)) for number in numbers)


def run(spark, frame, checkpoint, sink):
    """All that there is now, in a query that ends; the ids, and how many batches it took."""
    query = (
        frame.select("id")
        .writeStream.format("parquet")
        .option("path", str(sink))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert query.exception() is None
    batches = [batch for batch in query.recentProgress if batch["numInputRows"]]
    return sorted(row["id"] for row in spark.read.parquet(str(sink)).collect()), len(batches)


def test_a_directory_over_restarts(spark, tmp_path):
    folder = tmp_path / "log" / FOLDER
    folder.mkdir(parents=True)
    (folder / "w1-1.jsonl").write_bytes(events(1, 2) + b"[1]\n")
    (folder / "w1-2.jsonl").write_bytes(events(3))
    (folder / ".open.jsonl").write_bytes(events(9))
    (folder / "loop").symlink_to(tmp_path / "log")
    time.sleep(2 * SETTLE)
    frame = stream_events(spark, tmp_path / "log", max_files_per_trigger=1, settle_seconds=SETTLE)
    places = (tmp_path / "checkpoint", tmp_path / "sink")
    assert run(spark, frame, *places) == (["e-1", "e-2", "e-3"], 2)
    (folder / "w2-1.jsonl").write_bytes(events(3, 4))  # a second copy of 3
    time.sleep(2 * SETTLE)
    found, batches = run(spark, frame, *places)
    assert found == ["e-1", "e-2", "e-3", "e-4"]
    assert batches == 1


def test_an_event_from_a_clock_that_is_far_off_does_not_make_the_others_late(spark, tmp_path):
    """Milliseconds for seconds, and a time that no timestamp holds."""
    folder = tmp_path / "log" / FOLDER
    folder.mkdir(parents=True)
    now = time.time()
    event = random_event(random.Random(4), 1)
    times = {"w1-1": [now * 1000, 9e14, -9e14, now - 60], "w1-2": [now - 30], "w1-3": [now - 10]}
    for name, moments in times.items():
        lines = [line(event._replace(id=f"{name}-{n}", ts=ts)) for n, ts in enumerate(moments)]
        (folder / f"{name}.jsonl").write_bytes(b"".join(lines))
        time.sleep(0.01)
    time.sleep(2 * SETTLE)
    frame = stream_events(spark, tmp_path / "log", max_files_per_trigger=1, settle_seconds=SETTLE)
    found, batches = run(spark, frame, tmp_path / "checkpoint", tmp_path / "sink")
    assert batches == 3
    assert set(found) >= {"w1-1-0", "w1-1-1", "w1-1-3", "w1-2-0", "w1-3-0"}


def write(folder, **files):
    """Files with the events of these numbers, in their order."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, numbers in files.items():
        (folder / f"{name}.jsonl").write_bytes(events(*numbers))
        time.sleep(0.01)
    time.sleep(2 * SETTLE)


def ids(*numbers):
    return sorted(f"e-{number}" for number in numbers)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("batch", [None, 1])
def test_what_was_compacted_while_the_query_did_not_run_is_read(spark, tmp_path, keep, batch):
    """Of the compacted file only the sources that the query had not read."""
    log, places = tmp_path / "log", (tmp_path / "checkpoint", tmp_path / "sink")
    frame = stream_events(spark, log, max_files_per_trigger=batch, settle_seconds=SETTLE)
    write(log / FOLDER, a=[1, 2], m=[3])
    assert run(spark, frame, *places)[0] == ids(1, 2, 3)
    write(log / FOLDER, b=[4, 5], k=[6], z=[7])  # between and around the names that were read
    report = compact(None, place_of(str(log)), keep=keep)
    assert (report.source_files, report.events) == (5, 7)
    write(log / FOLDER.replace("10", "11"), c=[8])
    assert run(spark, frame, *places)[0] == ids(*range(1, 9))
    compact(None, place_of(str(log)))
    assert run(spark, frame, *places)[0] == ids(*range(1, 9))  # nothing is new


def test_a_stream_reads_each_row_of_a_compacted_file_once(tmp_path):
    """Without the stream's own removal of second copies: the batches themselves are right."""
    log = tmp_path / "log"
    write(log / FOLDER, a=[1, 2], m=[3])
    stream = EventFilesStream(place_of(str(log)), None, SETTLE, "error")
    first = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    write(log / FOLDER, b=[4, 5], k=[6], z=[7])
    compact(None, place_of(str(log)))
    again = EventFilesStream(place_of(str(log)), None, SETTLE, "error")
    end = again.latestOffset(first, ReadAllAvailable())
    assert rows_of(again, first, end) == ids(4, 5, 6, 7)
    assert rows_of(again, again.initialOffset(), first) == ids(1, 2, 3), "a batch is repeatable"
    assert again.latestOffset(end, ReadAllAvailable()) == end


def rows_of(stream, start, end):
    batches = [b for portion in stream.partitions(start, end) for b in stream.read(portion)]
    return sorted(key for batch in batches for key in batch.column("id").to_pylist())


def undivide(monkeypatch):
    """Compact as earlier releases did."""

    def to_json(self):
        return json.dumps({"sources": self.sources, "duplicates": self.duplicates})

    monkeypatch.setattr(CompactedOrigin, "to_json", to_json)


@pytest.mark.parametrize(
    ("undivided", "found"), [("read", ids(1, 2, 3)), ("skip", []), ("error", None)]
)
def test_files_that_an_earlier_release_compacted(tmp_path, monkeypatch, undivided, found):
    log = tmp_path / "log"
    write(log / FOLDER, a=[1])
    stream = EventFilesStream(place_of(str(log)), None, SETTLE, undivided)
    read = {"until": stream.latestOffset(stream.initialOffset(), ReadAllAvailable())["until"]}
    write(log / FOLDER, b=[2, 3])
    undivide(monkeypatch)
    compact(None, place_of(str(log)))
    time.sleep(2 * SETTLE)
    stream = EventFilesStream(place_of(str(log)), None, SETTLE, undivided)
    if found is None:
        with pytest.raises(AztaskError, match="set the option undivided"):
            stream.latestOffset(read, ReadAllAvailable())
        return
    end = stream.latestOffset(read, ReadAllAvailable())
    assert rows_of(stream, read, end) == found
    assert stream.latestOffset(end, ReadAllAvailable()) == end


def test_a_new_query_reads_files_that_an_earlier_release_compacted(tmp_path, monkeypatch):
    log = tmp_path / "log"
    write(log / FOLDER, a=[1], b=[2, 3])
    undivide(monkeypatch)
    compact(None, place_of(str(log)))
    write(log / FOLDER, c=[4])
    stream = EventFilesStream(place_of(str(log)), 1, SETTLE, "error")
    start, found = stream.initialOffset(), []
    while (end := stream.latestOffset(start, ReadMaxFiles(1))) != start:
        found += rows_of(stream, start, end)
        start = end
    assert sorted(found) == ids(1, 2, 3, 4)


def test_a_query_that_runs_while_an_earlier_release_compacts_goes_on(tmp_path, monkeypatch):
    log = tmp_path / "log"
    write(log / FOLDER, a=[1], b=[2])
    stream = EventFilesStream(place_of(str(log)), None, SETTLE, "error")
    end = stream.latestOffset({"until": 1}, ReadAllAvailable())
    undivide(monkeypatch)
    compact(None, place_of(str(log)))
    time.sleep(2 * SETTLE)
    assert stream.latestOffset(end, ReadAllAvailable()) == end


def test_a_container(spark, tmp_path, blobs):
    with container_client(place_of("stream/log", blobs).address()) as client:
        client.create_container()
        client.upload_blob(f"log/{FOLDER}/w1-1.jsonl", events(1, 2))
        client.upload_blob(f"log/{FOLDER}/w1-2.jsonl", events(2, 3))
    time.sleep(1.5)  # a blob's time is told in seconds
    frame = stream_events(spark, "stream/log", account_variable=blobs, settle_seconds=0.5)
    found, _ = run(spark, frame, tmp_path / "checkpoint", tmp_path / "sink")
    assert found == ["e-1", "e-2", "e-3"]


@pytest.mark.parametrize("path", ["", "abfss://a@b/c"])
def test_a_path_that_cannot_be_read_is_refused_before_the_query(spark, path):
    with pytest.raises(ConfigurationError, match=r"neither a directory|no directory is named"):
        stream_events(spark, path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"settle_seconds": 0}, "settleseconds is 0; give a number above 0"),
        ({"settle_seconds": float("inf")}, "settleseconds is inf"),
        ({"max_files_per_trigger": 0}, "maxfilespertrigger is 0; give a number above 0"),
        ({"undivided": "x"}, "undivided is 'x'; give read, skip or error"),
    ],
)
def test_options_are_refused_before_the_query(spark, tmp_path, options, words):
    with pytest.raises(ConfigurationError, match=words):
        stream_events(spark, tmp_path, **options)
