"""Tables that follow the event files: no gap and no duplicate, whatever is killed or runs."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable
from events_site import line, make_hostile, random_event, write_log

from aztask.azure.container import container_client
from aztask.errors import AztaskError, ConfigurationError
from aztask.operate.cli import main
from aztask.spark import append_events, compact, follow_events, place_of, read_table
from aztask.spark.events.files import Directory
from aztask.spark.tables import follow as follow_module
from aztask.spark.tables.deltalog import open_table, version_of
from aztask.spark.tables.tables import POSITION
from aztask.support.failpoint import VARIABLE

NOW = 2_000_000_000.0
SETTLE = 0.2
FOLDER = "date=2026-09-21/hour=10"
SCRIPT = (
    "import sys\n"
    "from aztask.spark import follow_events, place_of\n"
    "log, tables, files = place_of(sys.argv[1]), place_of(sys.argv[2]), int(sys.argv[3])\n"
    f"options = {{'available_now': True, 'settle_seconds': {SETTLE}, 'max_files': files}}\n"
    "for batch in follow_events(None, log, tables, **options):\n"
    "    print(batch.files, flush=True)\n"
)


@pytest.fixture
def log(tmp_path):
    (tmp_path / "log").mkdir()
    return place_of(tmp_path / "log")


@pytest.fixture
def tables(tmp_path):
    return place_of(tmp_path / "tables")


def put(log, name, *numbers, wrong=0):
    """A file with the events of these numbers, and so many lines that are none."""
    path = Path(str(log), FOLDER, f"{name}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = random.Random(4)
    lines = [line(random_event(draw, number)) for number in numbers]
    path.write_bytes(b"".join(lines) + b"[1]\n" * wrong)
    time.sleep(0.01)


def settled():
    time.sleep(2 * SETTLE)


def run(log, tables, spark=None, **options):
    settled()
    options = {"available_now": True, "settle_seconds": SETTLE, **options}
    return list(follow_events(spark, log, tables, **options))


def ids(tables):
    """The id of every row of the table, with repetitions."""
    found = DeltaTable(f"{tables}/events").to_pyarrow_table(columns=["id"])
    return sorted(found["id"].to_pylist(), key=lambda key: (len(key), key))


def expected(*numbers):
    return [f"e-{number}" for number in numbers]


def odd(tables):
    return DeltaTable(f"{tables}/odd").to_pyarrow_table().to_pylist()


def test_files_are_added_as_they_appear_and_each_once(log, tables):
    put(log, "a", 1, 2)
    put(log, "b", 3, wrong=1)
    (batch,) = run(log, tables)
    assert (batch.files, batch.rows, batch.odd) == (2, 3, 1)
    assert run(log, tables) == []
    put(log, "0", 4)  # its name is before the others'
    (batch,) = run(log, tables)
    assert (batch.files, batch.rows, batch.odd) == (1, 1, 0)
    assert ids(tables) == expected(1, 2, 3, 4)
    rows = DeltaTable(f"{tables}/events").to_pyarrow_table().to_pylist()
    assert {row["source"] for row in rows} == {f"{FOLDER}/{name}.jsonl" for name in "ab0"}
    assert {(str(row["date"]), row["hour"]) for row in rows} == {("2026-09-21", 10)}


def test_a_stream_without_an_end_waits_for_files(log, tables, monkeypatch):
    """Its sleeps are those of the fake clock: a file appears in each."""
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        put(log, f"f{len(slept)}", len(slept))
        settled()

    monkeypatch.setattr(follow_module, "sleep", sleep)
    stream = follow_events(None, log, tables, trigger=30, settle_seconds=SETTLE)
    assert [next(stream).rows for _ in range(3)] == [1, 1, 1]
    assert slept == [30, 30, 30]
    assert ids(tables) == expected(1, 2, 3)


def test_damaged_lines_are_odd_rows_and_end_nothing(tmp_path, log, tables):
    events = [random_event(random.Random(1), number) for number in range(60)]
    write_log(tmp_path / "log", events)
    problems = make_hostile(tmp_path / "log")
    run(log, tables, max_files=2)
    found = [row["odd"] for row in odd(tables)]
    assert {kind: found.count(kind) for kind in problems} == problems
    assert set(ids(tables)) >= {event.id for event in events}
    put(log, "later", 1000)
    assert [batch.rows for batch in run(log, tables)] == [1]


STEPS = ("table-claimed", "table-written", "table-odd", "table-committed")


@pytest.mark.parametrize("compacted", [None, "removed", "kept"])
@pytest.mark.parametrize("step", [f"{step}:KILL:{n}" for step in STEPS for n in (1, 2)])
def test_a_killed_driver_goes_on_exactly_where_it_was(step, compacted, log, tables):
    """More files appear before it is started again, and a compaction may have taken the old."""
    for number, name in enumerate("ckbaf"):
        put(log, name, 2 * number, 2 * number + 1, wrong=1)
    settled()
    command = [sys.executable, "-c", SCRIPT, str(log), str(tables), "2"]
    killed = subprocess.run(command, env={**os.environ, VARIABLE: step}, check=False)
    assert killed.returncode == -signal.SIGKILL
    put(log, "e", 10, 11, wrong=1)
    if compacted is not None:
        assert compact(None, log, now=NOW, keep=compacted == "kept").events == 12
    put(log, "d", 12, wrong=1)
    batches = run(log, tables, max_files=3)
    assert batches
    assert ids(tables) == expected(*range(13))
    assert len(odd(tables)) == 7
    assert run(log, tables) == []


def test_two_at_once_add_each_file_once(log, tables):
    """Beside a writer, and beside a compaction that takes the files from under them."""
    for number in range(30):
        put(log, f"w{number:02d}", number, wrong=1)
    command = [sys.executable, "-c", SCRIPT, str(log), str(tables), "1"]
    followers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)
    ]
    time.sleep(3)
    compact(None, log, now=NOW)
    told = [follower.communicate(timeout=120) for follower in followers]
    assert [f.returncode for f in followers] == [0, 0, 0], [e.decode() for _, e in told]
    run(log, tables)
    assert ids(tables) == expected(*range(30))
    assert len(odd(tables)) == 30


@pytest.mark.parametrize(("ours", "theirs", "left"), [(1, 2, 0), (2, 1, 1), (2, 2, 0)])
def test_a_batch_whose_place_was_taken_is_dropped(log, tables, monkeypatch, ours, theirs, left):
    """Another process commits more files, fewer, or the same, between its reading and commit."""
    put(log, "a", 1, wrong=1)
    put(log, "b", 2, wrong=1)
    settled()
    write, others = follow_module.written_files, []

    def beaten(*about):
        written = write(*about)
        monkeypatch.setattr(follow_module, "written_files", write)
        options = {"available_now": True, "settle_seconds": SETTLE, "max_files": theirs}
        others.append(next(follow_events(None, log, tables, **options)))
        return written

    monkeypatch.setattr(follow_module, "written_files", beaten)
    assert sum(batch.files for batch in run(log, tables, max_files=ours)) == left
    assert others[0].files == theirs
    assert ids(tables) == expected(1, 2)
    assert len(odd(tables)) == 2


def test_files_that_are_compacted_while_they_are_read_are_read_from_there(log, tables, monkeypatch):
    put(log, "a", 1, 2)
    put(log, "b", 3)
    write, compacted = follow_module.written_files, []

    def beaten(*about):
        if not compacted:
            compacted.append(compact(None, log, now=NOW))
        return write(*about)

    monkeypatch.setattr(follow_module, "written_files", beaten)
    (batch,) = run(log, tables)
    assert (compacted[0].removed, batch.rows) == (2, 3)
    assert ids(tables) == expected(1, 2, 3)


@pytest.mark.parametrize("keep", [False, True])
def test_tables_with_compacted_files_are_taken_over(log, tables, keep):
    put(log, "a", 1, 2, wrong=1)
    compact(None, log, now=NOW, keep=keep)
    append_events(None, log, tables)
    put(log, "b", 3)
    compact(None, log, now=NOW, keep=keep)
    put(log, "c", 4, wrong=1)
    (batch,) = run(log, tables)
    assert (batch.rows, batch.odd) == (2, 1)
    assert ids(tables) == expected(1, 2, 3, 4)
    assert len(odd(tables)) == 2
    with pytest.raises(ConfigurationError, match=r"kept by aztask spark follow.*without --tables"):
        append_events(None, log, tables)


def test_compacted_files_that_were_half_added_are_completed(log, tables):
    """The process that added them died between the odd rows and the events."""
    put(log, "a", 1, 2, wrong=1)
    compact(None, log, now=NOW)
    script = "import sys\nfrom aztask.spark import append_events, place_of\n"
    script += "append_events(None, place_of(sys.argv[1]), place_of(sys.argv[2]))\n"
    command = [sys.executable, "-c", script, str(log), str(tables)]
    env = {**os.environ, VARIABLE: "table-odd:KILL"}
    assert subprocess.run(command, env=env, check=False).returncode == -signal.SIGKILL
    put(log, "b", 3)
    run(log, tables)
    assert ids(tables) == expected(1, 2, 3)
    assert len(odd(tables)) == 1


def test_an_append_that_began_before_the_tables_were_claimed_is_refused(log, tables, monkeypatch):
    put(log, "a", 1, 2, wrong=1)
    compact(None, log, now=NOW)
    from aztask.spark.tables import tables as module  # noqa: PLC0415  # beside the function

    write = module.written_files

    def beaten(*about):
        written = write(*about)
        monkeypatch.setattr(module, "written_files", write)
        run(log, tables)
        return written

    monkeypatch.setattr(module, "written_files", beaten)
    with pytest.raises(ConfigurationError, match="kept by aztask spark follow"):
        append_events(None, log, tables)
    assert ids(tables) == expected(1, 2)
    assert len(odd(tables)) == 1


def test_another_log_is_refused_and_a_moved_one_goes_on(log, tables, tmp_path):
    put(log, "a", 1)
    run(log, tables)
    moved = tmp_path / "moved"
    Path(str(log)).rename(moved)
    other = place_of(moved)
    put(other, "b", 2)
    with pytest.raises(ConfigurationError, match=r"follow another log than .*/moved.*--log-name"):
        run(other, tables)
    run(other, tables, log_name=str(log))
    assert ids(tables) == expected(1, 2)


def test_a_file_that_cannot_be_read_ends_the_stream_and_is_not_passed_over(
    log, tables, monkeypatch
):
    put(log, "a", 1)
    put(log, "b", 2)
    opened = Directory.open

    def broken(self, name):
        if name.endswith("b.jsonl"):
            raise OSError(5, "Input/output error")
        return opened(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "open", broken)
        with pytest.raises(AztaskError, match=r"b\.jsonl of .* cannot be read: Input/output error"):
            run(log, tables, max_files=1)
    assert ids(tables) == expected(1)
    run(log, tables)
    assert ids(tables) == expected(1, 2)


@pytest.mark.parametrize(
    "options", [{"max_files": 0}, {"trigger": -1}, {"settle_seconds": 0}, {"undivided": "x"}]
)
def test_options_that_no_stream_takes_are_refused(log, tables, options):
    with pytest.raises(ConfigurationError, match="give"):
        next(follow_events(None, log, tables, **options))
    assert open_table(tables, "events") is None


def test_spark_writes_and_reads_what_is_new(spark, log, tables):
    put(log, "a", 1, 2, wrong=1)
    (first,) = run(log, tables, spark)
    compact(None, log, now=NOW)
    put(log, "b", 3)
    (second,) = run(log, tables, spark)
    new = read_table(spark, tables, "events", since=first.version)
    assert [row["id"] for row in new.rows.collect()] == ["e-3"]
    assert new.version == second.version
    assert read_table(spark, tables, "events").rows.count() == 3
    assert read_table(spark, tables, "odd").rows.count() == 1


def test_the_command_follows_until_it_is_stopped(spark, log, tables, capsys):
    put(log, "a", 1, 2, wrong=1)
    time.sleep(11)  # the command's own time until a file is read
    command = ["spark", "follow", str(log), "--tables", str(tables), "--available-now"]
    assert main.run(command) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("1 file added to the tables (2 events, 1 odd row, 0.0 MB): all that ")
    assert main.run([*command, "--json"]) == 0
    assert capsys.readouterr().out == ""


def test_a_killed_command_with_spark_goes_on_where_it_was(log, tables, tmp_path):
    """The whole job, driver and JVM and Python workers, in the midst of its batches."""
    for number in range(8):
        put(log, f"w{number}", number, wrong=1)
    time.sleep(11)
    command = [
        *(sys.executable, "-m", "aztask", "spark", "follow", str(log), "--tables", str(tables)),
        *("--available-now", "--max-files", "1", "--json", "--master", "local[1]"),
    ]
    with (tmp_path / "told").open("wb") as told:
        first = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=told, start_new_session=True
        )
    assert first.stdout is not None
    assert json.loads(first.stdout.readline())["files"] == 1
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    first.stdout.close()
    before = len(ids(tables))
    assert 1 <= before < 8
    compact(None, log, now=NOW)
    run(log, tables)
    assert ids(tables) == expected(*range(8))
    assert len(odd(tables)) == 8


def test_containers(spark, blobs, log):
    """Files of one container, tables in another; a blob's time is told in seconds."""
    names = ("follow-log", "follow-tables")
    place, tables = place_of(names[0], blobs), place_of(f"{names[1]}/one", blobs)
    draw = random.Random(4)
    for name in names:
        with container_client(place_of(name, blobs).address()) as client:
            client.create_container()

    def upload(name, *numbers):
        with container_client(place.address()) as client:
            lines = [line(random_event(draw, number)) for number in numbers]
            client.upload_blob(f"{FOLDER}/{name}.jsonl", b"".join(lines))
        time.sleep(1.5)

    upload("a", 1, 2)
    assert [batch.rows for batch in run(place, tables, spark)] == [2]
    upload("b", 3)
    compact(None, place, now=NOW)
    assert [batch.rows for batch in run(place, tables, spark)] == [1]
    rows = read_table(spark, tables, "events").rows.collect()
    assert sorted(row["id"] for row in rows) == expected(1, 2, 3)


def test_the_position_is_the_place_s_time_of_the_last_file(log, tables):
    put(log, "a", 1)
    before = time.time()
    (batch,) = run(log, tables)
    assert batch.until <= before
    assert version_of(open_table(tables, "events"), POSITION) == round(batch.until * 1e6)


def test_a_writer_beside_it_loses_nothing(log, tables):
    """Files appear, and are compacted, while it runs."""
    done = threading.Event()

    def write():
        for number in range(40):
            put(log, f"w{random.Random(number).random()}", number)
            if number % 15 == 14:
                compact(None, log, now=NOW)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        list(follow_events(None, log, tables, available_now=True, settle_seconds=SETTLE))
    writer.join()
    run(log, tables)
    assert ids(tables) == expected(*range(40))
