"""Compaction is atomic and can be done again: killed at each step, and on a container too."""

import logging
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from azurite import KEY
from events_site import random_event, write_log

from aztask.failpoint import VARIABLE
from aztask.results.eventblobs import container_client
from aztask.spark import compact, place_of, read_events
from aztask.spark.compactfiles import plan_of, read_compacted
from aztask.spark.compaction import CHUNK_BYTES, _chunks, compact_chunk
from aztask.spark.eventlines import read_lines
from aztask.spark.eventplaces import EventPlace

NOW = 2_000_000_000.0
SIZE = 2000
SCRIPT = (
    "import sys\n"
    "from aztask.spark import compact, place_of\n"
    f"compact(None, place_of(sys.argv[1]), now={NOW}, chunk_bytes=100_000)\n"
)


@pytest.fixture
def log(tmp_path):
    draw = random.Random(3)
    events = [random_event(draw, number) for number in range(SIZE)]
    write_log(tmp_path / "log", events)
    return tmp_path / "log"


def ids(place: EventPlace) -> list[str]:
    """Every event's id, as a reader finds them, with repetitions."""
    plan = plan_of(place)
    found = []
    for file in plan.lines:
        with place.open(file.name) as stream:
            for batch in read_lines(stream, file.name):
                found += batch.column("id").to_pylist()
    for file in plan.compacted:
        for batch in read_compacted(place, file.name):
            found += batch.column("id").to_pylist()
    return sorted(found)


@pytest.mark.parametrize(
    "step",
    ["compact-written:KILL", "compact-published:KILL:2", "compact-removed:KILL:3"],
)
def test_killed_at_each_step_nothing_is_lost_and_nothing_counts_twice(log, step):
    place = place_of(log)
    everything = sorted(f"e-{number}" for number in range(SIZE))
    sources = len(list(log.glob("date=*/hour=*/*.jsonl")))
    killed = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(log)], env={**os.environ, VARIABLE: step}, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert ids(place) == everything
    left = len(list(log.glob("date=*/hour=*/*.jsonl")))
    assert left == sources - (3 if "removed" in step else 0) or "published" in step
    report = compact(None, place, now=NOW, chunk_bytes=100_000)
    assert report.removed == left
    assert ids(place) == everything
    assert not list(log.glob("date=*/hour=*/[!._]*.jsonl"))
    again = compact(None, place, now=NOW)
    assert (again.compacted_files, again.removed) == (0, 0)


def test_an_attempt_that_is_run_again_finds_what_it_published(log):
    """A Spark task that is lost after publishing is run again with the same chunk."""
    place = place_of(log)
    compact(None, place, now=NOW, keep=True)
    before = {path: path.stat().st_mtime_ns for path in log.glob("date=*/hour=*/*.parquet")}
    for path in list(log.glob("date=*/hour=*/.*")):
        path.unlink()
    for chunk in _chunks([f for f in place.list().files if not f.compacted], CHUNK_BYTES):
        compact_chunk(place, chunk, keep=False)
        compact_chunk(place, chunk, keep=False)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert ids(place) == sorted(f"e-{number}" for number in range(SIZE))


def test_open_hours_stay(log):
    assert compact(None, place_of(log), now=time.time() - 10**9).compacted_files == 0


def test_a_closed_hour_is_much_smaller(log):
    report = compact(None, place_of(log), now=NOW)
    assert report.bytes_after * 4 < report.bytes_before
    assert (report.events, report.duplicates, report.odd) == (SIZE, 0, 0)
    assert report.hours == report.compacted_files == 3


def test_events_in_a_container_are_read_and_compacted(spark, log, blobs, caplog, capfd):
    """Through azure-storage-blob, by driver and executors; no option and no log has the secret."""
    caplog.set_level(logging.DEBUG)
    with container_client(place_of("events/log", blobs).address()) as client:
        client.create_container()
        for path in log.glob("date=*/hour=*/*.jsonl"):
            name = f"log/{path.relative_to(log).as_posix()}"
            client.upload_blob(name, path.read_bytes())
    read = read_events(spark, "events/log", account_variable=blobs)
    assert read.counts.events == SIZE
    lines_only = read.events.orderBy("id").collect()
    place = place_of("events/log", blobs)
    report = compact(spark, place, now=NOW)
    assert report.events == SIZE
    assert report.compacted_files == 3
    assert [file.compacted for file in place.list().files] == [True] * 3
    after = read_events(spark, "events/log", account_variable=blobs)
    assert after.events.orderBy("id").collect() == lines_only
    assert after.counts.compacted_files == 3
    plan = after.events._jdf.queryExecution().toString()
    shown = [plan, str(spark.sparkContext.getConf().getAll()), caplog.text, *capfd.readouterr()]
    assert "PUT" in caplog.text  # the requests are in the log, so it would show a key
    for text in shown:
        assert os.environ[blobs] not in text
        assert KEY not in text
        assert "AccountKey" not in text
