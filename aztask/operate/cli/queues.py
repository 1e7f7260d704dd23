"""``aztask queues``: list, watch, create, read, empty and delete queues."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, TypeVar

import click

from aztask.app import App
from aztask.errors import AztaskError, BrokerUnavailable
from aztask.operate.cli.failures import one_line
from aztask.operate.cli.group import CliGroup
from aztask.operate.cli.options import (
    LONGEST_LEASE,
    Duration,
    app_option,
    confirm,
    dry_run_option,
    json_option,
    yes_option,
)
from aztask.operate.cli.output import (
    iso_time,
    local_time,
    print_json,
    print_table,
    say_left_out,
    to_json,
)
from aztask.operate.cli.target import open_app
from aztask.operate.queues import (
    MOST_READ,
    LearnedLease,
    QueueCounts,
    QueueStats,
    WaitingMessage,
    arguments_of_waiting,
    create,
    delete,
    peek,
    purge,
    queues,
)
from aztask.operate.resharding import (
    MOST,
    left_shards,
    look_after,
    part_in_move,
    reshard,
    shard_notes,
)
from aztask.support.display import plural, visible

Command = TypeVar("Command", bound=Callable[..., Any])

COLUMNS = ["id", "task", "state", "due", "enqueued", "deliveries", "retries"]

MOVE_SECONDS: Final = 2.0
"""Seconds between two looks at a move."""

CLEAR: Final = "\x1b[H\x1b[J"
"""Moves to the first line and erases from there: unlike a cleared screen, it does not flicker."""


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


@click.group("queues", cls=CliGroup, invoke_without_command=True)
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
@click.option("--shards", is_flag=True, help="Show each shard of a queue, too.")
def list_(watching: bool, interval: float, as_json: bool, shards: bool) -> None:
    """List the queues and how many messages each one holds.

    With --watch, the list is shown again every two seconds until Ctrl-C: in place on a terminal;
    with --json, one line for each list, with the time and all queues.

    Queues of other programs, whose names aztask cannot use, are skipped and named on stderr.

    If tasks wait inside their code, the column timers counts them: each has a message in the queue
    that is no work before its time. They are in the other counts, too.

    If the app shares lease advice, two columns are added: the lease in use, and the number of
    deliveries whose lease was lost or that were settled too late. --json adds the advice with its
    reason and evidence.
    """
    _print_queues(as_json=as_json, interval=interval if watching else None, shards=shards)


@command.command("create")
@app_option
@click.argument("names", nargs=-1, metavar="NAME...")
@click.option("--all", "everything", is_flag=True, help="Create all queues that the app names.")
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
def create_(names: tuple[str, ...], everything: bool, **options: Any) -> None:
    """Create each queue NAME that is missing, its shards, and those of its priorities.

    It gets the settings of the app and of the options. On an existing queue, settings that the
    service cannot change stay as they are. If the app keeps its results in Azure Tables, their
    table and container are created too.

    --all creates the queues of the app's tasks, of app.queue, and its default queue.
    """
    if everything == bool(names):
        raise click.UsageError("name the queues to create, or give --all")
    required = "aztask queues create --all" if everything else ""
    given = {name: value for name, value in options.items() if value is not None}
    with open_app(required=required, creates=True, celery=True) as app:
        action = create(app, app.queue_names() if everything else names, given)
        try:
            action.act()
        finally:
            for place, missing in action.made.items():
                click.echo(f"{place} {'is created' if missing else 'exists already'}")


@command.command("delete")
@app_option
@click.argument("name")
@dry_run_option
@yes_option
def delete_(name: str, dry_run: bool, yes: bool) -> None:
    """Delete the queue NAME with its messages and dead letters."""
    with open_app(reads=True, celery=True) as app:
        action = delete(app, name)
        if confirm(str(action), dry_run=dry_run, yes=yes):
            action.act()
            click.echo(f"queue {visible(name)} is deleted")


@command.command("peek")
@app_option
@click.argument("queue")
@click.option(
    "--limit", type=click.IntRange(1, MOST_READ), default=20, help="Show at most this many."
)
@click.option("--arguments", is_flag=True, help="Show the tasks' arguments too.")
@json_option
def peek_(queue: str, limit: int, arguments: bool, as_json: bool) -> None:
    """Show the messages in QUEUE, without taking them from it.

    Each one with its task, its state, when it is due, how often it was delivered and how often it
    failed. A Storage queue shows only its first 32 messages that could be received now; Service Bus
    shows leased messages as active. A line on stderr says so.
    """
    with open_app(reads=True, celery=True) as app:
        messages = peek(app, queue, limit)
        found, held = messages.found, messages.held
        print_messages(app, found, arguments=arguments, as_json=as_json)
    notes = [messages.hidden]
    if held > len(found):
        notes.insert(0, f"{len(found):,} of {plural(held, 'message')}")
    if held and any(notes):
        click.echo(f"aztask: {'; '.join(filter(None, notes))}", err=True)


@command.command("purge")
@app_option
@click.argument("queue")
@dry_run_option
@yes_option
def purge_(queue: str, dry_run: bool, yes: bool) -> None:
    """Delete all messages in QUEUE permanently, scheduled ones included.

    Dead letters stay: see aztask dlq purge. Leased messages, which workers hold, stay on Service
    Bus and local://, so what runs now can still be retried; a Storage queue deletes them too, and
    what runs now is not retried. The results of the deleted tasks stay "pending".
    """
    with open_app(reads=True, celery=True) as app:
        action = purge(app, queue)
        if confirm(str(action), dry_run=dry_run, yes=yes):
            left = action.act()
            click.echo(f"deleted {plural(action.done, 'message')} in queue {visible(queue)}")
            if left:
                click.echo(f"aztask: {plural(left, 'message')} left: leased or new", err=True)


@command.command("reshard")
@app_option
@click.argument("queue")
@click.option("--shards", type=click.IntRange(1, MOST), help="By default the number in the code.")
@click.option(
    "--former",
    type=click.IntRange(1, MOST),
    help="Say how many it has now, if the entry in the result store is damaged.",
)
@click.option(
    "--without",
    default="",
    metavar="ADDRESS",
    help="Use no shard at this address of the app, because it is to leave.",
)
@click.option("--no-wait", is_flag=True, help="Return when the move is announced.")
@dry_run_option
@yes_option
def reshard_(
    queue: str,
    shards: int | None,
    former: int | None,
    without: str,
    no_wait: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Move QUEUE to another number of shards, or to other addresses, while its programs run.

    The app needs a result store, and its code a number of shards for the queue. The new shards are
    created, and the move is announced. A minute later all senders use the new shards. Workers read
    both until the former ones are empty. Of a queue with sessions they read the former ones first,
    and the new ones when those are empty.

    The command waits for the end and says how far it is. You may stop it: the move goes on, and the
    same command waits again. Shards that are left over stay; it names them, so that you can delete
    them.
    """
    with open_app(required="aztask queues reshard") as app:
        action = reshard(app, queue, shards, former=former, without=without)
        if not action.count:
            click.echo(f"queue {visible(queue)} has these shards already")
            return
        if not confirm(str(action), dry_run=dry_run, yes=yes):
            return
        action.act()
        for name, layout in action.announced.items():
            click.echo(
                f"queue {visible(name)}: messages go to {plural(layout.sent.count, 'shard')} from "
                f"{local_time(layout.starts_at)} on"
            )
        if not no_wait:
            for name in action.announced:
                _wait_for_move(app, name)


