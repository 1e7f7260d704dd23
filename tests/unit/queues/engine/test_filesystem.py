"""Which file systems the engine's file may lie on: read from lines as Linux writes them."""

from __future__ import annotations

import pytest

from aztask.errors import ConfigurationError
from aztask.queues.engine import filesystem
from aztask.queues.engine.filesystem import NETWORK_FILE_SYSTEMS, file_system, prepare

MOUNTS = r"""
22 28 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:12 - proc proc rw
28 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
31 28 0:26 / /run rw,nosuid,nodev,noexec,relatime shared:5 - tmpfs tmpfs rw,size=3267648k,mode=755
57 28 0:49 / /home/shared rw,relatime shared:30 - nfs4 nas:/export rw,vers=4.2,proto=tcp
58 28 0:50 / /mnt/with\040space rw,relatime - cifs //server/share rw,vers=3.1.1
59 57 259:3 / /home/shared/local rw,relatime master:4 shared:31 - xfs /dev/nvme0n1p3 rw
60 28 0:51 / /mnt/me rw,nosuid,nodev,relatime - fuse.sshfs me@host:/ rw,user_id=1000
61 28 0:52 / /mnt/twice rw - nfs server:/a rw
62 28 0:53 / /mnt/twice rw - tmpfs tmpfs rw
63 28 0:54 / /srv rw - overlay overlay rw,lowerdir=/a,upperdir=/b,workdir=/c
a line that is not one
""".strip().splitlines()


@pytest.mark.parametrize(
    ("directory", "kind"),
    [
        ("/", "ext4"),
        ("/home", "ext4"),
        ("/home/sharedlike", "ext4"),
        ("/home/shared", "nfs4"),
        ("/home/shared/a/b", "nfs4"),
        ("/home/shared/local/a", "xfs"),
        ("/mnt/with space/x", "cifs"),
        ("/mnt/me", "fuse.sshfs"),
        ("/mnt/twice/x", "tmpfs"),
        ("/run", "tmpfs"),
        ("/srv/x", "overlay"),
    ],
)
def test_the_innermost_and_latest_mount_counts(directory, kind):
    assert file_system(directory, MOUNTS) == kind


def test_no_mounts_no_answer():
    assert file_system("/", []) == ""


def test_network_file_systems_are_known_and_local_ones_are_not_among_them():
    assert {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"} <= NETWORK_FILE_SYSTEMS
    assert not NETWORK_FILE_SYSTEMS & {"ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "fuse"}


def test_a_network_place_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 0:1 / {tmp_path} rw - nfs4 nas:/export rw\n")
    monkeypatch.setattr(filesystem, "MOUNTINFO", mounts)
    with pytest.raises(ConfigurationError, match=r"network file system \(nfs4\)"):
        prepare(str(tmp_path / "queues.db"))
    assert not (tmp_path / "queues.db").exists()


def test_without_proc_every_place_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "MOUNTINFO", tmp_path / "missing")
    assert prepare(str(tmp_path / "queues.db")) == str(tmp_path / "queues.db")
