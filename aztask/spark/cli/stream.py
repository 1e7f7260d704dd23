"""``aztask spark stream``: the rows of files as tasks, as the files arrive."""

from __future__ import annotations

from typing import Any

import click

from aztask.errors import AztaskError
from aztask.operate.cli.options import Duration, app_option, json_option
from aztask.operate.cli.output import print_json
from aztask.spark.cli.session import SessionOptions, open_session, session_options, submit_options
from aztask.support.display import plural

POLL_SECONDS = 1


@click.command("stream")
@app_option
@submit_options
@click.option("--submission-id", default="", help="A name for the ids. [default: the query's id]")
@click.option("--schema", required=True, help="The columns, as in SQL: path STRING, width INT.")
@click.option("--checkpoint", required=True, help="The folder where Spark records its progress.")
@click.option(
    "--unique",
    type=click.Choice(("stream", "batch")),
    default="stream",
    help="Take a key as unique in the whole stream, or in each batch only.",
)
@click.option("--available-now", is_flag=True, help="Send the rows that exist now, then end.")
@click.option("--trigger", type=Duration(), help="Time between two batches.")
@click.option(
    "--max-files", type=click.IntRange(1), help="Read at most so many files in one batch."
)
@session_options
@json_option
def command(
    path: str,
    kind: str | None,
    task: str,
    schema: str,
    max_files: int | None,
    options: dict[str, Any],
    spark_options: SessionOptions,
    as_json: bool,
    **about: Any,
) -> None:
    """Send one task for each row of files, as the files arrive in a folder.

    With the same --checkpoint it continues where it stopped. If a batch is sent again, it gets the
    same task ids. The command runs until Ctrl-C, unless --available-now is given.
    """
    with open_session(spark_options, f"aztask stream {task}") as session:
        from aztask.spark import stream
        from aztask.spark.session import ended_well
        from aztask.spark.submission.submission import read_stream, with_damaged_line

        rows = read_stream(session, path, schema=schema, kind=kind, max_files=max_files)
        query = stream(rows, task, **about, **options)
        try:
            shown = -1
            while not ended_well(query, POLL_SECONDS):
                shown = _print_batches(query, shown, as_json)
            _print_batches(query, shown, as_json)
        except AztaskError as error:
            raise with_damaged_line(session, error, path, kind, schema) from error
        finally:
            query.stop()


def _print_batches(query: Any, shown: int, as_json: bool) -> int:
    """Print the batches after number `shown`; returns the newest one's number."""
    for progress in query.recentProgress:
        batch, rows = int(progress.batchId), int(progress.numInputRows)
        if batch <= shown or not rows:
            continue
        shown = batch
        seconds = progress.durationMs.get("triggerExecution", 0) / 1000
        if as_json:
            about = {"batch": batch, "rows": rows, "seconds": seconds}
            print_json({**about, "query": str(progress.id)})
        else:
            click.echo(f"batch {batch}: {plural(rows, 'row')} sent in {seconds:.1f} s")
    return shown
