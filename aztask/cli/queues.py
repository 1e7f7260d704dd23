"""``aztask queues``: list, watch, create, read, empty and delete queues."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import click

from aztask.adaptive.document import LeaseDocument
from aztask.app import App
from aztask.brokers.base import QueueStats
from aztask.cli.confirm import confirm, dry_run_option, yes_option
from aztask.cli.group import Group
from aztask.cli.listing import all_queues, skipping
from aztask.cli.options import LONGEST_LEASE, Duration, app_option, json_option
from aztask.cli.output import iso_time, print_json, print_table
from aztask.cli.queue_peek import print_messages
from aztask.cli.target import open_app
from aztask.cli.waiting import MOST_READ, hidden, waiting
from aztask.cli.watch import watch
from aztask.results.base import Provisioned
from aztask.support.display import plural, visible

Command = TypeVar("Command", bound=Callable[..., Any])


def watch_options(command: Command) -> Command:
    """Add ``--watch``, which repeats the list, and ``--interval`` for its pause."""
    interval: Callable[[Command], Command] = click.option(
        "--interval",
        type=Duration(least=0.1, most=3600.0),
        default="2s",
        help="With --watch, wait this long between two lists.",
    )
    watching: Callable[[Command], Command] = click.option(
        "--watch", "watching", is_flag=True, help="List again and again until Ctrl-C."
    )
    return watching(interval(command))


@click.group("queues", cls=Group, invoke_without_command=True)
@app_option
@json_option
@watch_options
@click.pass_context
def command(ctx: click.Context, watching: bool, interval: float, as_json: bool) -> None:
    """List, create, read, empty and delete queues.

    Without a command, it lists the queues, as list does.
    """
    if ctx.invoked_subcommand is None:
        _print_queues(as_json=as_json, interval=interval if watching else None)
    elif as_json or watching:
        option = "--json" if as_json else "--watch"
        raise click.UsageError(f"{option} belongs after the command: aztask queues list {option}")


@command.command("list")
@app_option
@json_option
@watch_options
def list_(watching: bool, interval: float, as_json: bool) -> None:
    """List the queues and how many messages each one holds.

    With --watch, the list is shown again every two seconds until Ctrl-C: in place on a terminal;
    with --json, one line for each list, with the time and all queues.

    Queues of other programs, whose names aztask cannot use, are skipped and named on stderr.

    If the app shares lease advice, two columns are added: the lease in use, and the number of
    deliveries whose lease was lost or that were settled too late. --json adds the advice with its
    reason and evidence.
    """
    _print_queues(as_json=as_json, interval=interval if watching else None)


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
    """Create each queue NAME that is missing, and those of its priorities.

    It gets the settings of the app and of the options. On an existing queue, settings that the
    service cannot change stay as they are. If the app keeps its results in Azure Tables, their
    table and container are created too.
    """
    given = {name: value for name, value in options.items() if value is not None}
    with open_app(creates=True) as app:
        for name in (each for given_name in names for each in app.priority_queues(given_name)):
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
    with open_app(reads=True) as app:
        stats = app.broker.stats(name)
        held = stats.living + (stats.dead or 0)
        what = f"delete queue {visible(name)} with {plural(held, 'message')}"
        if confirm(what, dry_run=dry_run, yes=yes):
            app.broker.delete(name)
            click.echo(f"queue {visible(name)} is deleted")


@command.command("peek")
@app_option
@click.argument("queue")
@click.option(
    "--limit", type=click.IntRange(1, MOST_READ), default=20, help="Show at most this many."
)
@click.option("--arguments", is_flag=True, help="Show the tasks' arguments too.")
@json_option
def peek(queue: str, limit: int, arguments: bool, as_json: bool) -> None:
    """Show the messages in QUEUE, without taking them from it.

    Each one with its task, its state, when it is due, how often it was delivered and how often it
    failed. A Storage queue shows only its first 32 messages that could be received now; Service Bus
    shows leased messages as active. A line on stderr says so.
    """
    with open_app(reads=True) as app:
        found = list(waiting(app, queue, limit=limit))
        print_messages(app, found, arguments=arguments, as_json=as_json)
        held = app.broker.stats(queue).living
        notes = [hidden(app.broker.capabilities)]
    if held > len(found):
        notes.insert(0, f"{len(found):,} of {plural(held, 'message')}")
    if held and any(notes):
        click.echo(f"aztask: {'; '.join(filter(None, notes))}", err=True)


@command.command("purge")
@app_option
@click.argument("queue")
@dry_run_option
@yes_option
def purge(queue: str, dry_run: bool, yes: bool) -> None:
    """Delete all messages in QUEUE permanently, scheduled ones included.

    Dead letters stay: see aztask dlq purge. Leased messages, which workers hold, stay on Service
    Bus and local://, so what runs now can still be retried; a Storage queue deletes them too, and
    what runs now is not retried. The results of the deleted tasks stay "pending".
    """
    with open_app(reads=True) as app:
        held = app.broker.stats(queue).living
        leased = (
            "leased ones included" if app.broker.capabilities.purges_leased else "except leased"
        )
        what = f"delete {plural(held, 'message')} in queue {visible(queue)}, {leased}"
        if confirm(what, dry_run=dry_run, yes=yes):
            deleted = app.broker.purge(queue)
            click.echo(f"deleted {plural(deleted, 'message')} in queue {visible(queue)}")
            if left := app.broker.stats(queue).living:
                click.echo(f"aztask: {plural(left, 'message')} left: leased or new", err=True)


def _print_queues(*, as_json: bool, interval: float | None) -> None:
    with open_app(reads=True) as app:
        if interval is None:
            _print_once(app, as_json=as_json)
        elif as_json:
            watch(lambda: _print_line(app), interval, redraw=False)
        else:
            watch(lambda: _print_once(app, as_json=False), interval)


def _print_line(app: App) -> None:
    """Print all queues as one JSON object."""
    queues = [{**asdict(stats), "total": stats.living} for stats in _stats(app)]
    print_json({"at": iso_time(time.time()), "queues": queues})


def _print_once(app: App, *, as_json: bool) -> None:
    found = _stats(app)
    learned = app.leases.read() if app.leases.enabled else None
    leases = {each.queue: app.lease_now(each.queue) for each in found} if learned else {}
    if as_json:
        for stats in found:
            more = _lease_record(learned, stats.queue, leases) if learned else {}
            print_json({**asdict(stats), "total": stats.living, **more})
        return
    names = ["queue", "total", "active", "leased", "scheduled", "deferred", "dead"]
    rows: list[list[Any]] = [[stats.queue, stats.living, *_counts(stats)] for stats in found]
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


def _counts(stats: QueueStats) -> tuple[int | None, ...]:
    return stats.active, stats.leased, stats.scheduled, stats.deferred, stats.dead
