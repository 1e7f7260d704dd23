"""``aztask queues``: list, create and delete queues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from aztask.adaptive.document import LeaseDocument
from aztask.app import App
from aztask.brokers.base import QueueStats
from aztask.cli.confirm import confirm, dry_run_option, yes_option
from aztask.cli.group import Group
from aztask.cli.listing import all_queues, skipping
from aztask.cli.options import LONGEST_LEASE, Duration, app_option, json_option
from aztask.cli.output import plural, print_json, print_table
from aztask.cli.target import open_app
from aztask.results.base import Provisioned
from aztask.support.display import visible


@click.group("queues", cls=Group, invoke_without_command=True)
@app_option
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List, create and delete queues.

    Without a command, it lists the queues.
    """
    if ctx.invoked_subcommand is None:
        _print_queues(as_json=as_json)
    elif as_json:
        raise click.UsageError("--json belongs after the command: aztask queues list --json")


@command.command("list")
@app_option
@json_option
def list_(as_json: bool) -> None:
    """List the queues and how many messages each one holds.

    Queues of other programs, whose names aztask cannot use, are skipped and named on stderr.

    If the app shares lease advice, two columns are added: the lease in use, and the number of
    deliveries whose lease was lost or that were settled too late. --json adds the advice with its
    reason and evidence.
    """
    _print_queues(as_json=as_json)


@command.command("create")
@app_option
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option(
    "--lease", type=Duration(least=0.1, most=LONGEST_LEASE), help="Set the queue's lease."
)
@click.option(
    "--duplicate-window",
    type=Duration(),
    help="Store a message id only once within this time; 0 switches this off.",
)
@click.option("--time-to-live", type=Duration(least=1.0), help="Expire messages after this time.")
@click.option(
    "--max-deliveries",
    type=click.IntRange(1, 2**31 - 1),
    help="Set the broker's own delivery limit.",
)
@click.option(
    "--sessions/--no-sessions", default=None, help="Keep the messages of one session in order."
)
def create(names: tuple[str, ...], **options: Any) -> None:
    """Create each queue NAME that is missing.

    It gets the settings of the app and of the options. On an existing queue, settings that the
    service cannot change stay as they are. If the app keeps its results in Azure Tables, their
    table and container are created too.
    """
    given = {name: value for name, value in options.items() if value is not None}
    with open_app(creates=True) as app:
        for name in names:
            app.broker.declare(name, app.queue_options(name).with_explicit(**given))
            click.echo(f"queue {visible(name)} exists")
        if isinstance(app.results, Provisioned):
            for place in app.results.create():
                click.echo(f"{place} exists")


@command.command("delete")
@app_option
@click.argument("name")
@dry_run_option
@yes_option
def delete(name: str, dry_run: bool, yes: bool) -> None:
    """Delete the queue NAME with its messages and dead letters."""
    with open_app() as app:
        stats = app.broker.stats(name)
        held = _living(stats) + (stats.dead or 0)
        what = f"delete queue {visible(name)} with {plural(held, 'message')}"
        if confirm(what, dry_run=dry_run, yes=yes):
            app.broker.delete(name)
            click.echo(f"queue {visible(name)} is deleted")


def _print_queues(*, as_json: bool) -> None:
    with open_app() as app:
        found = _stats(app)
        learned = app.leases.read() if app.leases.enabled else None
        leases = {each.queue: app.lease_now(each.queue) for each in found} if learned else {}
    if as_json:
        for stats in found:
            more = _lease_record(learned, stats.queue, leases) if learned else {}
            print_json({**asdict(stats), "total": _living(stats), **more})
        return
    names = ["queue", "total", "active", "leased", "scheduled", "deferred", "dead"]
    rows: list[list[Any]] = [[stats.queue, _living(stats), *_counts(stats)] for stats in found]
    if learned:
        names += ["lease", "lost"]
        for row in rows:
            observed = learned.entry(row[0]).observed
            row += [f"{leases[row[0]]:g} s", observed.lost_ever + observed.failed_ever]
    print_table(names, rows)


def _lease_record(
    learned: LeaseDocument, queue: str, leases: Mapping[str, float]
) -> dict[str, Any]:
    """What workers have learned about the queue's lease, for --json."""
    entry = learned.entry(queue)
    advice = entry.advice
    return {
        "lease_seconds": leases[queue],
        "lease_advice": None if advice is None else asdict(advice),
        "leases_lost": entry.observed.lost_ever,
        "settlements_failed": entry.observed.failed_ever,
    }


def _stats(app: App) -> list[QueueStats]:
    found = []
    for name in all_queues(app):
        with skipping(name):
            found.append(app.broker.stats(name))
    return found


def _living(stats: QueueStats) -> int:
    """The number of messages without dead letters; some services report only their sum."""
    if stats.total is not None:
        return stats.total
    return sum(count or 0 for count in _counts(stats)[:-1])


def _counts(stats: QueueStats) -> tuple[int | None, ...]:
    return stats.active, stats.leased, stats.scheduled, stats.deferred, stats.dead
