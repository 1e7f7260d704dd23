"""``aztask move``: move the queues of an app, and its rows, to another address."""

from __future__ import annotations

import re
import time

import click
from click.core import ParameterSource

from aztask.operate.cli.failures import FAILURE
from aztask.operate.cli.options import (
    Duration,
    Text,
    app_option,
    confirm,
    dry_run_option,
    json_option,
    yes_option,
)
from aztask.operate.cli.output import iso_time, local_time, print_json, print_table, say_left_out
from aztask.operate.cli.target import open_app
from aztask.operate.move.move import MoveApp, Moved, MovePlan, move, plan
from aztask.support.display import plural, visible

SECRET = re.compile(r"AccountKey=|SharedAccessKey=|SharedAccessSignature=", re.IGNORECASE)
AGAIN_SECONDS = 15.0
"""Seconds between two rounds of --wait."""


@click.command("move")
@app_option
@click.option(
    "--to",
    "address",
    type=Text(),
    required=True,
    metavar="ADDRESS",
    help="The new broker, as in AZTASK_BROKER. A connection string belongs into AZTASK_MOVE_TO.",
)
@click.option(
    "--wait",
    type=Duration(),
    default="0s",
    help="Go on for so long while messages are hidden, leased or still sent at the old address.",
)
@dry_run_option
@yes_option
@json_option
@click.pass_context
def command(
    ctx: click.Context, address: str, wait: float, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Move the queues of the app, and its rows, to another address.

    The result store stays where it is. First everything is counted: messages, scheduled and
    deferred ones, sessions, dead letters, and the rows of each kind. It asks before it acts, and
    does not start if something is there that cannot be moved.

    Stop the workers of the old address before, and start those of the new one when the command has
    ended. If it is interrupted, run it again: it goes on. Run it again, too, if senders have still
    used the old address, or messages were hidden there. The exit code is 1 while some are left.
    """
    if (
        ctx.get_parameter_source("address") is ParameterSource.COMMANDLINE
        and SECRET.search(address) is not None
    ):
        raise click.UsageError(
            "a key on the command line can be read by others: set AZTASK_MOVE_TO instead of --to"
        )
    with open_app(reads=True) as old:
        new = old.at(address)
        try:
            found = plan(old, new)
            say_left_out(found.left_out)
            _print_plan(found, as_json=as_json)
            if found.problems and dry_run:
                ctx.exit(FAILURE)
            action = move(old, new)
            if not confirm(str(action), dry_run=dry_run, yes=yes):
                return
            moved = _moved(action, wait)
        finally:
            new.close()
        _print_moved(moved, as_json=as_json)
        ctx.exit(FAILURE if moved.left else 0)


def _moved(action: MoveApp, wait: float) -> Moved:
    """Move, again and again for the given time while something is left."""
    give_up_at = time.monotonic() + wait
    while True:
        moved = action.act()
        left = give_up_at - time.monotonic()
        if not moved.left or left <= 0:
            return moved
        names = ", ".join(f"{visible(name)} ({count})" for name, count in moved.left.items())
        click.echo(f"moved {plural(action.done, 'message')}; left: {names}", err=True)
        time.sleep(min(AGAIN_SECONDS, left))
        action = move(action.old, action.app)


def _print_plan(found: MovePlan, *, as_json: bool) -> None:
    kinds = [*found.messages, *found.rows]
    if as_json:
        for each in kinds:
            print_json({"what": each.what, "count": each.count, "how": each.how})
        for note in found.notes:
            print_json({"note": note})
        for problem in found.problems:
            print_json({"problem": problem})
        return
    table = [[each.what, _number(each.count, more=each.more), each.how] for each in kinds]
    print_table(["what", "there", "how it moves"], table)
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    for problem in found.problems:
        click.echo(f"problem: {problem}", err=True)


def _number(count: int | None, *, more: bool) -> str:
    if count is None:
        return "?"
    return f"{count:,}+" if more else f"{count:,}"


def _print_moved(moved: Moved, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "moved": {
                    each.queue: {
                        "messages": each.messages,
                        "scheduled": each.scheduled,
                        "dead": each.dead,
                    }
                    for each in moved.queues
                },
                "rows": moved.rows,
                "payloads": moved.payloads,
                "left": moved.left,
                "reasons": dict(moved.reasons),
                "until": None if moved.until is None else iso_time(moved.until),
            }
        )
        return
    print_table(
        ["queue", "messages", "scheduled", "dead letters", "left"],
        [
            [each.queue, each.messages, each.scheduled, each.dead, moved.left.get(each.queue, 0)]
            for each in moved.queues
        ],
    )
    click.echo(f"rows with the new owner: {moved.rows:,}; payloads copied: {moved.payloads:,}")
    for why, count in moved.reasons.items():
        click.echo(f"left: {plural(count, 'message')}: {why}", err=True)
    if moved.until is not None:
        click.echo(
            "the old queues still hold messages, which may be delayed: run this again, or with "
            f"--wait, until nothing is left; the last ones show by {local_time(moved.until)}",
            err=True,
        )
    elif moved.left:
        click.echo("the old queues still hold messages: run this again", err=True)
