"""The options ``--master``, ``--conf`` and ``--py-files`` of all commands, and their session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import click

from aztask.support.masking import printable

LOG_LEVEL = "OFF"
"""The JVM's: aztask reports each error once, in one line; the JVM would add a page of stack."""


@dataclass(frozen=True)
class SessionOptions:
    """The values of --master, --conf and --py-files."""

    master: str | None = None
    conf: dict[str, str] = field(default_factory=dict)
    py_files: tuple[str, ...] = ()


class Setting(click.ParamType[tuple[str, str]]):
    """An option's text of the form ``spark.key=value``."""

    name = "setting"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Split the text into key and value."""
        if isinstance(value, tuple):
            return value
        key, equals, setting = value.partition("=")
        if not equals or not key.startswith("spark."):
            self.fail(f"{printable(value, 60)} is not like spark.key=value", param, ctx)
        return key, setting


def session_options(function: Callable[..., None]) -> Callable[..., None]:
    """``--master``, ``--conf`` and ``--py-files``; the command gets them as ``spark_options``."""

    @click.option(
        "--master", help="Run Spark there. [default: Spark's own settings, else this machine]"
    )
    @click.option(
        "--conf",
        type=Setting(),
        multiple=True,
        help="Set a Spark property, spark.key=value; may be given several times.",
    )
    @click.option(
        "--py-files",
        multiple=True,
        help="Give executors a .py file, zip or wheel; may be given several times. See pack.",
    )
    @wraps(function)
    def gathered(
        *args: Any, master: str | None, conf: Any, py_files: tuple[str, ...], **rest: Any
    ) -> None:
        function(*args, spark_options=SessionOptions(master, dict(conf), py_files), **rest)

    return gathered


@contextmanager
def open_session(spark_options: SessionOptions, name: str) -> Iterator[Any]:
    """Open the SparkSession of a command; stop it at the end, unless it was active before.

    name: the job's name on Spark's own pages. Raises ConfigurationError if pyspark or Java is
    missing, or a file of --py-files is not code.
    """
    from aztask import spark

    was_active = spark.active_session() is not None
    session = spark.get_session(
        name=name, master=spark_options.master, conf=spark_options.conf, log_level=LOG_LEVEL
    )
    from aztask.spark.pyfiles import add_py_files

    try:
        add_py_files(session, spark_options.py_files)
        yield session
    finally:
        if not was_active:
            session.stop()
