"""The command group. Rules

1. ``aztask --help`` loads no command: `COMMANDS` has their names and short help, and a test checks
   that these are the commands' own.
2. Nothing here imports Kombu, an SDK or the App. The module of a command does, when it is loaded.
3. Every error ends in `aztask.operate.cli.failures`: one line on stderr and an exit code.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from aztask.operate.cli import failures
from aztask.operate.cli.group import LazyGroup
from aztask.operate.cli.options import app_option
from aztask.version import __version__

COMMANDS = {
    "demo": "Run one task for each file under PATH, and check every result.",
    "init": "Write a small project into the new folder NAME.",
    "worker": "Run tasks from queues until the worker is stopped.",
    "send": "Send one invocation of TASK and print its id.",
    "run": "Run TASK in this process, and print its value as JSON.",
    "result": "Show how a task ended, or list the newest runs.",
    "explain": "Show what happened to a task, in order, and why; or to the tasks of a workflow.",
    "steps": "Show the recorded steps of a task, and go back to one of them.",
    "signal": "Send the signal NAME with a value to a task that waits for it.",
    "cancel": "Cancel tasks before they start.",
    "stats": "Show what workers did in the last hour, day, week or 30 days.",
    "tasks": "List the tasks that the app registers.",
    "workers": "List the workers of the last day: running ones first, the newest first.",
    "running": "List the tasks that workers run now, the longest-running first.",
    "queues": "List, create, read, empty and delete queues.",
    "control": "Pause and drain queues and tasks, scale workers, change limits, while they run.",
    "limits": "List the limits of the app, and how far each one is used.",
    "dlq": "List, show, replay and purge dead letters.",
    "workflow": "List, show, cancel and resume workflows.",
    "move": "Move the queues of the app, and its rows, to another address.",
    "jobs": "List, run and cancel jobs: actions over many items.",
    "migrate": "Check what a Celery project needs to move to aztask, and rewrite a part of it.",
    "schedule": "List, show, pause, resume, trigger and backfill schedules.",
    "scheduler": "Send the tasks of schedules until stopped, without running tasks.",
    "azure": "Write files for what the app needs on Azure, and compare it with what is there.",
    "doctor": "Check that broker, queues, permissions, clock, results and events match the app.",
    "top": "Show what needs attention, what workers did, queues, tasks and failures live.",
    "dashboard": "Serve the operations page in a browser until stopped.",
    "watch": "Send a notice to a webhook when a rule holds, and once more when it ends.",
    "mcp": "Serve queries, and actions if you allow them, to agents over MCP.",
    "exporter": "Serve queue depths and worker counts to Prometheus until stopped.",
    "emulator": "Run a local Service Bus for development and tests.",
    "completion": "Print the script that completes commands and options in your shell.",
    "spark": "Submit tasks from Spark, and learn from their events.",
}

OTHERS = {
    "beat": "aztask scheduler, or aztask worker alone, which sends the tasks of schedules too",
    "call": "aztask send TASK",
    "enqueue": "aztask send TASK",
    "help": "aztask --help",
    "inspect": "aztask running, aztask workers or aztask tasks",
    "list": "aztask tasks, aztask queues or aztask result",
    "purge": "aztask queues purge QUEUE",
    "retry": "aztask dlq replay ID",
    "revoke": "aztask cancel ID",
    "start": "aztask worker",
    "status": "aztask workers",
    "version": "aztask --version",
}
"""Commands of other tools, and what to write here instead."""

BESIDE = {
    "explain": "result",
    "limits": "control",
    "running": "workers",
    "signal": "steps",
    "tasks": "result",
}
"""Commands that are in the module of another one."""

ELSEWHERE = {"spark": "aztask.spark.cli"}
"""Commands that are beside what they are about: only it and they need Spark."""

SILENT = ("worker",)
"""Commands that print nothing on stdout."""

EPILOG = (
    "Exit codes: 0 ok, 1 failure, 2 usage or import error, 3 broker unreachable, "
    "4 configuration or permission, 5 not found. Every option has an environment variable, for "
    "example AZTASK_WORKER_CONCURRENCY for the worker's --concurrency. Without -A, commands use "
    "the queues and results that AZTASK_BROKER and AZTASK_RESULTS name."
)


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    if ctx.params["as_json"]:  # eager, so it is known by now wherever it stands
        click.echo(json.dumps(import_module("aztask.support.versions").versions()))
    else:
        click.echo(f"aztask {__version__}")
    ctx.exit()


@click.group(
    cls=LazyGroup,
    package="aztask.operate.cli",
    table=COMMANDS,
    others=OTHERS,
    beside=BESIDE,
    elsewhere=ELSEWHERE,
    epilog=EPILOG,
    context_settings={
        "auto_envvar_prefix": "AZTASK",
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "max_content_width": 100,
    },
)
@app_option
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    allow_from_autoenv=False,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    is_eager=True,
    allow_from_autoenv=False,
    help="With --version: as JSON, with the build, Python, SQLite and libraries.",
)
@click.pass_context
def cli(ctx: click.Context, as_json: bool) -> None:
    """Run Python functions as background tasks on Azure queues, under auto-renewing leases."""
    if as_json:
        raise click.UsageError("--json belongs after the command, or beside --version", ctx)
    if sys.stdout is None and ctx.invoked_subcommand not in SILENT:
        raise failures.CommandFailed(
            "stdout is closed, so nothing was done; open it, for example with >/dev/null"
        )
    if os.environ.get("NO_COLOR"):
        ctx.color = False


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")  # the locale may not have all characters
    try:
        code = cli.main(arguments, prog_name="aztask", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001  # the one place that turns errors into codes
        return failures.report(error)
    return code if isinstance(code, int) else failures.OK


def _open_closed_streams() -> None:
    """Point closed standard streams to /dev/null.

    Otherwise the next file, a queue's or a socket, gets the number of a closed stream, and what a
    library or a child process prints ends up in it. Python's own stream stays None.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            os.set_inheritable(null, True)


def main() -> NoReturn:
    """The entry point of the command ``aztask``."""
    sys.exit(run())
