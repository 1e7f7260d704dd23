"""``aztask spark``: the data pipeline. Rules

1. One file here for each command, with its line in `COMMANDS`; a test holds the lines equal to
   what the commands say themselves.
2. A command's module imports click and light things only, so that help needs no Spark: what it
   takes from `aztask.spark` is imported in its function, after `session.open_session`.
"""

from __future__ import annotations

import click

from aztask.cli.group import LazyGroup
from aztask.cli.options import app_option

COMMANDS: dict[str, str] = {
    "submit": "Send one task for each row of files.",
    "stream": "Send one task for each row of files, as the files come into a folder.",
    "pack": "Pack aztask, its needs and your modules into a zip for --py-files.",
    "compact": "Compact the events of closed hours into Parquet files.",
    "stats": "Show how tasks waited, ran and ended, from their events.",
    "recommend": "Recommend leases, prefetch and a split of queues from the event log.",
    "dlq": "Look at dead letters by the million, and replay a selection.",
}


@click.group("spark", cls=LazyGroup, package="aztask.cli.spark", table=COMMANDS)
@app_option
def command() -> None:
    """Submit tasks from Spark, and learn from their events.

    Needs `pip install aztask[spark]` and Java 17 or newer. The commands run on this machine unless
    --master says otherwise.
    """
