"""Files and directories that other users of the machine cannot read.

Queue files hold arguments, and a reader of an SQLite file can lock out every writer. So what aztask
creates is for its own user, mode 0600 and 0700, unless a group is named: then 0660 and 0770. The
process's umask plays no part, and what exists already keeps its mode.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
GROUP_FILE_MODE: Final = 0o660
GROUP_DIRECTORY_MODE: Final = 0o2770
"""With the set-group-id bit, files made in the directory belong to its group (inode(7))."""

BINARY: Final = getattr(os, "O_BINARY", 0)
"""The flag without which Windows changes the line ends of what is written."""


def make_directory(path: Path, group: int | None = None) -> None:
    """Create a directory and its missing parents, each private. group: the id of the group to share
    them with. Raises OSError.
    """
    if path.is_dir():
        return
    if not path.parent.exists():
        make_directory(path.parent, group)
    mode = DIRECTORY_MODE if group is None else GROUP_DIRECTORY_MODE
    try:
        path.mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
        return  # another process was faster, and sets the mode
    _own(path, mode, group)


def make_file(path: Path, group: int | None = None) -> None:
    """Create an empty private file, unless it exists. Raises OSError."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | BINARY
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, flags, FILE_MODE))
        _own(path, FILE_MODE if group is None else GROUP_FILE_MODE, group)


def _own(path: Path, mode: int, group: int | None) -> None:
    """Set group and mode. The group comes first: changing it clears the set-group-id bit."""
    if group is not None:
        os.chown(path, -1, group)
    path.chmod(mode)
