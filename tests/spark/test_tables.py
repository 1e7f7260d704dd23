"""Delta tables of events: no event is lost or there twice, despite kills and other writers."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime

import duckdb
import polars
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction
from events_site import BEGIN, line, make_hostile, random_event, write_log

from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.spark import append_events, compact, place_of, read_events, read_table
from aztask.spark.events.places import EventPlace
from aztask.spark.tables import deltalog, tablefiles
from aztask.spark.tables.deltalog import Unit, commit, missing, open_table
from aztask.spark.tables.tablefiles import EVENTS, TableKind, WriteEvents, WrittenFile
from aztask.support.failpoint import VARIABLE

NOW = 2_000_000_000.0
SIZE = 2000
ONCE = "SELECT * FROM events QUALIFY row_number() OVER (PARTITION BY id ORDER BY source) = 1"
SCRIPT = (
    "import sys\n"
    "from aztask.spark import append_events, place_of\n"
    "append_events(None, place_of(sys.argv[1]), place_of(sys.argv[2]))\n"
)


@pytest.fixture
def log(tmp_path) -> EventPlace:
    """A log of three hours, compacted into several files each."""
    draw = random.Random(3)
    write_log(tmp_path / "log", [random_event(draw, number) for number in range(SIZE)])
    place = place_of(tmp_path / "log")
    compact(None, place, now=NOW, chunk_bytes=100_000)
    return place


@pytest.fixture
def tables(tmp_path) -> EventPlace:
    return place_of(tmp_path / "tables")


def table(tables: EventPlace, name: str = "events") -> DeltaTable:
    return DeltaTable(f"{tables}/{name}")


def ids(tables: EventPlace) -> list[str]:
    """The id of every row of the table, with repetitions."""
    return sorted(table(tables).to_pyarrow_table(columns=["id"])["id"].to_pylist())


EVERYTHING = sorted(f"e-{number}" for number in range(SIZE))


def test_compacted_events_become_a_table_and_only_new_files_are_added(log, tables, tmp_path):
    files = [file for file in log.list().files if file.compacted]
    report = append_events(None, log, tables)
    assert (report.files, report.there, report.rows, report.odd) == (len(files), 0, SIZE, 0)
    assert ids(tables) == EVERYTHING
    again = append_events(None, log, tables)
    assert (again.files, again.there, again.version) == (0, len(files), report.version)
    late = random_event(random.Random(9), SIZE)._replace(worker="late")
    write_log(tmp_path / "log", [late], files=99)
    compact(None, log, now=NOW)
    assert append_events(None, log, tables).files == 1
    assert ids(tables) == sorted([*EVERYTHING, late.id])


def test_columns_have_real_times_and_the_partition_is_the_day(log, tables):
    append_events(None, log, tables)
    read = table(tables)
    assert read.metadata().partition_columns == ["date"]
    assert pa.schema(read.schema()).names == EVENTS.schema.names
    draw = random.Random(3)
    expected = {each.id: each for each in (random_event(draw, n) for n in range(SIZE))}
    rows = read.to_pyarrow_table().to_pylist()
    for row in rows:
        event = expected[row["id"]]
        assert row["at"] == datetime.fromtimestamp(event.ts, UTC)
        assert row["hour"] == row["at"].hour
        assert row["date"] == date(2026, 9, 21)
        assert row["event"] == event.event
        assert row["duration_seconds"] == event.duration_seconds
        assert row["source"].startswith(f"date=2026-09-21/hour={row['hour']:02d}/compacted-")


def test_readers_skip_files_by_the_time_in_the_log(log, tables):
    """The span of a file is rounded outwards, so no row is beyond it."""
    append_events(None, log, tables)
    actions = pa.table(table(tables).get_add_actions(flatten=True))
    rows = table(tables).to_pyarrow_table(columns=["at", "source"])
    assert sum(actions["num_records"].to_pylist()) == SIZE
    spans = list(zip(actions["min.at"].to_pylist(), actions["max.at"].to_pylist(), strict=True))
    by_source: dict[str, list[datetime]] = {}
    for at, source in zip(rows["at"].to_pylist(), rows["source"].to_pylist(), strict=True):
        by_source.setdefault(source, []).append(at)
    for times in by_source.values():
        near = [
            (low, high)
            for low, high in spans
            if low <= min(times)
            and max(times) <= high
            and (min(times) - low).total_seconds() < 0.001
            and (high - max(times)).total_seconds() < 0.001
        ]
        assert near
    middle = datetime.fromtimestamp(BEGIN + 1800, UTC)
    before = [at for at in rows["at"].to_pylist() if at < middle]
    filtered = table(tables).to_pyarrow_table(filters=[("at", "<", middle)])
    assert 0 < filtered.num_rows == len(before) < SIZE


@pytest.mark.parametrize(
    ("step", "reached"),
    [("table-written:KILL", False), ("table-odd:KILL", False), ("table-committed:KILL", True)],
)
def test_a_killed_driver_loses_nothing_and_adds_nothing_twice(step, reached, tmp_path, tables):
    events = [random_event(random.Random(3), number) for number in range(SIZE)]
    write_log(tmp_path / "log", events)
    wrong = tmp_path / "log" / "date=2026-09-21" / "hour=10" / "wrong.jsonl"
    wrong.parent.mkdir(exist_ok=True)
    wrong.write_bytes(b"[1]\n[2]\n")
    log = place_of(tmp_path / "log")
    compact(None, log, now=NOW)
    command = [sys.executable, "-c", SCRIPT, str(log), str(tables)]
    killed = subprocess.run(command, env={**os.environ, VARIABLE: step}, check=False)
    assert killed.returncode == -signal.SIGKILL
    written = list((tmp_path / "tables").glob("*/date=*/part-*.parquet"))
    assert written
    assert (open_table(tables, "events") is not None) == reached
    files = len([file for file in log.list().files if file.compacted])
    report = append_events(None, log, tables)
    assert report.files == (0 if reached else files)
    assert ids(tables) == sorted(event.id for event in events)
    assert sorted(table(tables, "odd").to_pyarrow_table()["odd_line"].to_pylist()) == [1, 2]
    # What the killed one wrote is in the folder, not in the table, until VACUUM removes it.
    assert all(path.exists() for path in written)
    both = [table(tables), table(tables, "odd")]
    listed = {uri for each in both for uri in each.file_uris()}
    left = {str(path) for path in tmp_path.glob("tables/*/date=*/part-*.parquet")} - listed
    assert bool(left) == (not reached)
    for each in both:
        each.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    kept = {str(path) for path in tmp_path.glob("tables/*/date=*/part-*.parquet")}
    assert kept == listed
    assert ids(tables) == sorted(event.id for event in events)


def test_many_writers_at_once_add_each_file_once(log, tables):
    """Processes, as two runs of a scheduler that overlap."""
    command = [sys.executable, "-c", SCRIPT, str(log), str(tables)]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(4)]
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert writer.returncode == 0, errors.decode()
    assert ids(tables) == EVERYTHING


def units_of(log: EventPlace, tables: EventPlace) -> list[Unit]:
    work = WriteEvents(log, tables)
    names = [file.name for file in log.list().files if file.compacted]
    return [Unit(name, 1, work.files(name)) for name in names]


def test_a_writer_that_was_refused_adds_only_what_the_other_one_did_not(log, tables, monkeypatch):
    """Both have read the same version; the second one is refused and reads again."""
    first, second = units_of(log, tables), units_of(log, tables)
    half = len(first) // 2
    write, calls = deltalog._write, []

    def slow(found, kind, units):
        calls.append(len(units))
        if len(calls) == 1:  # another writer commits after this one has read the table
            commit(tables, kind, first[:half])
        write(found, kind, units)

    commit(tables, EVENTS, [Unit("nothing", 1, ())])
    monkeypatch.setattr(deltalog, "_write", slow)
    _, added = commit(tables, EVENTS, second)
    assert calls == [len(first), half, len(first) - half]
    assert [unit.name for unit in added] == [unit.name for unit in second[half:]]
    assert ids(tables) == EVERYTHING


def test_threads_that_commit_at_once_lose_nothing(log, tables):
    units = units_of(log, tables)
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(lambda unit: commit(tables, EVENTS, [unit]), units * 2))
    assert sum(len(added) for _, added in done) == len(units)
    assert ids(tables) == EVERYTHING


def test_an_equal_and_a_lower_version_are_skipped(tables):
    """The library accepts them, which is why the rule is ours."""
    commit(tables, EVENTS, [Unit("a", 5, ())])
    found = open_table(tables, "events")
    assert found is not None
    before = found.version()
    for version in (5, 4):
        assert commit(tables, EVENTS, [Unit("a", version, ())]) == (before, [])
    assert missing(found, [Unit("a", 5, ()), Unit("a", 6, ()), Unit("b", 1, ())])[0].version == 6
    found.create_write_transaction(
        [], "append", found.schema(), ["date"],
        commit_properties=CommitProperties(app_transactions=[Transaction("a", 1)]),
    )  # fmt: skip
    assert table(tables).transaction_version("a") == 1


def test_a_writer_gives_up_when_it_is_always_refused(tables, monkeypatch):
    commit(tables, EVENTS, [Unit("a", 1, ())])

    def refused(*_):
        raise deltalog.CommitFailedError("another writer")

    monkeypatch.setattr(deltalog, "_write", refused)
    monkeypatch.setattr(deltalog, "ATTEMPTS", 3)
    with pytest.raises(BrokerUnavailable, match=r"the table 'events' of .*: another writer"):
        commit(tables, EVENTS, [Unit("b", 1, ())])


def test_what_a_table_holds_survives_optimize_checkpoint_and_vacuum(log, tables, tmp_path):
    append_events(None, log, tables)
    table(tables).optimize.compact()
    table(tables).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    table(tables).create_checkpoint()
    for path in sorted((tmp_path / "tables/events/_delta_log").glob("*.json"))[:-1]:
        path.unlink()  # as a clean-up of old log files does
    assert append_events(None, log, tables).files == 0
    assert ids(tables) == EVERYTHING


def test_a_table_of_an_earlier_release_gets_the_new_columns(log, tables):
    old = [each for each in EVENTS.schema if each.name not in ("workflow_id", "selected")]
    earlier = TableKind("events", pa.schema(old), "date", "at")
    row = {"id": "old", "event": "succeeded", "hour": 10, "source": "before"}
    batch = pa.RecordBatch.from_pylist([row], earlier.stored)
    with tablefiles.TableWriter(tables, "before") as writer:
        writer.write(earlier, "2026-09-20", batch)
        commit(tables, earlier, [Unit("before", 1, writer.finish())])
    append_events(None, log, tables)
    assert ids(tables) == sorted([*EVERYTHING, "old"])
    read = table(tables).to_pyarrow_table()
    assert set(read.column_names) == set(EVENTS.schema.names)
    assert [r["workflow_id"] for r in read.to_pylist() if r["id"] == "old"] == [None]


def test_a_table_of_a_newer_release_is_appended_to(log, tables):
    newer = TableKind("events", EVENTS.schema.append(pa.field("later", pa.int64())), "date", "at")
    commit(tables, newer, [Unit("later", 1, ())])
    append_events(None, log, tables)
    assert set(table(tables).to_pyarrow_table()["later"].to_pylist()) == {None}
    assert ids(tables) == EVERYTHING


def test_a_column_of_another_type_is_refused(log, tables):
    other = [pa.field("hour", pa.string()) if e.name == "hour" else e for e in EVENTS.schema]
    commit(tables, TableKind("events", pa.schema(other), "date"), [Unit("x", 1, ())])
    with pytest.raises(ConfigurationError, match="'hour' of the table 'events' is string, not int"):
        append_events(None, log, tables)


def test_odd_rows_are_apart_and_times_beyond_calendars_are_null(tmp_path, tables):
    events = [random_event(random.Random(1), number) for number in range(60)]
    write_log(tmp_path / "log", events)
    expected = make_hostile(tmp_path / "log")
    far = events[0]._replace(event="started", id="far", ts=9e14)
    (tmp_path / "log/date=2026-09-21/hour=10").mkdir(exist_ok=True)
    (tmp_path / "log/date=2026-09-21/hour=10/far.jsonl").write_bytes(line(far))
    log = place_of(tmp_path / "log")
    compact(None, log, now=NOW)
    report = append_events(None, log, tables)
    odd = table(tables, "odd").to_pyarrow_table().to_pylist()
    counted = {kind: [row["odd"] for row in odd].count(kind) for kind in expected}
    assert counted == expected
    assert report.odd == len(odd) == sum(expected.values())
    rows = {row["id"]: row for row in table(tables).to_pyarrow_table().to_pylist()}
    assert rows["far"]["at"] is None
    assert report.rows == table(tables).to_pyarrow_table().num_rows == len(rows)
    assert rows.keys() >= {event.id for event in events}


def test_a_file_whose_end_is_damaged_is_left_out_until_it_is_whole(log, tables, tmp_path):
    file = next(file for file in log.list().files if file.compacted)
    path = tmp_path / "log" / file.name
    whole = path.read_bytes()
    path.write_bytes(whole[:-4] + b"xxxx")
    report = append_events(None, log, tables)
    assert report.skipped == 1
    assert len(ids(tables)) < SIZE
    path.write_bytes(whole)
    assert append_events(None, log, tables).files == 1
    assert ids(tables) == EVERYTHING


def test_a_file_in_a_folder_of_no_day_is_not_added(log, tables, tmp_path):
    file = next(file for file in log.list().files if file.compacted)
    folder = tmp_path / "log" / "date=2026-13-45" / "hour=10"
    folder.mkdir(parents=True)
    shutil.copy(tmp_path / "log" / file.name, folder / "compacted-x.parquet")
    append_events(None, log, tables)
    assert ids(tables) == EVERYTHING


def test_files_are_private_as_the_events_are(log, tables, tmp_path):
    append_events(None, log, tables)
    assert (tmp_path / "tables").stat().st_mode & 0o077 == 0
    for path in (tmp_path / "tables").rglob("part-*.parquet"):
        assert path.stat().st_mode & 0o077 == 0


def doubled(tables: EventPlace) -> None:
    """Add a file again as another compaction would have divided the hour."""
    found = table(tables)
    path = found.file_uris()[0]
    relative = os.path.relpath(path, f"{tables}/events")
    other = relative.replace("part-", "part-copy-")
    shutil.copy(path, f"{tables}/events/{other}")
    actions = pa.table(found.get_add_actions(flatten=True)).to_pylist()
    rows = next(each["num_records"] for each in actions if each["path"] == relative)
    stats = json.dumps({"numRecords": rows})
    size = os.path.getsize(path)  # noqa: PTH202
    file = WrittenFile("events", "again", "2026-09-21", other, size, stats)
    commit(tables, EVENTS, [Unit("again", 1, [file])])


def test_duckdb_and_polars_count_nothing_twice(log, tables):
    append_events(None, log, tables)
    doubled(tables)
    assert len(ids(tables)) > SIZE
    events = table(tables).to_pyarrow_dataset()
    with duckdb.connect() as connection:
        connection.register("events", events)
        once = f"SELECT count(*), count(DISTINCT id) FROM ({ONCE})"
        assert connection.execute(once).fetchone() == (SIZE, SIZE)
        days = f"SELECT date, hour, count(*) FROM ({ONCE}) GROUP BY ALL ORDER BY ALL"
        counted = connection.execute(days).fetchall()
    frame = polars.read_delta(f"{tables}/events").unique("id")
    assert frame.height == SIZE
    groups = frame.group_by("date", "hour").len().sort("date", "hour")
    assert groups.rows() == counted
    assert frame.schema["at"] == polars.Datetime("us", "UTC")


def test_spark_reads_the_table_and_what_came_since(spark, log, tables, tmp_path):
    report = append_events(spark, log, tables)
    read = read_table(spark, tables, "events")
    assert read.version == report.version
    rows = {row["id"]: row for row in read.rows.collect()}
    assert sorted(rows) == EVERYTHING
    plain = {row["id"]: row for row in read_events(spark, str(log)).events.collect()}
    for key, row in rows.items():
        assert row["at"].timestamp() == pytest.approx(plain[key]["ts"], abs=1e-6)
        assert (row["task"], row["date"]) == (plain[key]["task"], date(2026, 9, 21))
    doubled(tables)
    assert read_table(spark, tables, "events").rows.count() == SIZE
    draw = random.Random(9)
    late = [random_event(draw, SIZE + number)._replace(worker="late") for number in range(5)]
    write_log(tmp_path / "log", late, files=99)
    compact(None, log, now=NOW)
    before = read_table(spark, tables, "events").version
    append_events(spark, log, tables)
    table(tables).optimize.compact()  # rewrites all files, and makes nothing new
    new = read_table(spark, tables, "events", since=before)
    assert sorted(row["id"] for row in new.rows.collect()) == sorted(each.id for each in late)
    assert read_table(spark, tables, "events", since=new.version).rows.count() == 0
    assert read_table(spark, tables, "events").rows.count() == SIZE + 5


def test_a_reader_without_a_table_or_a_log_is_told(spark, log, tables, tmp_path):
    with pytest.raises(ConfigurationError, match=r"no table 'events' in .* yet"):
        read_table(spark, tables, "events")
    with pytest.raises(ConfigurationError, match="no table 'event'; there are events, odd, "):
        read_table(spark, tables, "event")
    append_events(None, log, tables)
    table(tables).create_checkpoint()
    (tmp_path / "tables/events/_delta_log" / f"{1:020d}.json").unlink()
    with pytest.raises(ConfigurationError, match="read the whole table"):
        read_table(spark, tables, "events", since=0)
