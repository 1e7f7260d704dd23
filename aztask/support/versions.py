"""What runs here: the versions that a bug report needs. Nothing in it is a secret or a path."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sqlite3
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from aztask.version import __version__


def versions() -> dict[str, Any]:
    """Versions of aztask, Python, SQLite, the system, and of each installed library that it names.

    * ``build``: tells wheels of one version apart: a hash over the hashes of the files that were
      installed, the same on every machine. ``editable`` for a checkout, None if that is unknown.
    """
    try:
        own = distribution("aztask")
    except PackageNotFoundError:  # run from a folder, or as the emulator's own wheel
        own = None
    names = own.requires if own is not None else None
    return {
        "aztask": __version__,
        "build": None if own is None else build_of(own),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "sqlite": sqlite3.sqlite_version,
        "libraries": {
            name: found
            for name in sorted({_name(line) for line in names or ()})
            if (found := _installed(name)) is not None
        },
    }


def build_of(own: Distribution) -> str | None:
    """The build of an installed distribution, see `versions`."""
    about = json.loads(own.read_text("direct_url.json") or "{}")
    if about.get("dir_info", {}).get("editable"):
        return "editable"
    lines = sorted(
        f"{file},{file.hash.value}"
        for file in own.files or ()
        if file.hash is not None and file.parts[0] == "aztask" and file.suffix != ".pyc"
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12] if lines else None


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return found[0].lower() if found else requirement


def _installed(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None
