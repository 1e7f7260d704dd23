"""Event files: whole when published, recovered when their writer died, never in the way of work."""

import errno
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest

from aztask.stores.events import sink as events
from aztask.stores.events.sink import Event, FileEventSink, NullEventSink, read_events, recover
from aztask.support.clock import Clock


class FakeTime:
    """A clock that a test moves. It begins on 2026-01-02 03:50 UTC."""

    def __init__(self):
        self.now = 1_767_325_800.0
        self.clock = Clock(monotonic=lambda: self.now, wall=lambda: self.now)


@pytest.fixture
def time():
    return FakeTime()


def started(number):
    return Event("started", f"id-{number}", "shop.resize", "default")


def ids(directory, **options):
    return sorted(event.task_id for event in read_events(directory, **options))


def files(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.jsonl"))


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


def test_events_are_readable_after_a_flush_and_published_at_the_end(tmp_path, time):
    sink = FileEventSink(tmp_path, "w1", clock=time.clock)
    sink.emit(started(1))
    assert files(tmp_path) == []
    sink.flush()
    (name,) = files(tmp_path)
    assert name.startswith(".2026-01-02T03.w1-")
    assert ids(tmp_path) == ["id-1"]
    assert ids(tmp_path, published_only=True) == []
    sink.emit(started(2))
    sink.close()
    (name,) = files(tmp_path)
    assert name.startswith("date=2026-01-02/hour=03/w1-")
    assert ids(tmp_path, published_only=True) == ["id-1", "id-2"]
    assert sink.dropped == 0


def test_the_sink_fills_in_id_time_and_worker_unless_they_are_given(tmp_path, time):
    sink = FileEventSink(tmp_path, "w1", clock=time.clock)
    sink.emit(started(1))
    sink.emit(started(2))
    sink.emit(started(3)._replace(id='mine"', ts=5.0, worker="sender"))
    sink.close()
    first, second, third = read_events(tmp_path)
    assert (first.ts, first.worker) == (time.now, "w1")
    assert first.id != second.id
    assert (third.id, third.ts, third.worker) == ('mine"', 5.0, "sender")


def test_a_flush_is_one_write(tmp_path, time, monkeypatch):
    sink = FileEventSink(tmp_path, "w1", clock=time.clock)
    sizes = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: sizes.append(len(data)) or write(fd, data))
    for number in range(100):
        sink.emit(started(number))
    sink.flush()
    sink.flush()
    assert len(sizes) == 1
    sink.close()


@pytest.mark.parametrize("change", ["size", "age", "hour"])
def test_a_file_is_published_when_it_is_large_old_or_the_hour_is_over(tmp_path, time, change):
    sink = FileEventSink(
        tmp_path,
        "w1",
        clock=time.clock,
        max_bytes=100 if change == "size" else 1 << 20,
        max_age_seconds=400.0 if change == "age" else 4000.0,
    )
    sink.emit(started(1))
    sink.flush()
    time.now += {"size": 0.0, "age": 400.0, "hour": 10 * 60.0}[change]
    sink.flush()  # idle: nothing new to write
    assert [name for name in files(tmp_path) if name.startswith(".")] == []
    assert ids(tmp_path, published_only=True) == ["id-1"]
    sink.emit(started(2))
    sink.close()
    assert len(files(tmp_path)) == 2
    assert ids(tmp_path) == ["id-1", "id-2"]


def test_two_sinks_of_one_name_never_share_a_file(tmp_path, time):
    sinks = [FileEventSink(tmp_path, "same", clock=time.clock) for _ in range(5)]
    for number, sink in enumerate(sinks):
        sink.emit(started(number))
        sink.flush()
    assert len(files(tmp_path)) == 5
    for sink in sinks:
        sink.close()
    assert ids(tmp_path, published_only=True) == [f"id-{number}" for number in range(5)]


def test_a_program_that_only_sends_deletes_its_old_files(tmp_path, time):
    """No worker of that machine does."""
    written = set()
    for number in range(3):
        sink = FileEventSink(tmp_path, "w", clock=time.clock, retention=7 * 86400.0)
        sink.emit(started(number))
        sink.close()
        for path in set(tmp_path.glob("date=*/hour=*/*.jsonl")) - written:
            os.utime(path, (time.now, time.now))  # the files have the machine's time
            written.add(path)
        time.now += 5 * 86400.0
    assert ids(tmp_path) == ["id-1", "id-2"]


