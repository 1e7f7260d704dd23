"""The options that ``aztask spark submit`` and ``aztask spark stream`` share."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from aztask.cli.options import Duration, Rate
from aztask.cli.target import app_spec, find_app

BROKER_VARIABLE = "AZTASK_BROKER"

FORMATS = ("parquet", "csv", "json")


class Columns(click.ParamType[dict[str, str]]):
    """``path,width=w``: arguments, and the columns that they come from where the names differ."""

    name = "columns"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, str]:
        """{argument: column}."""
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
        help="What the files are. [default: as their names say, else parquet]",
    ),
    click.option("--task", required=True, help="The task's name."),
    click.option("--key", required=True, help="The column that is unique: task ids come from it."),
    click.option(
        "--columns",
        type=Columns(),
        help="The arguments: path,width=column. [default: every column, if the app is known]",
    ),
    click.option("-q", "--queue", help="Where to send them. [default: the task's queue]"),
    click.option("--rate", type=Rate(), help="Messages a second at most, in all."),
    click.option(
        "--writers",
        type=click.IntRange(1),
        help="With --rate: how many partitions share it. [default: the number of cores]",
    ),
    click.option("--delay", type=Duration(), help="Time until they may start."),
    click.option(
        "--expires",
        type=Duration(least=0.001),
        help="Time after which they are not started any more.",
    ),
    click.option(
        "--patience", type=Duration(), help="Time without success until it fails. [default: 5m]"
    ),
)


def submit_options(function: Callable[..., None]) -> Callable[..., None]:
    """All of them; those that say how to send are gathered into ``options``."""

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
            raise click.UsageError("--writers goes with --rate", click.get_current_context())
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
    """Where the queues are: the app, which is imported now to find mistakes at once, or the
    variable that says it, which executors read for themselves.
    """
    spec = app_spec()
    if spec is not None:
        find_app()
        return {"app": spec}
    if not os.environ.get(BROKER_VARIABLE):
        raise click.UsageError(
            f"name the app with -A module:app, or say in {BROKER_VARIABLE} where the queues are",
            click.get_current_context(),
        )
    return {"broker_env": BROKER_VARIABLE}
