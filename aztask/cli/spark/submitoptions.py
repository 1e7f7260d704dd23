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
        type=Columns(),
        help="The arguments: path,width=column. [default: every column, if the app is known]",
    ),
    click.option("-q", "--queue", help="Send them to this queue. [default: the task's]"),
    click.option("--rate", type=Rate(), help="Send at most so many messages per second, in total."),
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