def test_secrets_in_worker_names_stay_out_of_events_and_file_names(tmp_path, time):
    sink = FileEventSink(tmp_path, "w?sig=abcdefghijk&se=1", clock=time.clock)
    sink.emit(started(1))
    sink.emit(started(2)._replace(worker="v?sig=abcdefghijk&se=1"))
    sink.close()
    (path,) = tmp_path.glob("date=*/hour=*/*.jsonl")
    assert "abcdefghijk" not in path.read_text()
    assert "abcdefghijk" not in path.name


def test_any_worker_name_is_a_file_name(tmp_path, time):
    names = ["../../etc/x", "a/b", ".hidden", "\x00\n\ud800", "", "n" * 500, "date=1"]
    for name in names:
        sink = FileEventSink(tmp_path / "events", name, clock=time.clock)
        sink.emit(started(1))
        sink.close()
    assert len(list(read_events(tmp_path / "events"))) == len(names)
    assert names_in(tmp_path) == ["events"]


def test_many_threads_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "BUFFER_LIMIT", 50)  # so that emit flushes by itself
    sink = FileEventSink(tmp_path, "w1", max_bytes=20_000)

    def emit(part):
        for number in range(500):
            sink.emit(started(part * 1000 + number))

    threads = [threading.Thread(target=emit, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    assert len(set(ids(tmp_path))) == 2000
    assert len({event.id for event in read_events(tmp_path)}) == 2000
    assert len(files(tmp_path)) > 1


WRITER = """
import sys, time
from aztask.stores.events.sink import Event, FileEventSink
sink = FileEventSink(sys.argv[1], "same")
for number in range(100):
    sink.emit(Event("started", f"id-{number}", "t", "q"))
    sink.flush()
sink.emit(Event("started", "not flushed", "t", "q"))
print("written", flush=True)
time.sleep(60)
"""


@pytest.fixture
def writer(tmp_path):
    """A real process that has written 100 events, flushed, and one more, not flushed."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "written\n"
        yield process
        process.kill()


def test_a_killed_writers_file_is_published_by_the_next_writer(tmp_path, writer):
    assert recover(tmp_path) == 0  # its writer lives
    sink = FileEventSink(tmp_path, "same")
    sink.emit(started("mine"))
    sink.flush()
    assert len([name for name in files(tmp_path) if name.startswith(".")]) == 2
    sink.close()
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    sink.emit(started("later"))
    sink.close()
    assert [name for name in files(tmp_path) if name.startswith(".")] == []
    reader = read_events(tmp_path, published_only=True)
    assert {event.task_id for event in reader} == {
        *(f"id-{number}" for number in range(100)),
        "id-mine",
        "id-later",
    }
    assert reader.skipped == 0


def test_an_empty_file_of_a_dead_writer_is_removed(tmp_path):
    (tmp_path / ".2026-01-02T03.w1-000001.jsonl").touch()
    assert recover(tmp_path) == 0
    assert names_in(tmp_path) == []


def test_recovering_leaves_other_files_alone(tmp_path):
    for name in (".hidden.jsonl", "x.jsonl", ".2026-01-02T03.", ".2026-1-2T3.w.jsonl"):
        (tmp_path / name).write_text("{}\n")
    before = names_in(tmp_path)
    assert recover(tmp_path) == 0
    assert recover(tmp_path / "missing") == 0
    assert names_in(tmp_path) == before


def test_a_forked_child_writes_its_own_events_to_its_own_file(tmp_path):
    sink = FileEventSink(tmp_path, "w1")
    sink.emit(started("written by the parent"))
    sink.flush()
    sink.emit(started("buffered in the parent"))
    child = os.fork()
    if child == 0:
        try:
            sink.emit(started("written by the child"))
            sink.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(files(tmp_path)) == 2
    assert ids(tmp_path, published_only=True) == ["id-written by the child"]
    sink.close()
    found = list(read_events(tmp_path))
    assert len(found) == 3
    assert len({event.id for event in found}) == 3


def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path):
    sink = FileEventSink(tmp_path, "w1")
    sink.emit(started(1))
    sink.flush()
    running, told = os.pipe()
    waiting, done = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(told, b"1")
        os.close(done)
        os.read(waiting, 1)  # until the parent is done
        os._exit(0)
    os.read(running, 1)
    fd, sink._fd = sink._fd, None
    os.close(fd)  # what the end of the parent does
    assert recover(tmp_path) == 1
    os.close(done)
    os.waitpid(child, 0)
    for each in (running, told, waiting):
        os.close(each)


def test_a_directory_that_cannot_be_written_costs_events_and_one_line(tmp_path, time, caplog):
    (tmp_path / "file").touch()
    sink = FileEventSink(tmp_path / "file" / "events", "w1", clock=time.clock)
    for _ in range(10):
        sink.emit(started(1))
        sink.flush()
    sink.close()
    assert sink.dropped == 10
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "Not a directory" in record.getMessage()
    time.now += events.WARNING_INTERVAL
    sink.emit(started(1))
    sink.flush()
    assert "11 dropped so far" in caplog.records[-1].getMessage()


def test_a_disk_that_fills_up_leaves_whole_lines_and_goes_on_when_there_is_room(
    tmp_path, time, caplog
):
    """A real limit on the file's size: the kernel takes a part of the write, then refuses."""
    sink = FileEventSink(tmp_path, "w1", clock=time.clock)
    sink.emit(started(1))
    sink.flush()
    (name,) = files(tmp_path)
    size = (tmp_path / name).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
        sink.emit(started(2))
        sink.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert sink.dropped == 1
    assert (tmp_path / name).stat().st_size == size
    assert os.strerror(errno.ENOSPC) in caplog.text
    sink.emit(started(3))
    sink.close()
    reader = read_events(tmp_path)
    assert [event.task_id for event in reader] == ["id-1", "id-3"]
    assert reader.skipped == 0


def test_damaged_lines_are_counted_and_skipped(tmp_path, time):
    sink = FileEventSink(tmp_path, "w1", clock=time.clock)
    for number in range(3):
        sink.emit(started(number))
    sink.close()
    (name,) = files(tmp_path)
    good = (tmp_path / name).read_bytes().splitlines(keepends=True)
    damaged = [
        good[0],
        b"[1]\n",
        b"\n",
        b"\x00" * 4096 + good[1],  # a block of NULs, then a good line
        b'{"torn": \n',
        b"x" * (3 * events.LINE_LIMIT) + b"\n",
        json.dumps(json.loads(good[2]) | {"ts": "soon"}).encode() + b"\n",
        good[2],
        good[0][:20],  # the line that was being written
    ]
    (tmp_path / name).write_bytes(b"".join(damaged))
    (tmp_path / "date=2026-01-02" / "hour=03" / "a-directory.jsonl").mkdir()
    (tmp_path / "date=2026-01-02" / "hour=03" / "_temporary.jsonl").write_bytes(good[0])
    reader = read_events(tmp_path)
    assert [event.task_id for event in reader] == ["id-0", "id-1", "id-2"]
    assert reader.skipped == 7


def test_a_file_that_is_published_while_it_is_read_is_read_once(tmp_path, time):
    sinks = [FileEventSink(tmp_path, f"w{number}", clock=time.clock) for number in range(3)]
    for number, sink in enumerate(sinks):
        sink.emit(started(number))
        sink.flush()
    reader = read_events(tmp_path)
    first = next(reader)
    for sink in sinks:
        sink.close()
    assert sorted([first.task_id, *(event.task_id for event in reader)]) == [
        "id-0",
        "id-1",
        "id-2",
    ]


def test_a_missing_directory_holds_no_events(tmp_path):
    assert list(read_events(tmp_path / "missing")) == []


def test_the_null_sink_takes_everything_and_keeps_nothing():
    sink = NullEventSink()
    sink.emit(started(1))
    sink.flush()
    sink.close()
    assert not vars(sink)
