"""``aztask top``: queues, workers, running tasks and failures, live."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from aztask.errors import ConfigurationError
from aztask.operate.cli.group import extra_module
from aztask.operate.cli.options import Duration, Text, all_names, app_option, queues_option
from aztask.operate.cli.target import open_app
from aztask.operate.firstpage import OverviewFilter, OverviewReader
from aztask.operate.overview import Reader


@click.command("top")
@app_option
@queues_option("Show these queues: a,b or -Q a -Q b. [default: all queues]")
@click.option(
    "--interval",
    type=Duration(least=0.5, most=60.0),
    default="2s",
    help="Read the figures this often; + and - change it.",
)
@click.option(
    "--filter",
    "chosen",
    type=Text(),
    help="Begin with this filter, such as 'queue=mail window=day', or a page's address.",
)
def command(queues: Sequence[tuple[str, ...]], interval: float, chosen: str | None) -> None:
    """Show what needs attention, what workers did, queues, tasks and failures live.

    Needs pip install "aztask[top]". Keys: / filters, q quits, p pauses, r reads now, Tab changes
    the table. The figures and the filter are those of the first page of aztask dashboard. Workers
    report every 5 seconds to the result store, and what they did every 10.
    """
    screen = extra_module("aztask.operate.top.screen", "aztask top", "top")
    if not sys.stdout.isatty():
        raise ConfigurationError(
            "aztask top needs a terminal; for programs there are: aztask queues --json, "
            "aztask workers --json, aztask running --json"
        )
    names = all_names(queues)
    first = OverviewFilter.parse(chosen or "")
    with open_app() as app:
        reader = Reader(app, lambda: names or app.broker.listing().queues)
        shown = screen.TopApp(
            OverviewReader(reader), address=app.address, interval=interval, chosen=first
        )
        shown.run()
