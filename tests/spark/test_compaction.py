"""Compaction is atomic and repeatable: it is killed at each step."""

import os
import random
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
from events_site import line, random_event, write_log

from aztask.spark import compact, place_of
from aztask.spark.events.compactfiles import is_sound, plan_of, read_compacted
from aztask.spark.events.compaction import CHUNK_BYTES, _chunks, _end_of, compact_chunk
from aztask.spark.events.files import Directory
from aztask.spark.events.lines import DAMAGED, read_lines
from aztask.spark.events.places import EventPlace
from aztask.spark.events.source import Portion, read_portion
from aztask.support.failpoint import VARIABLE

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
    return sorted(each for each in found if each is not None)


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


def test_open_hours_are_counted_and_say_until_when(log):
    hours = sorted(path.parent.relative_to(log).as_posix() for path in log.glob("*/*/*.jsonl"))
    first, last = _end_of(hours[0]), _end_of(hours[-1])
    report = compact(None, place_of(log), now=first + 100.0, closed_seconds=200.0, keep=True)
    assert (report.hours, report.open_hours) == (0, len(set(hours)))
    assert report.open_until == last + 200.0
    report = compact(None, place_of(log), now=first + 200.0, closed_seconds=200.0)
    assert (report.hours, report.open_hours) == (1, len(set(hours)) - 1)
    report = compact(None, place_of(log), now=NOW)
    assert (report.open_hours, report.open_until) == (0, 0.0)


def test_a_clock_that_went_back_damages_no_line(tmp_path):
    event = random_event(random.Random(1), 1)._replace(event="succeeded")
    folder = tmp_path / "date=2026-09-21/hour=10"
    folder.mkdir(parents=True)
    lines = [line(event._replace(id=f"e-{n}", ts=100.0 - 10 * n)) for n in range(3)]
    (folder / "w1-1.jsonl").write_bytes(b"".join(lines) + b"[1]\n")
    report = compact(None, place_of(tmp_path), now=NOW)
    assert (report.events, report.clock_steps, report.odd) == (3, 2, 1)


def test_a_file_with_events_of_a_newer_release_is_left_to_it(log):
    """Of such an event only the beginning would be kept, and a release that knows it comes soon."""
    place = place_of(log)
    sources = sorted(log.glob("date=*/hour=*/*.jsonl"))
    newer = line(random_event(random.Random(1), SIZE)).replace(b'"v":1', b'"v":2')
    whole = sources[0].read_bytes() + newer
    sources[0].write_bytes(whole)
    report = compact(None, place, now=NOW)
    assert (report.newer, report.odd, report.removed) == (1, 0, len(sources) - 1)
    assert sources[0].read_bytes() == whole
    assert ids(place) == sorted(f"e-{number}" for number in range(SIZE))
    again = compact(None, place, now=NOW)
    assert (again.newer, again.compacted_files, again.removed) == (1, 0, 0)


def test_a_closed_hour_is_much_smaller(log):
    report = compact(None, place_of(log), now=NOW)
    assert report.bytes_after * 4 < report.bytes_before
    assert (report.events, report.duplicates, report.odd) == (SIZE, 0, 0)
    assert report.hours == report.compacted_files == 3


def test_a_damaged_file_is_read_up_to_the_damage(log):
    """Each byte of one page is turned over, as by a bad disk; the footer is whole."""
    place = place_of(log)
    compact(None, place, now=NOW, chunk_bytes=1 << 30)
    file = max(plan_of(place).compacted, key=lambda each: each.size)
    path = log / file.name
    whole = [batch.to_pylist() for batch in read_compacted(place, file.name)]
    assert is_sound(place, file.name)
    column = pq.read_metadata(path).row_group(0).column(0)
    data = bytearray(path.read_bytes())
    begin = column.data_page_offset + 30
    data[begin : begin + 200] = bytes(byte ^ 0xFF for byte in data[begin : begin + 200])
    path.write_bytes(data)
    assert not is_sound(place, file.name)
    *before, (odd,) = [batch.to_pylist() for batch in read_compacted(place, file.name)]
    assert before == whole[: len(before)]
    assert (odd["odd"], odd["odd_file"], odd["id"]) == (DAMAGED, file.name, None)
    with pytest.raises(FileNotFoundError):
        list(read_compacted(place, "date=2026-09-21/hour=00/nosuch.parquet"))


def test_a_damaged_compacted_file_does_not_cost_its_sources(log):
    """It has the name that theirs would have: a copy that was cut short, for example."""
    place = place_of(log)
    compact(None, place, now=NOW, keep=True)
    for path in log.glob("date=*/hour=*/*.parquet"):
        path.write_bytes(path.read_bytes()[:-100])
    report = compact(None, place, now=NOW)
    assert (report.compacted_files, report.removed) == (0, 0)
    assert ids(place) == sorted(f"e-{number}" for number in range(SIZE))


def test_a_file_that_cannot_be_read_stays_and_its_neighbours_are_compacted(log, monkeypatch):
    place, opened = place_of(log), Directory.open
    sources = sorted(str(path.relative_to(log)) for path in log.glob("date=*/hour=*/*.jsonl"))
    bad = sources[1]

    def refuse(self, name):
        if name == bad:
            raise PermissionError(13, "Permission denied")
        return opened(self, name)

    monkeypatch.setattr(Directory, "open", refuse)
    files = [file for file in place.list().files if file.name in sources[:3]]
    rows = [row for each in read_portion(place, Portion(tuple(files))) for row in each.to_pylist()]
    odd = [(row["odd"], row["odd_text"], row["odd_file"]) for row in rows if row["odd"]]
    assert odd == [("unreadable file", "Permission denied", bad)]
    report = compact(None, place, now=NOW)
    assert (report.unreadable, report.removed) == (1, len(sources) - 1)
    assert [str(path.relative_to(log)) for path in log.glob("date=*/hour=*/*.jsonl")] == [bad]
    assert compact(None, place, now=NOW).compacted_files == 0  # there is nothing else to compact
    monkeypatch.setattr(Directory, "open", opened)
    compact(None, place, now=NOW)
    assert ids(place) == sorted(f"e-{number}" for number in range(SIZE))
