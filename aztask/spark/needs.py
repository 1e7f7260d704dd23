"""Checks that the libraries and the Java that the pipeline needs are on this machine.

This module imports none of them, so that one line can say what is missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from aztask.errors import ConfigurationError
from aztask.support.late import install_command

LIBRARIES: Final = ("pyspark", "pyarrow", "pandas")
CONNECT_LIBRARIES: Final = ("grpc", "grpc_status", "google.rpc", "zstandard")
"""What PySpark's client of Spark Connect needs besides."""
REPORT_LIBRARIES: Final = ("jinja2",)
"""What only the HTML report needs: a hosted Spark without it runs everything else."""

TABLE_LIBRARIES: Final = ("deltalake",)
"""What the driver needs to write or read Delta tables; executors do without it."""


def check_installed(libraries: Sequence[str] = LIBRARIES, *, extra: str = "spark") -> None:
    """Raise ConfigurationError, with the command that installs them, if libraries are missing.

    extra: aztask's, which brings them.
    """
    missing = [name for name in libraries if not _is_there(name)]
    if missing:
        raise ConfigurationError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: "
            f"{install_command(extra)}"
        )


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def check_java() -> None:
    """Raise ConfigurationError if Spark would find no Java to run on."""
    home = os.environ.get("JAVA_HOME")
    if home and not (Path(home) / "bin" / "java").is_file():
        raise ConfigurationError(
            f"JAVA_HOME is {home}, where there is no bin/java: set it to a Java of version 17 or "
            "newer, or unset it"
        )
    if not home and shutil.which("java") is None:
        raise ConfigurationError(
            "Spark needs Java 17 or newer, and there is no java on the PATH: install it (Debian "
            "and Ubuntu: apt-get install openjdk-17-jre-headless), or set JAVA_HOME"
        )
