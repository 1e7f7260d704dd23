"""Sends code to the executors of a running session: ``addPyFile``, for wheels too.

Spark copies wheels to its executors but never imports from them; see `aztask.spark.packing`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pyspark import SparkFiles
from pyspark.sql import SparkSession

from aztask.errors import ConfigurationError
from aztask.spark.packing import wheel_files, write_zip
from aztask.support.masking import printable

IMPORTED: Final = (".py", ".zip", ".egg", ".jar")
WHEEL: Final = ".whl"
REPACKED: Final = "aztask-repacked"


def add_py_files(spark: SparkSession, paths: Iterable[str]) -> None:
    """Call ``addPyFile`` for each path; a wheel is repacked as a zip, which workers can import.

    Spark removes that zip at the session's end. Raises ConfigurationError.
    """
    for path in paths:
        spark.sparkContext.addPyFile(_importable(path))


def _importable(path: str) -> str:
    """The file to give to ``addPyFile``, made here if `path` is a wheel."""
    shown = printable(path)
    if "://" in path:
        if path.endswith(WHEEL):
            raise ConfigurationError(f"{shown} is a wheel on another machine: copy it here first")
        return path
    if not Path(path).is_file():
        raise ConfigurationError(f"{shown} is not a file; give a .py file, a zip or a wheel")
    if path.endswith(IMPORTED):
        return path
    if not path.endswith(WHEEL):
        raise ConfigurationError(
            f"{shown} is neither a .py file nor a zip nor a wheel: Spark would not import from it"
        )
    files = wheel_files(Path(path))
    folder = Path(SparkFiles.getRootDirectory(), REPACKED)
    folder.mkdir(exist_ok=True)
    target = folder / f"{Path(path).stem}.zip"
    write_zip(target, files)
    return str(target)
