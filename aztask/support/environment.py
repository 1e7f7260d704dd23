"""Environment variables, each of which may be a file instead."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from aztask.errors import ConfigurationError
from aztask.support.masking import printable


def read_environment(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The value of the variable `name`, or the content of the file that ``NAME_FILE`` names.

    One line break at the file's end is dropped: secrets that an orchestrator mounts often have one.
    None when neither is set. Raises ConfigurationError when both are, or the file cannot be read.
    """
    value, file = environ.get(name), environ.get(f"{name}_FILE")
    if value and file:
        raise ConfigurationError(f"{name} and {name}_FILE are both set; unset one of them")
    if not file:
        return value or None
    try:
        with Path(file).open(encoding="utf-8") as stream:
            return stream.read(65536).removesuffix("\n")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a UTF-8 text file"
        raise ConfigurationError(
            f"the file {printable(file)} that {name}_FILE names cannot be read: {why}"
        ) from None
