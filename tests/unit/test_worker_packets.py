"""Values between worker and pool process: large ones travel in files, which never stay."""

import socket
import stat
from pathlib import Path

import pytest

from aztask.worker.packets import SPILL_BYTES, Packets, socket_pair, spill_folder

LARGE = b"x" * SPILL_BYTES


@pytest.fixture
def ends(tmp_path, monkeypatch):
    """Both ends, and the folder of their files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = spill_folder()
    left, right = (Packets(end, folder) for end in socket_pair())
    yield left, right, Path(folder)
    left.close()
    right.close()


def test_no_folder_is_made_for_small_values(ends):
    left, right, folder = ends
    assert left.send(["small", 1])
    assert right.receive() == ["small", 1]
    assert not folder.exists()


def test_large_values_arrive_and_leave_no_file(ends, tmp_path):
    left, right, folder = ends
    for number in range(3):
        assert left.send([number, LARGE])
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(list(folder.iterdir())) == 3
    assert right.send(LARGE)
    assert left.receive() == LARGE
    assert [right.receive() for _ in range(3)] == [[number, LARGE] for number in range(3)]
    assert list(folder.iterdir()) == []


def test_what_does_not_fit_leaves_no_file(ends):
    left, _, folder = ends
    left.socket.setblocking(False)
    sent = 0
    while left.send([sent, LARGE]):
        sent += 1
    assert sent > 10
    assert len(list(folder.iterdir())) == sent


def test_two_workers_share_no_folder():
    assert spill_folder() != spill_folder()


def test_a_peer_that_is_gone_is_noticed(ends):
    left, right, _ = ends
    right.close()
    with pytest.raises(OSError, match="pipe"):
        left.send(1)
    assert left.receive(socket.MSG_DONTWAIT) is None
