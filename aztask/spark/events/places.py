"""Where event files are: a directory or a blob container. Both have the same operations:

* ``list``: the files, and counts of those that are skipped;
* ``clock``: the time by which files appear;
* ``open``: a stream of a file in bounded memory; ``open_seekable``: for small reads anywhere in it;
* ``local_copy``: the file on this machine;
* ``scratch``: a temporary file, which ``publish`` then stores under its name, atomically (False:
  the name exists already);
* ``remove``: delete a file; ``waits``: whether a worker has yet to upload it, so that it must stay.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, Union

from aztask.errors import ConfigurationError
from aztask.spark.events.files import Directory, Fetched
from aztask.support.display import printable

if TYPE_CHECKING:
    from aztask.spark.events.container import Container

EventPlace: TypeAlias = Union[Directory, "Container"]
ReadablePlace: TypeAlias = EventPlace | Fetched
"""What files are read from; a `Fetched` file comes from `aztask.spark.events.sparkfiles`."""
CONTAINERS: Final = "aztask.spark.events.container"
"""Imported only when a container is named: every Python worker of Spark imports this module, most
read directories, and importing the blob SDK takes longer than all the rest.
"""


def place_of(text: str | os.PathLike[str], account_variable: str | None = None) -> EventPlace:
    """The place that `text` names: a directory, or ``blob://ACCOUNT/CONTAINER[/FOLDER]``.

    account_variable: the environment variable with the account's connection string; `text` is then
    ``CONTAINER[/FOLDER]``. Raises ConfigurationError.
    """
    text = os.fspath(text)
    if not text:
        raise ConfigurationError("no directory is named; give a path or blob://ACCOUNT/CONTAINER")
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if text.startswith("blob://") or account_variable is not None:
        return _container(text, account_variable)
    if "://" in text:
        raise ConfigurationError(
            f"{printable(text)} is neither a directory nor blob://ACCOUNT/CONTAINER: Spark can "
            "read events there, but a stream or a compaction needs one of these"
        )
    return Directory(str(Path(text).absolute()))


def _container(text: str, account_variable: str | None) -> Container:
    """The container, after a check that its address is complete."""
    module = import_module(CONTAINERS)
    container: Container = module.Container(text, account_variable or module.ACCOUNT_VARIABLE)
    container.address()
    return container
