"""``--master``, ``--conf`` and ``--py-files``, which all commands of the pipeline share, and the
session they ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import click

from aztask.support.masking import printable

LOG_LEVEL = "OFF"
"""Of the JVM: what goes wrong is told once, by us, and not with a page of its own stack."""


@dataclass(frozen=True)
class SessionOptions:
    """What --master, --conf and --py-files said."""

    master: str | None = None
    conf: dict[str, str] = field(default_factory=dict)
    py_files: tuple[str, ...] = ()


class Setting(click.ParamType[tuple[str, str]]):
    """``spark.key=value``."""

    name = "setting"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """The key and the value."""
        if isinstance(value, tuple):
            return value
        key, equals, setting = value.partition("=")
        if not equals or not key.startswith("spark."):
            self.fail(f"{printable(value, 60)} is not like spark.key=value", param, ctx)
        return key, setting


def session_options(function: Callable[..., None]) -> Callable[..., None]:
    """``--master``, ``--conf`` and ``--py-files``; the command gets them as ``wish``."""

    @click.option(
        "--master", help="Where Spark runs. [default: what Spark's settings say, or here]"
    )
    @click.option(
        "--conf",
        type=Setting(),
        multiple=True,
        help="A setting of Spark, spark.key=value; may be given several times.",
    )
    @click.option(
        "--py-files",
        multiple=True,
        help="A .py file, zip or wheel for the executors; may be given several times. See pack.",
    )
    @wraps(function)
    def gathered(
        *args: Any, master: str | None, conf: Any, py_files: tuple[str, ...], **rest: Any
    ) -> None:
        function(*args, wish=SessionOptions(master, dict(conf), py_files), **rest)

    return gathered


@contextmanager
def open_session(wish: SessionOptions, name: str) -> Iterator[Any]:
    """The SparkSession of one command, stopped at the end unless it ran before.

    name: as Spark's own pages show the job. Raises ConfigurationError where pyspark or Java is
    missing, or a file of --py-files is no code.
    """
    from aztask import spark

    ran_before = spark.active_session() is not None
    session = spark.get_session(name=name, master=wish.master, conf=wish.conf, log_level=LOG_LEVEL)
    from aztask.spark.pyfiles import add_py_files

    try:
        add_py_files(session, wish.py_files)
        yield session
    finally:
        if not ran_before:
            session.stop()
