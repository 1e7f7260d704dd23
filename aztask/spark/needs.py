"""What the pipeline needs on this machine, looked for before anything of it is used.

This module imports none of it, so that what is missing can be said in one line.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from aztask.errors import ConfigurationError

LIBRARIES = ("pyspark", "pyarrow", "pandas")


def check_installed() -> None:
    """Raise ConfigurationError where a library is missing."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: "
            "pip install 'aztask[spark]'"
        )


def check_java() -> None:
    """Raise ConfigurationError where no Java would be found to run Spark's own part."""
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
