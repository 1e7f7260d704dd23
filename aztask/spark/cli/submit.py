"""``aztask spark submit``: one task for each row of files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from aztask.errors import SubmitFailed
from aztask.operate.cli.options import app_option, json_option
from aztask.operate.cli.output import ProgressLine, print_fields, print_json
from aztask.spark.cli.session import SessionOptions, open_session, session_options, submit_options


@click.command("submit")
@app_option
@submit_options
@click.option("--submission-id", required=True, help="A name; use the same one in a rerun.")
@click.option("--schema", help="The columns, as in SQL: path STRING, width INT.")
@click.option(
    "--check-keys/--no-check-keys",
    default=True,
    help="Check the keys for nulls and duplicates first.",
)
@click.option("--manifest", help="Write keys and task ids to files in this folder, for results.")
@click.option("--dry-run", is_flag=True, help="Do everything but the sending.")
@session_options
@json_option
def command(
    path: str,
    kind: str | None,
    schema: str | None,
    task: str,
    options: dict[str, Any],
    spark_options: SessionOptions,
    as_json: bool,
    **about: Any,
) -> None:
    """Send one task for each row of files.

    Task ids come from --submission-id and the --key column. If you submit again under the same
    name, workers with a result store still run each row once. Without -A, AZTASK_BROKER names the
    broker, here and on the executors, and --columns is required.
    """
    with open_session(spark_options, f"aztask submit {task}") as session:
        from aztask.spark import submit
        from aztask.spark.submission.submission import read_table, with_damaged_line

        table = read_table(session, path, kind=kind, schema=schema)
        try:
            with watched(session) as step:
                report = submit(table, task, progress=step, **about, **options)
        except SubmitFailed as error:
            if error.report is None:
                raise with_damaged_line(session, error, path, kind, schema) from error
            _print(error.report, as_json)
            raise
        _print(report, as_json)


def _print(report: Any, as_json: bool) -> None:
    if as_json:
        print_json(report.as_dict())
        return
    print_fields(
        [
            ("submission", report.submission_id),
            ("task", report.task),
            ("queue", report.queue),
            ("rows", report.rows),
            ("would be sent" if report.dry_run else "sent", report.sent),
            ("sent again", report.retried),
            ("failed", report.failed),
            ("partitions", report.partitions),
            ("seconds", report.seconds),
        ]
    )


@contextmanager
def watched(session: Any) -> Iterator[Callable[[str], None]]:
    """Show the finished partitions of the newest stage while the block runs Spark jobs.

    Yields a function that the block calls with the name of each step.
    """
    from aztask.spark.kind import watched_stages

    steps = ["reading"]
    shown: list[tuple[int, ProgressLine]] = []

    def show(stage: int, tasks: int, ended: int) -> None:
        if not shown or shown[-1][0] != stage:
            shown[:] = [(stage, ProgressLine(tasks, "partitions", rate=False))]
        shown[-1][1].show(ended, f" done, {steps[-1]}")

    try:
        with watched_stages(session, show):
            yield steps.append
    finally:
        for _, line in shown:
            line.clear()
