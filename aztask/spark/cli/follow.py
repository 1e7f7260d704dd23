"""``aztask spark follow``: event files become rows of Delta tables as they appear."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from aztask.operate.cli.options import Duration, app_option, json_option
from aztask.operate.cli.output import local_time, print_json
from aztask.spark.cli.session import SessionOptions, check_tables, events_options, open_session
from aztask.support.display import plural

if TYPE_CHECKING:
    from aztask.spark import FollowedBatch


@click.command("follow")
@app_option
@events_options
@click.option(
    "--tables",
    required=True,
    metavar="PLACE",
    help="The folder of the tables: a directory, or blob://ACCOUNT/CONTAINER/FOLDER.",
)
@click.option("--available-now", is_flag=True, help="Add the files that exist now, then end.")
@click.option(
    "--trigger", type=Duration(), default="1m", help="Time between two looks for new files."
)
@click.option(
    "--max-files",
    type=click.IntRange(1),
    default=1000,
    help="Add at most so many files in one batch.",
)
@click.option(
    "--log-name", metavar="NAME", help="The log's earlier place, if it was moved. [default: PATH]"
)
@json_option
def command(
    path: str,
    account_variable: str | None,
    tables: str,
    available_now: bool,
    trigger: float,
    max_files: int,
    log_name: str | None,
    spark_options: SessionOptions,
    as_json: bool,
) -> None:
    """Add event files to the Delta tables events and odd as they appear.

    PATH is a directory or blob://ACCOUNT/CONTAINER. The position is in the tables' own log, so it
    continues where the tables end: each file is added once, whenever the command is killed, and
    also if it runs twice at once. Compact as before, without --tables. The command runs until
    Ctrl-C, unless --available-now is given.
    """
    check_tables(tables)
    with open_session(spark_options, "aztask follow") as spark:
        from aztask.spark import follow_events, place_of
        from aztask.spark.session import translated_errors

        with translated_errors():
            for batch in follow_events(
                spark,
                place_of(path, account_variable),
                place_of(tables),
                available_now=available_now,
                trigger=trigger,
                max_files=max_files,
                log_name=log_name,
            ):
                _print(batch, as_json)


def _print(batch: FollowedBatch, as_json: bool) -> None:
    if as_json:
        print_json(asdict(batch))
        return
    click.echo(
        f"{plural(batch.files, 'file')} added to the tables ({plural(batch.rows, 'event')}, "
        f"{plural(batch.odd, 'odd row')}, {batch.bytes / 1e6:,.1f} MB): "
        f"all that appeared until {local_time(batch.until)}"
    )
