"""The package of a previous release, unpacked from the repository.

There is no release on a package index yet, so a revision stands for one: hundreds of commits old,
with other module names and other tables, but the same messages. FLEET_PREVIOUS names another
revision, or a folder that holds the package ``aztask``.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

from tests.unpacking import unpack

ROOT = Path(__file__).parents[2]
REVISION = "b2c54ecf48ecbb9e352a2386a7f322c220112900"
BEFORE_OWNERS = "07ed1ded23b6a2d1485455ff7c732dd93ad50d12"
"""The last revision whose rows in result stores have no owners."""
BEFORE_ROWS = "c4bc0580df2e892daddaa27947c88ae03c2dc7cd"
"""The last revision that had code of its own for each kind of row and each store."""
BEFORE_STORED = "7d7a5fe09cf01b9d61df921e264d8c1af66cf472"
"""The last revision that signed what it stored as it signed what it sent."""
WITH_ENCRYPTION = "52dea1a75d19a345edbe939fb304b87b0e49fbe2"
"""One of the first revisions that encrypt."""


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
    try:
        packed = subprocess.run(
            ["git", "archive", "--format=tar", name, "aztask"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"").decode(errors="replace").strip().split("\n")[0]
        raise MissingRelease(
            f"the previous release, revision {name}, is not in this repository ({said or error});"
            " run `git fetch --unshallow`, or name a revision or a folder in FLEET_PREVIOUS"
        ) from None
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        unpack(archive, folder)
    return folder
