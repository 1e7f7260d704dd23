"""A stream of events reads each file once as it appears, over restarts."""

import random
import time

import pytest
from events_site import line, random_event

from aztask.azure.container import container_client
from aztask.errors import ConfigurationError
from aztask.spark import place_of, stream_events

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