def _wait_for_move(app: App, queue: str, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait until a queue's former shards are empty, and say how far that is when it changes."""
    shown = ""
    while not (state := look_after(app, queue)).ended:
        if state.starts_in:
            text = "the move is announced, and has not started"
        elif state.waiting:
            text = f"{plural(state.waiting, 'message')} in former shards"
        else:
            text = "all is sent to the new shards; waiting for the last sends to former ones"
        if text != shown:
            click.echo(f"queue {visible(queue)}: {text}")
            shown = text
        sleep(MOVE_SECONDS)
    click.echo(f"queue {visible(queue)} has {plural(state.layout.sent.count, 'shard')} now")
    left = left_shards(app, state.layout, queue)
    if left:
        click.echo(
            f"{plural(len(left), 'queue')} of the service {'is' if len(left) == 1 else 'are'} left "
            f"over: {', '.join(map(visible, left))}. Delete each with: aztask queues delete NAME"
        )


def _print_queues(*, as_json: bool, interval: float | None, shards: bool = False) -> None:
    with open_app(reads=True, celery=True) as app:
        if interval is None:
            _print_once(app, as_json=as_json, shards=shards)
        elif as_json:
            watch(lambda: _print_line(app), interval, redraw=False)
        else:
            watch(lambda: _print_once(app, as_json=False, shards=shards), interval)


def _print_line(app: App) -> None:
    """Print all queues as one JSON object."""
    found = queues(app)
    say_left_out(found.left_out)
    print_json(
        {
            "at": iso_time(time.time()),
            "queues": [_counts_record(each, found) for each in found.queues],
        }
    )


def _print_once(app: App, *, as_json: bool, shards: bool) -> None:
    found = queues(app)
    say_left_out(found.left_out)
    if as_json:
        for stats in found.queues:
            lease = found.leases.get(stats.queue)
            print_json({**_counts_record(stats, found), **(_lease_record(lease) if lease else {})})
        return
    for text in shard_notes(app, found.layouts) if shards else ():
        click.echo(f"aztask: {text}", err=True)
    names = ["queue", "total", "active", "leased", "scheduled", "deferred", "dead"]
    rows: list[list[Any]] = [[stats.queue, stats.living, *_counts(stats)] for stats in found.queues]
    if found.timers:
        names.append("timers")
        for row in rows:
            row.append(found.timers.get(row[0], 0))
    if found.leases_shared:
        names += ["lease", "lost"]
        for row in rows:
            lease = found.leases[row[0]]
            row += [f"{lease.seconds:g} s", lease.lost + lease.failed]
    print_table(names, [each for row in rows for each in _with_shards(row, found, shown=shards)])


def _with_shards(row: list[Any], found: QueueCounts, *, shown: bool) -> list[list[Any]]:
    """The row of a queue, and one for each of its shards."""
    parts = found.shards.get(row[0], ()) if shown else ()
    layout = found.layouts.get(row[0])
    below = [
        [f"  {_with_part(each.queue, layout, found.homes)}", each.living, *_counts(each)]
        for each in parts
    ]
    return [row, *([*each, *[None] * (len(row) - len(each))] for each in below)]


def _with_part(shard: str, layout: Any, homes: Mapping[str, str]) -> str:
    part = part_in_move(shard, layout)
    home = f" at {visible(homes[shard])}" if shard in homes else ""
    return f"{shard}{home} ({part})" if part else f"{shard}{home}"


def _without_addresses(record: Any) -> Any:
    """The record of a layout without what only an app with several addresses has."""
    if isinstance(record, list | tuple):
        return [_without_addresses(each) for each in record]
    if not isinstance(record, dict):
        return record
    kept = ((key, each) for key, each in record.items() if each or key not in ("chosen", "homes"))
    return {key: _without_addresses(each) for key, each in kept}


def _counts_record(stats: QueueStats, found: QueueCounts) -> dict[str, Any]:
    timers = found.timers.get(stats.queue, 0)
    shards = [
        {**asdict(each), "total": each.living}
        | ({"address": found.homes[each.queue]} if each.queue in found.homes else {})
        for each in found.shards.get(stats.queue, ())
    ]
    record = {**asdict(stats), "total": stats.living, "timers": timers}
    layout = found.layouts.get(stats.queue)
    if layout is not None and not isinstance(layout, AztaskError):
        record["layout"] = _without_addresses(asdict(layout))
    return {**record, "shards": shards} if shards else record


def _lease_record(lease: LearnedLease) -> dict[str, Any]:
    """What workers have learned about the queue's lease, for --json."""
    return {
        "lease_seconds": lease.seconds,
        "lease_advice": None if lease.advice is None else asdict(lease.advice),
        "leases_lost": lease.lost,
        "settlements_failed": lease.failed,
    }


def _counts(stats: QueueStats) -> tuple[int | None, ...]:
    return stats.active, stats.leased, stats.scheduled, stats.deferred, stats.dead


# -- the messages of a queue -----------------------------------------------------------------


def print_messages(
    app: App, found: Sequence[WaitingMessage], *, arguments: bool, as_json: bool
) -> None:
    """Print messages as a table or as JSON. arguments: show the tasks' arguments too."""
    if as_json:
        for each in found:
            print_json(_described(app, each, arguments=arguments))
        return
    rows: list[list[Any]] = []
    for each in found:
        message = each.message
        row: list[Any] = [
            each.id,
            message.task if message else None,
            each.peeked.state.value,
            local_time(each.due),
            local_time(each.peeked.enqueued_at),
            each.peeked.delivery_count,
            message.resubmit_count if message else None,
        ]
        rows.append([*row, _shown(app, each)] if arguments else row)
    print_table([*COLUMNS, "arguments"] if arguments else COLUMNS, rows)


def _described(app: App, each: WaitingMessage, *, arguments: bool) -> dict[str, Any]:
    message = each.message
    described: dict[str, Any] = {
        "id": each.id,
        "task": message.task if message else None,
        "queue": each.queue,
        "state": each.peeked.state.value,
        "due_at": iso_time(each.due),
        "expires_at": iso_time(each.peeked.envelope.expires_at),
        "enqueued_at": iso_time(each.peeked.enqueued_at),
        "delivery_count": each.peeked.delivery_count,
        "resubmit_count": message.resubmit_count if message else None,
        "session": each.peeked.envelope.session,
        "message_id": each.peeked.envelope.message_id or None,
        "position": each.peeked.position,
        "problem": each.problem,
    }
    if arguments:
        given = arguments_of_waiting(app, each)
        described |= {"args": given.args, "kwargs": given.kwargs, "problem": given.problem}
    return described


def _shown(app: App, each: WaitingMessage) -> str:
    given = arguments_of_waiting(app, each)
    if given.problem:
        apart = each.message is not None and each.message.payload is not None
        return f"({given.problem})" if apart else f"(cannot be read: {given.problem})"
    if given.args is None:
        return "-"
    return to_json(given.args) + (f" {to_json(given.kwargs)}" if given.kwargs else "")


# -- repeating the list until Ctrl-C ---------------------------------------------------------


def watch(
    show: Callable[[], None],
    interval: float,
    *,
    redraw: bool = True,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Call `show` every `interval` seconds; returns after Ctrl-C.

    redraw: on a terminal, each output takes the place of the previous one.

    If the broker becomes unreachable, a line on stderr says so and the next call tries again. Every
    other error is raised, and so is this one at the first call.
    """
    live = redraw and sys.stdout is not None and sys.stdout.isatty()
    first = True
    try:
        while True:
            if live:
                click.echo(CLEAR, nl=False)
            try:
                show()
            except BrokerUnavailable as error:
                if first:
                    raise
                click.echo(f"aztask: {one_line(str(error))}; still watching", err=True)
            first = False
            if sys.stdout is not None:
                sys.stdout.flush()  # a program that reads our output waits for this line
            sleep(interval)
    except KeyboardInterrupt:
        if live:
            click.echo()
