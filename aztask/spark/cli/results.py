"""``aztask spark results``: the results of a submission as a table, one row for each key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from aztask.errors import ResultTimeout
from aztask.operate.cli.options import Duration, app_option, json_option
from aztask.operate.cli.output import print_fields, print_json
from aztask.operate.cli.target import app_spec, find_app
from aztask.spark.cli.session import (
    FORMATS,
    SessionOptions,
    check_tables,
    open_session,
    session_options,
    tables_option,
)
from aztask.spark.cli.submit import watched
from aztask.support.display import visible


@click.command("results")
@app_option
@click.option("--submission-id", required=True, help="The name that was given to submit.")
@click.option("-o", "--output", help="The folder to write; it must not exist.")
@tables_option
@click.option("--manifest", help="The folder that was given to submit as --manifest.")
@click.option("--input", "path", help="Instead: the file or folder with the submitted rows.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    help="The format of --input. [default: by the suffix, else parquet]",
)
@click.option("--key", help="The key column of --input.")
@click.option("--schema", help="The values' type, as in SQL: INT. [default: JSON texts]")
@click.option("--wait", "timeout", type=Duration(), help="Wait up to so long for all tasks to end.")
@session_options
@json_option
def command(
    submission_id: str,
    output: str | None,
    tables: str | None,
    manifest: str | None,
    path: str | None,
    kind: str | None,
    key: str | None,
    schema: str | None,
    timeout: float | None,
    spark_options: SessionOptions,
    as_json: bool,
) -> None:
    """Write the results of a submission to a table, one row for each key.

    Rows have the state, the value, the error, times, attempts and the worker of each task, and
    no key is missing: what has not ended is open, what the result store does not know is
    unaccounted. Counts of the states are printed at the end.

    With --tables instead of -o, the rows become those of the submission in the Delta table results,
    in the place of earlier ones.
    """
    _check_output(output, tables, schema)
    if (manifest is None) == (path is None) or (path is None) != (key is None):
        raise click.UsageError("give --manifest, or --input and --key", click.get_current_context())
    if app_spec() is not None:
        find_app()  # a mistake shows before Spark starts
    with open_session(spark_options, f"aztask results {submission_id}") as session:
        from aztask.spark import Target, results
        from aztask.spark.session import translated_errors
        from aztask.spark.submission.submission import read_table

        with translated_errors():
            frame = None if path is None else read_table(session, path, kind=kind)
            found = results(
                session,
                submission_id,
                manifest=manifest,
                frame=frame,
                key=key or "key",
                schema=schema,
                target=Target.of_environment(app_spec()),
            )
            late = "" if timeout is None else _waited(found, timeout)
            with watched(session) as step:
                step("looking results up")
                written = _written(session, found, output, tables, submission_id)
            rows = written.groupBy("state").count().collect()
    counts = {row["state"]: int(row["count"]) for row in sorted(rows)}
    if as_json:
        print_json(counts)
    else:
        print_fields([*counts.items()])
    click.echo(
        f"wrote {sum(counts.values()):,} results to {visible(output or str(tables))}", err=True
    )
    if late:
        raise ResultTimeout(late)


def _check_output(output: str | None, tables: str | None, schema: str | None) -> None:
    if (output is None) == (tables is None) or (tables is not None and schema is not None):
        raise click.UsageError(
            "give -o, or --tables without --schema: the table has JSON texts",
            click.get_current_context(),
        )
    check_tables(tables)


def _waited(found: Any, timeout: float) -> str:
    """Wait for the tasks; returns what has not ended in time, "" for nothing."""
    from aztask.spark import wait

    try:
        wait(found, timeout=timeout, progress=_show)
    except ResultTimeout as error:
        return str(error)
    return ""


def _written(
    session: Any, found: Any, output: str | None, tables: str | None, submission_id: str
) -> Any:
    """Write the results to the folder or the tables; returns what is there now."""
    if output is not None:
        found.write.parquet(output)
        return session.read.parquet(output)
    from aztask.spark import place_of, read_table, store_results

    place = place_of(str(tables))
    store_results(found, place, submission_id)
    rows = read_table(session, place, "results").rows
    return rows.where(rows["submission_id"] == submission_id)


def _show(counts: Mapping[str, int]) -> None:
    text = ", ".join(f"{count:,} {state}" for state, count in sorted(counts.items()))
    click.echo(text or "no keys", err=True)
