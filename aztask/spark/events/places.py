"""Where event files are: a directory, or a blob container. Both offer the same operations:

``list`` the files and count what is passed over; ``clock``, by which files appear; ``open`` a file
as a stream in bounded memory, ``open_seekable`` for a little from anywhere, ``local_copy`` as a
file on this machine; ``scratch`` to write what ``publish`` then stores whole and under a new name,
or not at all (False: it is there already); ``remove``.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, Union

from aztask.errors import ConfigurationError
from aztask.spark.events.directory import Directory
from aztask.support.masking import printable

if TYPE_CHECKING:
    from aztask.spark.events.container import Container

EventPlace: TypeAlias = Union[Directory, "Container"]
CONTAINERS: Final = "aztask.spark.events.container"
"""Imported when a container is named: every Python worker of Spark imports this module here, most
read directories, and the blob SDK takes longer to import than all the rest.
"""


def place_of(text: str | os.PathLike[str], account_variable: str | None = None) -> EventPlace:
    """The place that `text` names: ``blob://ACCOUNT/CONTAINER[/FOLDER]``, a directory, or, where
    `account_variable` names an environment variable with a connection string, ``CONTAINER``.

    Raises ConfigurationError.
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
            f"{printable(text)} is neither a directory nor blob://ACCOUNT/CONTAINER; mount it, or "
            "copy the files to where this session can read them"
        )
    return Directory(str(Path(text).absolute()))


def _container(text: str, account_variable: str | None) -> Container:
    """A container that can be addressed."""
    module = import_module(CONTAINERS)
    container: Container = module.Container(text, account_variable or module.ACCOUNT_VARIABLE)
    container.address()
    return container
