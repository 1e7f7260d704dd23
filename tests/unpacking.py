"""Unpacking archives of other projects, also with a Python that lacks tarfile's filters."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def unpack(
    archive: tarfile.TarFile, folder: Path, members: Iterable[tarfile.TarInfo] | None = None
) -> None:
    """Unpack the members, all by default, into `folder`.

    Nothing is written outside of the folder where tarfile can see to it: from Python 3.11.4 on.
    Debian 12 has 3.11.2.
    """
    options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    archive.extractall(folder, members=members, **options)  # noqa: S202  # pip or git has made them
