"""``aztask spark workflows``: the longest workflows, or one with its critical path."""

from __future__ import annotations

from typing import Any, Final

import click

from aztask.errors import NotFound
from aztask.operate.cli.options import Text, app_option, json_option
from aztask.operate.cli.output import print_json, print_table
from aztask.spark.cli.session import SessionOptions, events_options, open_session
from aztask.support.display import plural, visible

SLOWEST: Final = 10


@click.command("workflows")
@app_option
@events_options
@click.option("--id", "workflow", type=Text(), help="Show this workflow: its critical path.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=20, help="List at most this many workflows."
)
@json_option
def command(
    path: str,
    account_variable: str | None,
    workflow: str | None,
    limit: int,
    spark_options: SessionOptions,
    as_json: bool,
) -> None:
    """Show which workflows took longest, and which tasks made them wait.

    Lists the longest workflows in the events under PATH: a directory, blob://ACCOUNT/CONTAINER, or
    any path that Spark reads (abfss://, dbfs:/, file:///). With --id, it shows one workflow's
    critical path, the tasks whose delay would have delayed its end, and its 10 slowest tasks.
    """
    with open_session(spark_options, "aztask workflows") as spark:
        from aztask.spark import read_events, workflow_statistics
        from aztask.spark.events.statistics import plain
        from aztask.spark.session import translated_errors

        with translated_errors():
            events = read_events(spark, path, account_variable=account_variable)
            figures = workflow_statistics(events.events, workflow)
            rows = plain(figures.workflows.limit(limit))
            if workflow is not None and not rows:
                raise NotFound(f"no event there belongs to workflow {visible(workflow)}")
            if workflow is not None:
                rows[0]["critical_path"] = plain(figures.critical_paths)
                rows[0]["slowest"] = plain(figures.slowest(SLOWEST))
            events.close()
    if as_json:
        for row in rows:
            print_json(row)
    elif workflow is not None:
        _print_one(rows[0])
    elif rows:
        _print_list(rows)
    else:
        click.echo(
            f"no workflow among the events of {plural(events.files, 'file')}; tasks of workflows "
            "have events with a workflow_id, from aztask 0.2 on"
        )


def _print_list(rows: list[dict[str, Any]]) -> None:
    print_table(
        ["workflow", "took", "tasks", "runs", "failed", "slowest task", "its time"],
        [
            [
                row["workflow_id"],
                _span(row["seconds"]),
                row["tasks"],
                row["runs"],
                row["failed"],
                row["slowest_task_id"],
                _span(row["slowest_seconds"]),
            ]
            for row in rows
        ],
    )


def _print_one(row: dict[str, Any]) -> None:
    workflow, tasks, failed = visible(row["workflow_id"]), row["tasks"], row["failed"]
    click.echo(f"{workflow}: {_span(row['seconds'])}, {tasks} tasks, {failed} failed\n")
    for title, steps in (("critical path", "critical_path"), ("slowest tasks", "slowest")):
        waits = steps == "critical_path"
        print_table(
            [title, "task", *(["waited"] if waits else []), "ran", "runs", "state"],
            [
                [
                    step["task_id"],
                    step["task"],
                    *([_span(step["wait_seconds"])] if waits else []),
                    _span(step["run_seconds"]),
                    step["runs"],
                    step["state"] or "",
                ]
                for step in row[steps]
            ],
        )
        if waits:
            click.echo()


def _span(seconds: float | None) -> str:
    return "" if seconds is None else f"{max(0.0, seconds):.3g} s"
