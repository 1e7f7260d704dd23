"""Payloads in files."""

import stat
from pathlib import Path

import pytest

from aztask.errors import BrokerUnavailable, PayloadMissing
from aztask.message.payload import StoredValue
from aztask.stores.payloads.opening import FolderPayloads
from aztask.stores.payloads.store import PayloadKind, new_name


@pytest.fixture
def folder(tmp_path):
    return FolderPayloads(tmp_path / "queues.db.payloads")


def test_files_are_private(folder):
    name = new_name(PayloadKind.ARGUMENTS)
    folder.write(name, b"secret")
    path = folder.folder / name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for each in path.parents[:3]:
        assert stat.S_IMODE(each.stat().st_mode) == 0o700


def test_the_folder_of_an_hour_goes_with_its_last_payload(folder):
    first, second = new_name(PayloadKind.RESULT, 0.0), new_name(PayloadKind.RESULT, 0.0)
    folder.write(first, b"1")
    folder.write(second, b"2")
    folder.remove([first])
    assert [each.name for each in folder.list()] == [second]
    folder.remove([second])
    assert not (folder.folder / second).parent.exists()
    folder.write(first, b"1")


def test_a_file_that_was_not_written_to_its_end_is_listed_and_removed(folder):
    """What a killed process leaves over; nothing refers to it."""
    name = new_name(PayloadKind.ARGUMENTS)
    folder.write(name, b"data")
    path = folder.folder / name
    path.rename(path.with_name(path.name + ".part"))
    with pytest.raises(PayloadMissing):
        folder.read(StoredValue.of(name, b"data"))
    (left,) = folder.list()
    assert (left.name, left.size, left.kind) == (f"{name}.part", 4, PayloadKind.ARGUMENTS)
    folder.remove([left.name])
    assert list(folder.list()) == []


def test_files_of_others_are_not_listed(folder):
    folder.write(new_name(PayloadKind.ARGUMENTS), b"data")
    (folder.folder / "args" / "2026112314").mkdir(exist_ok=True)
    (folder.folder / "args" / "2026112314" / "notes.txt").write_text("mine")
    (folder.folder / "args" / "9999999999").mkdir()
    (folder.folder / "args" / "9999999999" / ("0" * 32)).write_text("no such hour")
    assert len(list(folder.list())) == 1


@pytest.mark.parametrize("name", ["../queues.db", "args/2026112314/../../x", "/etc/passwd", ""])
def test_no_other_path_is_touched(folder, name):
    with pytest.raises(ValueError, match="not the name"):
        folder.remove([name])
    with pytest.raises(ValueError, match="not the name"):
        folder.write(name, b"")


def test_a_folder_that_cannot_be_made_is_unavailable():
    """Not even by root: the kernel makes the directories of this file system."""
    with pytest.raises(BrokerUnavailable, match="cannot be used"):
        FolderPayloads(Path("/proc/aztask")).write(new_name(PayloadKind.ARGUMENTS), b"")


def test_a_file_in_the_place_of_the_folder_is_unavailable(folder):
    folder.folder.write_text("a file")
    with pytest.raises(BrokerUnavailable, match="cannot be used"):
        folder.write(new_name(PayloadKind.ARGUMENTS), b"")


def test_a_full_disk_leaves_nothing_over(folder, monkeypatch):
    name = new_name(PayloadKind.ARGUMENTS)
    folder.write(name, b"data")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(BrokerUnavailable, match="No space left"):
        folder.write(new_name(PayloadKind.ARGUMENTS), b"data")
    assert [each.name for each in folder.list()] == [name]
