"""``aztask jobs``: actions over many items that any process goes on with."""

from __future__ import annotations

import threading

import click

from aztask.operate.cli.group import CliGroup
from aztask.operate.cli.options import Text, app_option, json_option
from aztask.operate.cli.output import iso_time, local_time, print_json, print_table
from aztask.operate.cli.target import open_app
from aztask.operate.jobrunner import JobRunner
from aztask.operate.jobs import Job, cancel, jobs
from aztask.support.display import visible
from aztask.worker.logs import FORMATS, configure
from aztask.worker.stopsignals import DRAIN, NOW, handle


@click.group("jobs", cls=CliGroup)
def command() -> None:
    """List, run and cancel jobs: actions over many items."""


@command.command("list")
@app_option
@click.option("--limit", type=click.IntRange(min=1), default=50, help="List at most so many.")
@json_option
def list_jobs(limit: int, as_json: bool) -> None:
    """List jobs, the newest first."""
    with open_app(reads=True) as app:
        found = jobs(app, limit=limit)
    if as_json:
        for each in found.jobs:
            print_json(_plain(each, found.at))
        return
    print_table(
        ["id", "state", "done", "of", "what", "by", "made"],
        [
            [
                each.key,
                each.shown(found.at),
                each.done,
                each.count,
                each.text,
                each.by,
                local_time(each.created),
            ]
            for each in found.jobs
        ],
    )


def _plain(job: Job, at: float) -> dict[str, object]:
    return {
        "id": job.key,
        "action": job.kind,
        "state": job.shown(at),
        "done": job.done,
        "count": job.count,
        "text": job.text,
        "by": job.by,
        "via": job.via,
        "created": iso_time(job.created),
        "changed": iso_time(job.changed),
        "error": job.error or None,
        "holder": job.holder or None,
    }


@command.command("run")
@app_option
@click.option("--once", is_flag=True, help="Exit when no job is open that can be taken.")
@click.option(
    "--log-format", type=click.Choice(FORMATS), default=FORMATS[0], help="Format the log on stderr."
)
def run_jobs(once: bool, log_format: str) -> None:
    """Work on open jobs until stopped. A job whose process died goes on after a minute.

    Dashboards with people who may act do this, too.
    """
    configure(log_format)
    stopping = threading.Event()
    with open_app() as app:
        runner = JobRunner(app)
        if not once:
            handle(lambda *_: stopping.set(), *DRAIN, *NOW)
            runner.run(stopping)
            return
        while (done := runner.work_once()) is not None:
            click.echo(f"{done.key}: {visible(done.text)}: {done.done:,} of {done.count:,}")


@command.command("cancel")
@app_option
@click.argument("job", type=Text())
def cancel_job(job: str) -> None:
    """Stop an open job. What it has done stays done."""
    with open_app() as app:
        if cancel(app, job).act():
            click.echo("cancelled; a process that works on it stops with its next item")
        else:
            click.echo("it has ended already")
