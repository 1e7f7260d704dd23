"""``aztask spark``: the data pipeline on the command line.

Rules
1. Each command has one file here and its line in `COMMANDS`; a test keeps these lines equal to the
   commands' own help.
2. A command's module imports click and light modules only, so help needs no Spark. Its function
   imports what it uses of `aztask.spark`, after `session.open_session`.
"""

from __future__ import annotations

import click

from aztask.operate.cli.group import LazyGroup
from aztask.operate.cli.options import app_option

COMMANDS: dict[str, str] = {
    "submit": "Send one task for each row of files.",
    "stream": "Send one task for each row of files, as the files arrive in a folder.",
    "results": "Write the results of a submission to a table, one row for each key.",
    "pack": "Pack aztask, its needs and your modules into a zip for --py-files.",
    "compact": "Compact the events of closed hours into Parquet files.",
    "follow": "Add event files to the Delta tables events and odd as they appear.",
    "stats": "Show how tasks waited, ran and ended, from their events.",
    "workflows": "Show which workflows took longest, and which tasks made them wait.",
    "recommend": "Recommend leases, prefetch and splits of queues, from the event log.",
    "dlq": "List and group dead letters by the million, and replay a selection.",
}


@click.group("spark", cls=LazyGroup, package="aztask.spark.cli", table=COMMANDS)
@app_option
def command() -> None:
    """Submit tasks from Spark, and learn from their events.

    Needs `pip install "aztask[spark]"` and Java 17 or newer, or, for a Spark Connect server, only
    `pip install "aztask[spark-connect]"`. The commands run on this machine unless --master or
    SPARK_REMOTE says otherwise.
    """
