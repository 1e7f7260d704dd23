"""The options ``--master``, ``--conf`` and ``--py-files`` of all commands, and their session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import click

from aztask.config import environment_options
from aztask.errors import ConfigurationError
from aztask.operate.cli.options import Duration, PositiveRate
from aztask.operate.cli.target import app_spec, find_app, open_app
from aztask.support.display import printable

LOG_LEVEL = "OFF"
"""The JVM's: aztask reports each error once, in one line; the JVM would add a page of stack."""


@dataclass(frozen=True)
class SessionOptions:
    """The values of --master, --conf and --py-files."""

    master: str | None = None
    conf: dict[str, str] = field(default_factory=dict)
    py_files: tuple[str, ...] = ()


class SparkSetting(click.ParamType[tuple[str, str]]):
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
        "--master",
        help="Run Spark there, such as sc://HOST. [default: SPARK_REMOTE, Spark's own settings, "
        "else this machine]",
    )
    @click.option(
        "--conf",
        type=SparkSetting(),
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
    from aztask.spark.packing import add_py_files

    try:
        add_py_files(session, spark_options.py_files)
        yield session
    finally:
        if not was_active:
            session.stop()


# -- the place of the events: an argument of the commands, or the settings of the workers --


ACCOUNT_VARIABLE = "AZTASK_EVENTS_ACCOUNT"


def events_options(function: Callable[..., None]) -> Callable[..., None]:
    """``[PATH]``, ``--account-variable`` and the session's options.

    The command gets ``path`` and ``account_variable`` as `aztask.spark.read_events` takes them.
    """

    @click.argument("path", required=False)
    @click.option("--events", metavar="PATH", help="The same as the argument PATH.")
    @click.option(
        "--account-variable",
        metavar="NAME",
        help="Read PATH as a container's name; this environment variable, here and on executors, "
        "holds the account's connection string.",
    )
    @session_options
    @wraps(function)
    def gathered(
        *args: Any, path: str | None, events: str | None, account_variable: str | None, **rest: Any
    ) -> None:
        if path is not None and events is not None:
            raise click.UsageError("--events is PATH: give one", click.get_current_context())
        path = path or events
        if path is None:
            path, account_variable = _from_settings(account_variable)
        function(*args, path=path, account_variable=account_variable, **rest)

    return gathered


def _from_settings(account_variable: str | None) -> tuple[str, str | None]:
    """The container to which workers upload, otherwise the directory to which they write.

    The app of -A, which is what the workers run, has its own settings for what is not set here.
    """
    options = environment_options()
    if "events" not in options and "events_container" not in options and app_spec() is not None:
        with open_app() as app:
            if app.settings.events is not None:
                options["events"] = str(app.settings.events)
    container = options.get("events_container")
    if container is not None:
        given = account_variable or ("events_account" in options and ACCOUNT_VARIABLE) or None
        return container, given
    if "events" in options:
        return options["events"], None
    raise ConfigurationError(
        "there is no PATH to events; give one (a directory or blob://ACCOUNT/CONTAINER), or set "
        "AZTASK_EVENTS or AZTASK_EVENTS_CONTAINER"
    )


# -- the folder of the Delta tables ---------------------------------------------------------


def tables_option(function: Callable[..., None]) -> Callable[..., None]:
    """``--tables``; the command gets it as ``tables``."""
    return click.option(
        "--tables",
        metavar="PLACE",
        help="Also write Delta tables: a directory, or blob://ACCOUNT/CONTAINER/FOLDER.",
    )(function)


def check_tables(tables: str | None) -> None:
    """Raise ConfigurationError if --tables is given and its library is missing."""
    from aztask.spark.needs import TABLE_LIBRARIES, check_installed

    if tables is not None:
        check_installed(TABLE_LIBRARIES, extra="delta")


# -- the options that ``aztask spark submit`` and ``aztask spark stream`` share ------------


BROKER_VARIABLE = "AZTASK_BROKER"

FORMATS = ("parquet", "csv", "json")


class ColumnList(click.ParamType[dict[str, str]]):
    """``path,width=w``: arguments, each with its column if the names differ."""

    name = "columns"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, str]:
        """The option's text as {argument: column}."""
        if isinstance(value, dict):
            return value
        columns = {}
        for part in value.split(","):
            argument, equals, column = part.partition("=")
            if not argument or (equals and not column):
                self.fail(f"{value!r} is not like path,width=column", param, ctx)
            columns[argument] = column or argument
        return columns


_SHARED = (
    click.option("--input", "path", required=True, help="The file or folder with the rows."),
    click.option(
        "--format",
        "kind",
        type=click.Choice(FORMATS),
        help="The files' format. [default: by their suffix, else parquet]",
    ),
    click.option("--task", required=True, help="The task's name."),
    click.option("--key", required=True, help="A column of unique values; makes the task ids."),
    click.option(
        "--columns",
        type=ColumnList(),
        help="The arguments: path,width=column. [default: every column, if the app is known]",
    ),
    click.option("-q", "--queue", help="Send them to this queue. [default: the task's]"),
    click.option(
        "--rate", type=PositiveRate(), help="Send at most so many messages per second, in total."
    ),
    click.option(
        "--writers",
        type=click.IntRange(1),
        help="With --rate: let so many partitions share it. [default: the number of cores]",
    ),
    click.option("--delay", type=Duration(), help="Wait so long before the tasks may start."),
    click.option(
        "--expires",
        type=Duration(least=0.001),
        help="Do not start tasks after this time.",
    ),
    click.option(
        "--patience", type=Duration(), help="Fail after so long without success. [default: 5m]"
    ),
)


def submit_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the shared options; those about sending reach the command as ``options``."""

    @wraps(function)
    def gathered(
        *args: Any,
        columns: dict[str, str] | None,
        queue: str | None,
        rate: float | None,
        writers: int | None,
        delay: float | None,
        expires: float | None,
        patience: float | None,
        **rest: Any,
    ) -> None:
        if writers is not None and rate is None:
            raise click.UsageError("--writers needs --rate", click.get_current_context())
        given = {
            "columns": columns,
            "queue": queue,
            "rate": rate,
            "writers": writers,
            "delay": delay,
            "expires": expires,
            "patience": patience,
        }
        options = {name: value for name, value in given.items() if value is not None}
        function(*args, options=options | _place(), **rest)

    for option in reversed(_SHARED):
        gathered = option(gathered)
    return gathered


def _place() -> dict[str, str]:
    """The broker: the app of -A, or the environment variable that each executor reads.

    The app is imported now, so that a mistake shows at once.
    """
    spec = app_spec()
    if spec is not None:
        find_app()
        return {"app": spec}
    if not os.environ.get(BROKER_VARIABLE):
        raise click.UsageError(
            f"name the app with -A module:app, or the broker in {BROKER_VARIABLE}",
            click.get_current_context(),
        )
    return {"broker_env": BROKER_VARIABLE}
