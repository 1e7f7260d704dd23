"""``aztask worker``: receive, run, settle, until stopped."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from aztask.address.addresses import MEMORY
from aztask.app import App
from aztask.brokers.base import ANY_SESSION
from aztask.cli.options import LONGEST_LEASE, Duration, all_names, app_option, queues_option
from aztask.cli.reload import Reloader, require_library
from aztask.cli.target import app_spec, find_app
from aztask.doctor.examination import contradictions
from aztask.errors import AztaskError, ConfigurationError
from aztask.hooks import WorkerInfo
from aztask.results.base import Provisioned
from aztask.worker.logs import FORMATS, configure
from aztask.worker.options import MOST_CONCURRENCY, MOST_SESSIONS, POOLS, WorkerOptions
from aztask.worker.pool.forking import ForkServerHandle, first_server
from aztask.worker.supervisor import Supervisor

logger = logging.getLogger("aztask.worker")

SHORTEST_LEASE = 0.1


@click.command("worker")
@app_option
@queues_option("Queues to receive from, a,b or several times. [default: those that the app names]")
@click.option(
    "-c",
    "--concurrency",
    type=click.IntRange(1, MOST_CONCURRENCY),
    default=8,
    help="Tasks that run at once.",
)
@click.option(
    "--pool",
    type=click.Choice(POOLS),
    default=POOLS[0],
    help="processes: one task in each; threads: all in one child process.",
)
@click.option(
    "--prefetch",
    type=click.IntRange(0, 100_000),
    help="Deliveries to hold beyond those that run. [default: as many as the measured speed asks]",
)
@click.option("--burst", is_flag=True, help="End when the queues are empty, delays included.")
@click.option("--max-tasks", type=click.IntRange(1), help="End after so many tasks.")
@click.option(
    "--shutdown-timeout",
    type=Duration(),
    default="30s",
    help="What running tasks get to end in after SIGTERM or Ctrl-C; then they are given back.",
)
@click.option(
    "--lease",
    type=Duration(least=SHORTEST_LEASE, most=LONGEST_LEASE),
    help="How long a delivery is held before it must be renewed. [default: as the app says]",
)
@click.option(
    "--max-lease",
    type=Duration(least=SHORTEST_LEASE),
    help="How long one run may hold its message, renewals included. [default: as the app says]",
)
@click.option(
    "--poll-ceiling",
    type=Duration(least=0.02, most=3600.0),
    help="Longest pause between looks at an empty Storage queue. [default: as the app says]",
)
@click.option(
    "--max-sessions",
    type=click.IntRange(1, MOST_SESSIONS),
    help="Sessions of a queue to work on at a time. [default: the concurrency, at most 32]",
)
@click.option(
    "--session-share",
    type=Duration(least=0.01),
    default="5s",
    help="How long to stay with one session while others may wait.",
)
@click.option("--name", default="", help="The worker's name. [default: made of host and process]")
@click.option("--reload", is_flag=True, help="Start anew when the app's source files change.")
@click.option("--log-format", type=click.Choice(FORMATS), default=FORMATS[0], help="On stderr.")
def command(
    queues: Sequence[tuple[str, ...]], reload: bool, log_format: str, **options: Any
) -> None:
    """Run tasks from queues until stopped.

    SIGTERM or Ctrl-C: receive nothing more, let running tasks end, give back the rest. A second
    one: give everything back now.
    """
    if reload:
        require_library()
    server = first_server()  # before there is a thread, a connection or anything of the app's
    with contextlib.closing(server) if server else contextlib.nullcontext():
        restart = _start(server, queues, log_format, options, reload=reload)
    if restart:
        os.execv(sys.executable, [sys.executable, "-m", "aztask", *sys.argv[1:]])


def _start(
    server: ForkServerHandle | None,
    queues: Sequence[tuple[str, ...]],
    log_format: str,
    options: dict[str, Any],
    *,
    reload: bool,
) -> bool:
    """Work until stopped; whether to start anew."""
    configure(log_format)
    app = find_app(required="a worker")
    try:
        settings = WorkerOptions(queues=all_names(queues) or tuple(app.queue_names()), **options)
        _check(app, settings)
        return _run(app, settings, server, reload=reload)
    finally:
        app.close()


def _check(app: App, options: WorkerOptions) -> None:
    """Find now what would otherwise be found again and again: a wrong name, a broker away."""
    if app.address.partition("?")[0].endswith(MEMORY):
        raise ConfigurationError(
            f"{app.address} is seen by one process alone, so a worker finds nothing there; "
            "give the app a file, for example local://"
        )
    for queue in options.queues:
        lease = options.lease or app.lease_seconds(queue)
        session = ANY_SESSION if app.has_sessions(queue) else None
        app.broker.receiver(queue, lease=lease, session=session).close()
    if isinstance(app.results, Provisioned):
        app.results.check()


def _run(
    app: App, options: WorkerOptions, server: ForkServerHandle | None, *, reload: bool
) -> bool:
    supervisor = Supervisor(app, app_spec() or "", options, server=server)
    reloader = Reloader(Path.cwd(), supervisor.stop) if reload else None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, supervisor.stop)
    logger.info("%s", _start_line(app, supervisor.name, options))
    _warn(app, options)
    if reloader is not None:
        reloader.start()
    with app.hooks.worker.around(WorkerInfo(supervisor.name, options.queues)):
        supervisor.run()
    logger.info("worker %s stopped: %s", supervisor.name, supervisor.journal.summary())
    if reloader is None:
        return False
    reloader.stop()
    return reloader.due


def _warn(app: App, options: WorkerOptions) -> None:
    """Say which settings of the queues contradict the app's, as far as they may be read."""
    try:
        for finding in contradictions(app, options.queues, options.lease):
            logger.warning("%s", finding)
    except AztaskError as error:  # the worker goes on: its intakes try again
        logger.warning("the queues' settings cannot be looked at now: %s", error)


def _start_line(app: App, name: str, options: WorkerOptions) -> str:
    pool = "processes" if options.pool == "processes" else "threads in one process"
    leases = sorted({options.lease or app.lease_now(queue) for queue in options.queues})
    held = " to ".join(f"{lease:g}" for lease in dict.fromkeys((leases[0], leases[-1])))
    return (
        f"worker {name}: {options.concurrency} {pool}, queues {', '.join(options.queues)}, "
        f"broker {app.address}, lease {held} s"
    )
