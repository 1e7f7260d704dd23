"""``aztask scheduler``: send the tasks of schedules, without running any."""

from __future__ import annotations

import logging
import os
import socket
from types import FrameType

import click

from aztask.operate.action import results_of
from aztask.operate.cli.group import CliCommand
from aztask.operate.cli.options import app_option
from aztask.operate.cli.target import open_app
from aztask.worker.firstprocess import stay_first
from aztask.worker.logs import FORMATS, LEVELS, configure
from aztask.worker.stopsignals import DRAIN, NOW, end_while_starting, handle
from aztask.worker.upkeep.scheduling import Scheduling

logger = logging.getLogger("aztask.scheduler")


@click.command("scheduler", cls=CliCommand, extra="name the app with -A, for example -A shop:app")
@app_option
@click.option(
    "--log-format", type=click.Choice(FORMATS), default=FORMATS[0], help="Format the log on stderr."
)
@click.option(
    "--log-level", type=click.Choice(LEVELS), default=LEVELS[1], help="Log from this level on."
)
def command(log_format: str, log_level: str) -> None:
    """Send the tasks of schedules until stopped, without running tasks.

    Every worker does this already: you need it only where workers run with --no-schedules, or where
    none runs all the time. Any number of them may run.
    """
    stay_first()
    configure(log_format, logging.getLevelNamesMapping()[log_level.upper()])
    end_while_starting()
    with open_app(required="the scheduler", creates=True) as app:
        results_of(app)
        name = f"scheduler-{socket.gethostname()}-{os.getpid()}"
        scheduling = Scheduling(app, name)

        def stop(signum: int, frame: FrameType | None) -> None:
            scheduling.request_stop()

        handle(stop, *DRAIN, *NOW)
        declared = app.schedules.declared
        logger.info("%s: %d schedules of the code: %s", name, len(declared), ", ".join(declared))
        scheduling.run()
    logger.info("%s stopped", name)
