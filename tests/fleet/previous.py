"""The package of a previous release: unpacked from the repository, or out of a wheel of its tag.

`release_before` is the release before this one: its tag, or a stated revision as long as there is
none. FLEET_BEFORE names another tag or revision.

The other revisions are from before changes that a fleet has to survive: hundreds of commits old,
with other module names and other tables, but the same messages. FLEET_PREVIOUS names another
revision, or a folder that holds the package ``aztask``.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.unpacking import unpack

ROOT = Path(__file__).parents[2]
REVISION = "b2c54ecf48ecbb9e352a2386a7f322c220112900"
BEFORE_OWNERS = "07ed1ded23b6a2d1485455ff7c732dd93ad50d12"
"""The last revision whose rows in result stores have no owners."""
WITH_OWNERS = "ed462b7c31e9896f1abfc0e5c5d4d6b45e1b42b9"
"""One of the first revisions whose rows have owners and share a port."""
BEFORE_STORED = "7d7a5fe09cf01b9d61df921e264d8c1af66cf472"
"""The last revision that signed what it stored as it signed what it sent."""
WITH_ENCRYPTION = "52dea1a75d19a345edbe939fb304b87b0e49fbe2"
"""One of the first revisions that encrypt."""
WITH_BEATS = "041268ac16b898f0ebdee101c30cabdfe1a89fd3"
"""One of the first revisions that have a scheduler for Celery beat."""
STANDS_FOR = "6c906d670b749b1c23164cb9c6cb5033a0e065a8"
"""Stands for the release before this one until there is a tag: of 28 November 2026."""

BUILD = """
import sys, tomllib
system = tomllib.load(open("pyproject.toml", "rb"))["build-system"]
sys.path[:0] = system.get("backend-path", [])
__import__(system["build-backend"]).build_wheel(sys.argv[1])
"""
"""What a front end does (PEP 517), without an environment of its own: setuptools is here."""


class MissingRelease(Exception):
    """The previous release cannot be had; the message says what to do."""


def previous_release(folder: Path, revision: str | None = None) -> Path:
    """The folder to import the previous release from.

    * `folder`: where it is unpacked.
    * `revision`: this one, whatever FLEET_PREVIOUS names.

    Raises MissingRelease if the repository does not have the revision: a clone may be shallow.
    """
    name = revision or os.environ.get("FLEET_PREVIOUS") or REVISION
    if (Path(name) / "aztask" / "__init__.py").is_file():
        return Path(name).resolve()
    _unpack(name, folder, "aztask", variable="FLEET_PREVIOUS")
    return folder


def release_before(repository: Path = ROOT) -> str:
    """The tag of the release before this one, which may have a tag itself, or `STANDS_FOR`."""
    if named := os.environ.get("FLEET_BEFORE"):
        return named
    described = subprocess.run(
        ["git", "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD^"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or STANDS_FOR


def wheel_of(revision: str, folder: Path) -> Path:
    """Build the wheel of a revision with its own build backend; the folder to import it from.

    Raises MissingRelease as `previous_release` does.
    """
    source, built = folder / "source", folder / "built"
    _unpack(revision, source, variable="FLEET_BEFORE")
    built.mkdir()
    made = subprocess.run(
        [sys.executable, "-c", BUILD, str(built)],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    (wheel,) = built.glob("aztask-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")  # noqa: S202  # we have built it
    return folder / "installed"


def _unpack(revision: str, folder: Path, *paths: str, variable: str) -> None:
    try:
        packed = subprocess.run(
            ["git", "archive", "--format=tar", revision, *paths],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"").decode(errors="replace").strip().split("\n")[0]
        raise MissingRelease(
            f"the previous release, revision {revision}, is not in this repository"
            f" ({said or error}); run `git fetch --unshallow`, or name a revision"
            f"{' or a folder' if paths else ''} in {variable}"
        ) from None
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        unpack(archive, folder)
