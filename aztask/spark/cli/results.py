"""``aztask spark results``: the results of a submission as Parquet files, one row for each key."""

from __future__ import annotations

from collections.abc import Mapping

import click

from aztask.errors import ResultTimeout
from aztask.operate.cli.options import Duration, app_option, json_option
from aztask.operate.cli.output import print_fields, print_json
from aztask.operate.cli.target import app_spec, find_app
from aztask.spark.cli.session import FORMATS, SessionOptions, open_session, session_options
from aztask.spark.cli.submit import watched
from aztask.support.display import visible


@click.command("results")
@app_option
@click.option("--submission-id", required=True, help="The name that was given to submit.")
@click.option("-o", "--output", required=True, help="The folder to write; it must not exist.")
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
    output: str,
    manifest: str | None,
    path: str | None,
    kind: str | None,
    key: str | None,
    schema: str | None,
    timeout: float | None,
    spark_options: SessionOptions,
    as_json: bool,
) -> None:
    """Write the results of a submission to Parquet files, one row for each key.

    Rows have the state, the value, the error, times, attempts and the worker of each task, and
    no key is missing: what has not ended is open, what the result store does not know is
    unaccounted. Counts of the states are printed at the end.
    """
    if (manifest is None) == (path is None) or (path is None) != (key is None):
        raise click.UsageError("give --manifest, or --input and --key", click.get_current_context())
    if app_spec() is not None:
        find_app()  # a mistake shows before Spark starts
    with open_session(spark_options, f"aztask results {submission_id}") as session:
        from aztask.spark import Target, results, wait
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
            late = ""
            if timeout is not None:
                try:
                    wait(found, timeout=timeout, progress=_show)
                except ResultTimeout as error:
                    late = str(error)
            with watched(session) as step:
                step("looking results up")
                found.write.parquet(output)
            rows = session.read.parquet(output).groupBy("state").count().collect()
    counts = {row["state"]: int(row["count"]) for row in sorted(rows)}
    if as_json:
        print_json(counts)
    else:
        print_fields([*counts.items()])
    click.echo(f"wrote {sum(counts.values()):,} results to {visible(output)}", err=True)
    if late:
        raise ResultTimeout(late)


def _show(counts: Mapping[str, int]) -> None:
    text = ", ".join(f"{count:,} {state}" for state, count in sorted(counts.items()))
    click.echo(text or "no keys", err=True)
