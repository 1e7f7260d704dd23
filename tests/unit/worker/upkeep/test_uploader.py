"""Uploading event files to a container in memory; `tests/integration/test_event_upload.py` uses a
real one.
"""

import itertools
import os

import pytest
from still import Still

from aztask import App
from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.worker.upkeep import uploader as uploaders
from aztask.worker.upkeep.uploader import (
    FIRST_PAUSE,
    Uploader,
    UploadingSink,
    waiting_files,
    worker_sink,
)

FOLDER = "date=2026-11-23/hour=07"


class Blobs:
    """A container. down: whether it is unreachable. tries: uploads that were tried."""

    def __init__(self):
        self.stored = {}
        self.tries = 0
        self.down = False
        self.closed = False

    def upload(self, name, path):
        self.tries += 1
        if self.down:
            raise BrokerUnavailable("the container is unreachable")
        data = path.read_bytes()
        return self.stored.setdefault(name, data) == data

    def close(self):
        self.closed = True


@pytest.fixture
def blobs():
    return Blobs()


@pytest.fixture
def clock():
    return Still()


@pytest.fixture
def make(tmp_path, blobs, clock):
    return lambda **options: Uploader(tmp_path, blobs, clock=clock, **options)


def write(folder, name, text="{}\n", age=0.0):
    path = folder / FOLDER / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def test_closed_files_wait_oldest_first(tmp_path):
    write(tmp_path, "new")
    write(tmp_path, "old", age=60.0)
    write(tmp_path, "_open")
    write(tmp_path, ".hidden")
    (tmp_path / FOLDER / "link.jsonl").symlink_to(tmp_path / FOLDER / "new.jsonl")
    assert [each.name for each in waiting_files(tmp_path)] == [
        f"{FOLDER}/old.jsonl",
        f"{FOLDER}/new.jsonl",
    ]


def test_an_uploaded_file_is_removed(tmp_path, make, blobs):
    path = write(tmp_path, "a", "one\n")
    made = make()
    made.turn()
    assert blobs.stored == {f"{FOLDER}/a.jsonl": b"one\n"}
    assert not path.exists()
    assert made.uploaded == 1


def test_a_kept_file_is_marked_and_uploaded_once(tmp_path, make, blobs):
    path = write(tmp_path, "a")
    made = make(keep=True)
    made.turn()
    made.turn()
    assert path.exists()
    assert blobs.tries == 1


def test_an_outage_is_retried_after_growing_pauses(tmp_path, make, blobs, clock):
    write(tmp_path, "a")
    blobs.down = True
    made = make()
    tried_at = []
    for _ in range(80):
        before = blobs.tries
        made.turn()
        if blobs.tries > before:
            tried_at.append(clock.now)
        clock.now += 0.1
    pauses = [late - early for early, late in itertools.pairwise(tried_at)]
    assert pauses == pytest.approx([FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE], abs=0.15)
    blobs.down = False
    clock.now += 60.0
    made.turn()
    assert made.uploaded == 1


def test_beyond_the_bound_the_oldest_are_dropped_and_counted(tmp_path, make, blobs, caplog):
    for number in range(4):
        write(tmp_path, f"f{number}", "x" * 100, age=10.0 - number)
    blobs.down = True
    made = make(max_bytes=250)
    made.turn()
    assert [each.name[-8:] for each in waiting_files(tmp_path)] == ["f2.jsonl", "f3.jsonl"]
    assert (made.dropped_files, made.dropped_bytes) == (2, 200)
    assert "dropped 2 event files" in caplog.text


def test_another_file_under_the_name_is_kept_and_not_tried_again(tmp_path, make, blobs, caplog):
    path = write(tmp_path, "a", "ours\n")
    blobs.stored[f"{FOLDER}/a.jsonl"] = b"theirs\n"
    made = make()
    made.turn()
    made.turn()
    assert path.read_text() == "ours\n"
    assert blobs.tries == 1
    assert "rename or remove the one in" in caplog.text


def test_a_sink_that_closes_uploads_what_is_left(tmp_path, make, blobs):
    events = App("shop", broker="local://:memory:", events=str(tmp_path)).open_events("w")
    sink = UploadingSink(events, make())
    write(tmp_path, "a")
    sink.close()
    assert list(blobs.stored) == [f"{FOLDER}/a.jsonl"]
    assert blobs.closed


def test_without_a_container_events_stay_in_files(tmp_path):
    app = App("shop", broker="local://:memory:", events=str(tmp_path))
    sink = worker_sink(app, "w")
    assert not isinstance(sink, UploadingSink)
    sink.close()


def test_a_missing_sdk_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(uploaders, "ADAPTER", "aztask.nosuch")
    app = App(
        "shop",
        broker="local://:memory:",
        events=str(tmp_path),
        events_container="blob://shop/events",
    )
    with pytest.raises(ConfigurationError, match=r'pip install "aztask\[blob\]"'):
        worker_sink(app, "w")
