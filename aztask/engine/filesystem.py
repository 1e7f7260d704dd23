"""Where a database file may lie.

SQLite's write-ahead log keeps its index in memory that all processes using the file share, so they
must run on one machine (sqlite.org/wal.html, "Disadvantages", 2). On a network file system that
breaks silently; so such a place is refused before the file is touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from aztask.errors import ConfigurationError

_NETWORK = """
nfs nfs4 cifs smb3 smbfs ncpfs afs 9p ceph glusterfs lustre beegfs gpfs ocfs2 gfs2 orangefs davfs
fuse.sshfs fuse.s3fs fuse.glusterfs fuse.rclone fuse.blobfuse fuse.blobfuse2 fuse.davfs2 fuse.ceph
fuse.ceph-fuse fuse.cifs fuse.smbnetfs fuse.gcsfuse fuse.juicefs
"""
NETWORK_FILE_SYSTEMS = frozenset(_NETWORK.split())
"""Types, as /proc/self/mountinfo spells them, that other machines may have mounted as well."""

MOUNTINFO = Path("/proc/self/mountinfo")

_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))


def file_system(directory: str, mountinfo: Iterable[str]) -> str:
    """The type of the file system that holds `directory`, an absolute path without links.

    mountinfo: lines as in proc(5), ``/proc/[pid]/mountinfo``. Of several mounts on one point the
    last covers the others. Returns "" when no line matches.
    """
    best, found = -1, ""
    for line in mountinfo:
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = fields[4]
        for escape, character in _ESCAPES:
            point = point.replace(escape, character)
        inside = directory == point or directory.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, found = len(point), after.split(" ", 1)[0]
    return found


def refuse_network(directory: str) -> None:
    """Raise ConfigurationError if `directory` lies on a network file system.

    What cannot be told (no /proc, an unknown type) passes.
    """
    try:
        with MOUNTINFO.open(encoding="utf-8", errors="surrogateescape") as lines:
            kind = file_system(directory, lines)
    except OSError:
        return
    if kind in NETWORK_FILE_SYSTEMS:
        raise ConfigurationError(
            f"{directory} is on a network file system ({kind}), where the queue file would be "
            "damaged: its log needs memory shared by processes of one machine; "
            "choose a local directory"
        )


def prepare(path: str) -> str:
    """The real, absolute form of `path`; its directory exists afterwards.

    Raises ConfigurationError with one line about what is wrong with it.
    """
    if not path or "\0" in path:
        raise ConfigurationError(f"{path!r} cannot be a file name; give the path of the queue file")
    try:
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise ConfigurationError(f"{path!r} is a directory; give the path of the queue file")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigurationError(
            f"cannot use {path!r} as the queue file: {why}; choose a place that can be written"
        ) from error
    refuse_network(str(target.parent))
    return str(target)


def boot_id() -> str:
    """Tells one boot of the machine from another; "" where the system has no such thing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
