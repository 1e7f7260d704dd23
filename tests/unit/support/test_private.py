import grp
import os
import stat

import pytest

from aztask import App
from aztask.errors import ConfigurationError
from aztask.stores.events.event import Event
from aztask.stores.events.sink import FileEventSink
from aztask.support.private import make_directory, make_file


@pytest.fixture(autouse=True)
def open_umask():
    """The usual umask of a careless service."""
    before = os.umask(0o000)
    yield
    os.umask(before)


def modes(folder):
    """The permission bits of everything under a folder, by name."""
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) & 0o777
        for path in folder.rglob("*")
    }


def send(address):
    app = App("shop", broker=address, results=address)
    app.broker.declare("default")
    app.send("shop.add", [1, 2], task_id="one")
    return app


def test_queue_and_result_files_are_private(tmp_path):
    app = send(f"local://{tmp_path}/deep/folder/q.db")
    found = modes(tmp_path)
    app.close()
    assert found.pop("deep") == found.pop("deep/folder") == 0o700
    assert set(found) == {f"deep/folder/q.db{end}" for end in ("", "-wal", "-shm")}
    assert set(found.values()) == {0o600}


def test_a_group_shares_files_and_folder(tmp_path):
    ids = [0o1] if os.geteuid() == 0 else os.getgroups()  # root may give files to any group
    group = grp.getgrgid(ids[-1])
    app = send(f"local://{tmp_path}/folder/q.db?group={group.gr_name}")
    found = modes(tmp_path)
    groups = {path.stat().st_gid for path in tmp_path.rglob("*")}
    app.close()
    assert found.pop("folder") == 0o770
    assert len(found) == 3
    assert set(found.values()) == {0o660}
    assert groups == {group.gr_gid}


def test_an_unknown_group_is_named(tmp_path):
    app = App("shop", broker=f"local://{tmp_path}/q.db?group=nosuchgroup")
    with pytest.raises(ConfigurationError, match="this machine has no group 'nosuchgroup'"):
        app.broker.declare("default")


def test_events_are_private(tmp_path):
    sink = FileEventSink(tmp_path / "events", "w")
    sink.emit(Event("enqueued", "id", "t", "q"))
    sink.flush()
    assert set(modes(tmp_path).values()) == {0o700, 0o600}
    sink.close()
    found = modes(tmp_path)
    assert {mode for name, mode in found.items() if name.endswith(".jsonl")} == {0o600}
    assert {mode for name, mode in found.items() if not name.endswith(".jsonl")} == {0o700}


def test_what_exists_keeps_its_mode(tmp_path):
    folder, file = tmp_path / "d", tmp_path / "d" / "f"
    folder.mkdir(0o755)
    file.touch(0o644)
    make_directory(folder)
    make_file(file)
    assert modes(tmp_path) == {"d": 0o755, "d/f": 0o644}


def test_a_file_in_the_way_of_a_directory_is_an_error(tmp_path):
    (tmp_path / "f").touch()
    with pytest.raises(OSError, match=r"exists|Not a directory"):
        make_directory(tmp_path / "f" / "d")
