"""``aztask stats``: what workers did in a window, by queue, task or worker."""

from __future__ import annotations

from dataclasses import asdict

import click

from aztask.operate.cli.options import Text, app_option, json_option
from aztask.operate.cli.output import iso_time, print_json, print_table
from aztask.operate.cli.target import open_app
from aztask.operate.history import BY, WINDOWS, Figure, history, marks
from aztask.support.display import visible
from aztask.support.durations import fine_span

COLUMNS = (
    *("runs", "failed", "retried", "leases lost", "wait median", "wait 95%"),
    *("run median", "run 95%"),
)


def cells(figure: Figure) -> list[object]:
    """A figure in the columns of a table."""
    times = figure.wait_median, figure.wait_95, figure.run_median, figure.run_95
    counts = figure.ended, figure.failed, figure.retried, figure.lost
    return [*counts, *(None if each is None else fine_span(each) for each in times)]


@click.command("stats")
@app_option
@click.option(
    "--window", type=click.Choice([*WINDOWS]), default="hour", help="How far to look back."
)
@click.option("--by", type=click.Choice(BY), default="task", help="What each line is about.")
@click.option("--queue", type=Text(), help="Only of this queue.")
@click.option("--task", type=Text(), help="Only of this task.")
@click.option("--worker", type=Text(), help="Only of this worker.")
@json_option
def command(window: str, by: str, as_json: bool, **only: str | None) -> None:
    """Show what workers did in the last hour, day, week or 30 days.

    The busiest first. Runs are all that ended; percentiles are at most a fifth off. Below the table
    are how many messages waited, deploys, pauses and silent workers. Workers write every 10
    seconds, to Azure Tables every 30, and look at their queues once a minute. Queues and tasks are
    kept for 30 days, workers for one; both together for an hour.
    """
    with open_app(reads=True) as app:
        view = history(app, window, by, {name: text for name, text in only.items() if text})
        beside = marks(app, view)
    rows = [("", view.figure), *view.figures()]
    waited = view.waited
    if as_json:
        for name, figure in rows:
            more = {} if name else {"waiting": waited and waited._asdict()}
            print_json({"window": window, by: name or None, **asdict(figure), **more})
        return
    print_table((by, *COLUMNS), [[name or "(all)", *cells(figure)] for name, figure in rows])
    if waited is not None:
        click.echo(
            f"waiting messages: {waited.most} at most, at {iso_time(waited.most_at)}; "
            f"{waited.last} at last, at {iso_time(waited.last_at)}"
        )
    for each in beside:
        click.echo(visible(f"{iso_time(each.at)} {each.text}"))
