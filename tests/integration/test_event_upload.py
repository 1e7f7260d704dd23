"""Closed event files reach the container, through outages and kills, and never slow a task."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from azurite import KEY, Azurite
from harness import Site, wait_until
from ledger_app import noop, work
from proxy import Proxy

from aztask.address.addresses import BlobAddress
from aztask.address.urls import parse_container
from aztask.azure.container import container_client
from aztask.spark import compact, place_of
from aztask.stores.events.blobs import EventBlobs
from aztask.stores.events.event import Event, from_line
from aztask.stores.events.retention import UPLOAD_LOCK, remove_old
from aztask.stores.events.sink import FileEventSink, read_events
from aztask.worker.upkeep.uploader import Uploader, waiting_files

SERVICE = "blob"
_containers = count(1)


@pytest.fixture
def target(azurite: Azurite, proxy: Proxy) -> BlobAddress:
    """A container that does not exist yet, through the proxy."""
    name = f"events-{next(_containers)}/here"
    return parse_container(name, azurite.connection_string_at(proxy.port))


@pytest.fixture
def uploader(tmp_path: Path, target: BlobAddress) -> Iterator[Uploader]:
    made = Uploader(tmp_path, EventBlobs(target))
    yield made
    made._blobs.close()


def written(directory: Path, *numbers: int) -> None:
    """One closed file for each number, in this order, with one event each."""
    for number in numbers:
        sink = FileEventSink(directory, f"w{number}")
        sink.emit(Event("succeeded", f"t-{number}", "shop.resize", "default"))
        sink.close()
        (path,) = directory.glob(f"date=*/hour=*/w{number}-*")
        os.utime(path, (1000 + number, 1000 + number))


def stored(target: BlobAddress) -> dict[str, bytes]:
    """{name under the prefix: content}."""
    with container_client(target) as client:
        prefix = target.name_of("")
        return {
            blob.name.removeprefix(prefix): client.download_blob(blob.name).readall()
            for blob in client.list_blobs(name_starts_with=prefix)
        }


def task_ids(target: BlobAddress) -> set[str]:
    events = [from_line(line) for data in stored(target).values() for line in data.splitlines()]
    return {event.task_id for event in events if event is not None}


def test_files_are_stored_under_their_names_and_removed(tmp_path, uploader, target):
    written(tmp_path, 1, 2)
    names = {file.name for file in waiting_files(tmp_path)}
    contents = {file.name: file.path.read_bytes() for file in waiting_files(tmp_path)}
    uploader.turn()
    assert stored(target) == contents
    assert all(name.startswith("date=") for name in names)
    assert waiting_files(tmp_path) == []
    assert not list(tmp_path.glob("date=*/hour=*/*"))


def test_kept_files_are_uploaded_once(tmp_path, target):
    written(tmp_path, 1)
    keeping = Uploader(tmp_path, EventBlobs(target), keep=True)
    keeping.turn()
    written(tmp_path, 2)
    keeping.turn()
    keeping._blobs.close()
    assert keeping.uploaded == 2
    assert len(list(read_events(tmp_path))) == 2
    assert task_ids(target) == {"t-1", "t-2"}


def test_open_files_links_and_hidden_names_stay(tmp_path, uploader, target):
    sink = FileEventSink(tmp_path, "open")
    sink.emit(Event("started", "t-open", "t", "q"))
    sink.flush()
    folder = tmp_path / "date=2026-01-01" / "hour=00"
    folder.mkdir(parents=True)
    (folder / ".hidden.jsonl").write_text("x\n")
    (folder / "link.jsonl").symlink_to("/etc/hostname")
    (folder / "loop").symlink_to(tmp_path)
    written(tmp_path, 1)
    uploader.turn()
    assert task_ids(target) == {"t-1"}
    sink.close()


def test_a_file_uploaded_before_a_crash_is_uploaded_again_without_harm(tmp_path, uploader, target):
    """The window between the upload and the removal: the blob is there, the file too."""
    written(tmp_path, 1)
    (file,) = waiting_files(tmp_path)
    content = file.path.read_bytes()
    uploader.turn()
    file.path.write_bytes(content)
    uploader.turn()
    assert stored(target) == {file.name: content}
    assert waiting_files(tmp_path) == []


def test_another_file_under_the_name_is_neither_overwritten_nor_lost(
    tmp_path, uploader, target, caplog
):
    written(tmp_path, 1)
    (file,) = waiting_files(tmp_path)
    content = file.path.read_bytes()
    uploader.turn()
    file.path.write_bytes(content + content)
    with caplog.at_level(logging.ERROR):
        uploader.turn()
        uploader.turn()
    assert stored(target) == {file.name: content}
    assert file.path.read_bytes() == content + content
    assert [record.levelname for record in caplog.records] == ["ERROR"]


@pytest.mark.parametrize("keep", [False, True], ids=["removed", "kept"])
def test_a_compaction_between_two_looks_takes_nothing_that_waits(tmp_path, target, caplog, keep):
    """What is compacted is a file that no look finds: the container would never get its events."""
    uploader, place = Uploader(tmp_path, EventBlobs(target), keep=keep), place_of(tmp_path)
    written(tmp_path, 1)
    uploader.turn()
    written(tmp_path, 2, 3)
    report = compact(None, place, now=time.time() + 7200.0 + 3600.0)
    assert report.events == (1 if keep else 0)
    assert "2 event files of" in caplog.text
    assert "are not uploaded yet and not compacted" in caplog.text
    assert {file.path.name.partition("-")[0] for file in waiting_files(tmp_path)} == {"w2", "w3"}
    uploader.turn()
    assert task_ids(target) == {"t-1", "t-2", "t-3"}
    report = compact(None, place, now=time.time() + 7200.0 + 3600.0)
    assert report.events == (2 if keep else 0)
    assert not list(tmp_path.glob("date=*/hour=*/*.jsonl"))
    assert not list(tmp_path.glob("date=*/hour=*/.*.uploaded")), "a mark goes with its file"
    uploader.turn()
    assert uploader.uploaded == 3
    uploader._blobs.close()


def test_a_clean_up_between_two_looks_takes_nothing_that_waits(tmp_path, uploader, target):
    written(tmp_path, 1, 2)
    assert remove_old(tmp_path, time.time() + 3600.0, uploaded_only=True) == 0
    (first, _) = waiting_files(tmp_path)
    first.path.unlink()  # by another program, once the look has listed it
    uploader._guarded_upload(first)
    uploader.turn()
    assert task_ids(target) == {"t-2"}
    assert uploader.uploaded == 1


def test_a_file_that_cannot_be_read_or_marked_keeps_no_other_one_waiting(
    tmp_path, target, caplog, monkeypatch
):
    written(tmp_path, 1, 2, 3)
    first, second, _ = waiting_files(tmp_path)
    keeping = Uploader(tmp_path, EventBlobs(target), keep=True)
    second.path.with_name(f".{second.path.name}.uploaded").symlink_to(tmp_path / "no" / "where")
    usual = Path.open

    def refused(path, *arguments, **options):
        if path == first.path:
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refused)  # whoever runs the tests may be root
    keeping.turn()
    keeping._blobs.close()
    assert task_ids(target) == {"t-2", "t-3"}
    assert [file.name for file in waiting_files(tmp_path)] == [first.name, second.name]
    assert "could not be uploaded, it is kept: Permission denied" in caplog.text


@pytest.mark.parametrize("mode", ["reset", "drop-reply"])
def test_an_outage_keeps_the_files_and_is_made_up_for(tmp_path, uploader, target, proxy, mode):
    written(tmp_path, 1, 2, 3)
    proxy.set(mode)
    uploader.turn()
    requests = proxy.total
    uploader.turn()  # inside the pause: nothing is sent
    assert proxy.total == requests
    assert len(waiting_files(tmp_path)) == 3
    proxy.set("pass")
    time.sleep(1.1)
    uploader.turn()
    assert task_ids(target) == {"t-1", "t-2", "t-3"}


def test_what_waits_is_bounded_and_what_is_dropped_is_told(tmp_path, target, proxy, caplog):
    written(tmp_path, 1, 2, 3, 4)
    size = waiting_files(tmp_path)[0].size
    uploader = Uploader(tmp_path, EventBlobs(target), max_bytes=2 * size + 1)
    proxy.set("reset")
    with caplog.at_level(logging.WARNING):
        uploader.turn()
    assert [file.path.name[:2] for file in waiting_files(tmp_path)] == ["w3", "w4"]
    assert (uploader.dropped_files, uploader.dropped_bytes) == (2, 2 * size)
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "ERROR"]
    assert "dropped 2 event files" in caplog.text
    assert KEY not in caplog.text
    proxy.set("pass")
    uploader._next_try = 0.0
    uploader.turn()
    uploader._blobs.close()
    assert task_ids(target) == {"t-3", "t-4"}


def test_one_worker_of_a_directory_uploads_at_a_time(tmp_path, uploader, target):
    written(tmp_path, 1)
    script = (
        "import fcntl, sys\n"
        "lock = open(sys.argv[1], 'w')\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path / UPLOAD_LOCK)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        uploader.turn()
        assert len(waiting_files(tmp_path)) == 1
        other.kill()
        other.wait()
    uploader.turn()
    assert task_ids(target) == {"t-1"}


def test_a_worker_uploads_what_it_and_others_wrote(site: Site, azurite: Azurite) -> None:
    container = f"events-{next(_containers)}"
    site.extra |= {
        "AZTASK_EVENTS_CONTAINER": container,
        "AZTASK_EVENTS_ACCOUNT": azurite.connection_string,
    }
    written(site.events, 1)  # left by somebody who died
    results = [site.app().send(work.name, [f"k{n}"]) for n in range(5)]
    worker = site.worker("--burst")
    assert worker.wait() == 0
    address = parse_container(container, azurite.connection_string)
    assert task_ids(address) >= {result.id for result in results} | {"t-1"}
    assert waiting_files(site.events) == []
    assert KEY not in worker.log


def test_a_container_that_hangs_slows_no_task_and_a_killed_worker_leaves_its_files(
    site: Site, azurite: Azurite
) -> None:
    proxy = Proxy(azurite.port)
    proxy.set("blackhole")
    container = f"events-{next(_containers)}"
    site.extra |= {
        "AZTASK_EVENTS_CONTAINER": container,
        "AZTASK_EVENTS_ACCOUNT": azurite.connection_string_at(proxy.port),
    }
    written(site.events, 1)
    worker = site.worker()
    time.sleep(6.0)  # the first upload is under way, and hangs
    began = time.monotonic()
    results = [site.app().send(noop.name) for _ in range(100)]
    wait_until(lambda: all(result.ready() for result in results), 10, "100 tasks are done")
    assert time.monotonic() - began < 10
    worker.signal(signal.SIGKILL)
    worker.process.wait()
    assert len(waiting_files(site.events)) >= 1
    proxy.set("pass")
    proxy.reset_all()
    heir = site.worker("--burst")
    assert heir.wait() == 0
    proxy.close()
    address = parse_container(container, azurite.connection_string)
    assert task_ids(address) >= {result.id for result in results} | {"t-1"}
