"""``aztask dlq``: list, show, replay and purge dead letters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import click

from aztask.errors import NotFound
from aztask.operate.cli.group import CliGroup
from aztask.operate.cli.letters import act_on, print_letter, summary
from aztask.operate.cli.options import (
    NameList,
    PositiveRate,
    Text,
    all_names,
    app_option,
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
    warn_of_damage,
)
from aztask.operate.cli.target import open_app
from aztask.operate.deadletters import Selection
from aztask.operate.deadletters.actions import (
    GroupsFound,
    LettersFound,
    OnLetters,
    find,
    groups,
    purge,
    replay,
)

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group("dlq", cls=CliGroup)
@app_option
def command() -> None:
    """List, show, replay and purge dead letters.

    Without -Q, the commands work on the dead letters of all queues.
    """


def queues_option(function: Command) -> Command:
    """Add ``-Q``, which names the queues to work on."""
    option: Callable[[Command], Command] = click.option(
        "-Q",
        "--queues",
        type=NameList(),
        multiple=True,
        help="Only these queues: a,b or -Q a -Q b. [default: all]",
    )
    return option(function)


def selection_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add ids and filters; the command gets them as one `Selection`."""

    @click.argument("ids", nargs=-1, type=Text(), metavar="[ID]...")
    @click.option("--task", type=Text(), help="Select those of this task.")
    @click.option("--reason", type=Text(), help="Select those with this dead-letter reason.")
    @click.option(
        "--signature", type=Text(), help="Select those with this error signature; see groups."
    )
    @click.option("--all", "everything", is_flag=True, help="Select all.")
    @wraps(function)
    def gathered(
        ids: Sequence[str],
        task: str | None,
        reason: str | None,
        signature: str | None,
        everything: bool,
        **rest: Any,
    ) -> None:
        narrowed = bool(ids) or any(text is not None for text in (task, reason, signature))
        if everything == narrowed:
            raise click.UsageError(
                "--all cannot be combined with ids, --task, --reason or --signature"
                if everything
                else "select dead letters: by id, --task, --reason, --signature or --all",
                click.get_current_context(),
            )
        selection = Selection(frozenset(ids), task, reason, everything, signature)
        function(selection=selection, **rest)

    return gathered


@command.command("list")
@app_option
@queues_option
@click.option("--task", type=Text(), help="Only those of this task.")
@click.option("--reason", type=Text(), help="Only those with this dead-letter reason.")
@click.option("--signature", type=Text(), help="Only those with this error signature; see groups.")
@click.option(
    "--limit", type=click.IntRange(1, 100_000), default=100, help="List at most this many."
)
@json_option
def list_(
    queues: Sequence[tuple[str, ...]],
    task: str | None,
    reason: str | None,
    signature: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List dead letters, oldest first."""
    everything = all(text is None for text in (task, reason, signature))
    selection = Selection(frozenset(), task, reason, everything, signature)
    with open_app(reads=True, celery=True) as app:
        found = find(app, all_names(queues), selection, limit)
    _warn(found)
    if as_json:
        for letter in found.letters:
            print_json(summary(letter))
        return
    print_table(
        ["id", "queue", "task", "reason", "enqueued", "retries", "description"],
        [
            [
                letter.id,
                letter.queue,
                letter.task,
                letter.reason,
                local_time(letter.at),
                letter.resubmit_count,
                letter.description or letter.problem,
            ]
            for letter in found.letters
        ],
    )


@command.command("groups")
@app_option
@queues_option
@json_option
def groups_(queues: Sequence[tuple[str, ...]], as_json: bool) -> None:
    """Count dead letters by task, reason and signature.

    The largest groups come first. A signature is the error text without the parts that differ from
    case to case: numbers, ids, addresses, quoted texts and paths.
    """
    with open_app(reads=True, celery=True) as app:
        found = groups(app, all_names(queues))
    _warn(found)
    if as_json:
        for queue, group in found.groups:
            print_json(
                {
                    "queue": queue,
                    "task": group.task,
                    "reason": group.reason,
                    "signature": group.signature,
                    "count": group.count,
                    "first_at": iso_time(group.first_at),
                    "last_at": iso_time(group.last_at),
                }
            )
        return
    print_table(
        ["count", "queue", "task", "reason", "first", "last", "signature"],
        [
            [
                group.count,
                queue,
                group.task,
                group.reason,
                local_time(group.first_at),
                local_time(group.last_at),
                group.signature,
            ]
            for queue, group in found.groups
        ],
    )


@command.command("show")
@app_option
@click.argument("letter_id", type=Text(), metavar="ID")
@queues_option
@click.option(
    "--values",
    is_flag=True,
    help="Also print the arguments, and the headers and bytes that hold them.",
)
@json_option
def show(letter_id: str, queues: Sequence[tuple[str, ...]], values: bool, as_json: bool) -> None:
    """Show everything about one dead letter but its arguments.

    ID: a task id, a message id or @POSITION, as list shows them.
    """
    with open_app(reads=True, celery=True) as app:
        found = find(app, all_names(queues), Selection(frozenset([letter_id])))
        say_left_out(found.left_out)
        if not found.letters:
            _warn_of_notes(found.damaged)
            raise NotFound(f"there is no dead letter {letter_id!r}; see: aztask dlq list")
        for letter in found.letters:
            print_letter(app, letter, as_json=as_json, values=values)


@command.command("replay")
@app_option
@selection_options
@queues_option
@click.option("--rate", type=PositiveRate(), help="Send at most this many per second.")
@click.option(
    "--fresh",
    is_flag=True,
    help="Begin from the start: drop checkpoints, and run recorded steps again.",
)
@click.option(
    "--refused",
    is_flag=True,
    help="Also those that were refused as too old or unsigned. They are signed anew and run: any "
    "program that may send can have made them, or sent an old message a second time.",
)
@dry_run_option
@yes_option
def replay_(
    selection: Selection,
    queues: Sequence[tuple[str, ...]],
    rate: float | None,
    fresh: bool,
    refused: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Send dead letters to their queues again, with all their retries.

    A task goes on after its last checkpoint and its recorded steps, unless you say --fresh. Each
    one is removed from the dead letters after it was sent. ID: a task id, a message id or
    @POSITION, as list shows them.

    With signing keys, messages that workers refused as too old or unsigned stay, unless you say
    --refused.
    """
    with open_app(celery=True) as app:
        action = replay(app, all_names(queues), selection, rate=rate, fresh=fresh, refused=refused)
        _act(action, selection, dry_run=dry_run, yes=yes)


@command.command("purge")
@app_option
@selection_options
@queues_option
@dry_run_option
@yes_option
def purge_(
    selection: Selection, queues: Sequence[tuple[str, ...]], dry_run: bool, yes: bool
) -> None:
    """Delete dead letters permanently.

    ID: a task id, a message id or @POSITION, as list shows them.
    """
    with open_app(celery=True) as app:
        action = purge(app, all_names(queues), selection)
        _act(action, selection, dry_run=dry_run, yes=yes)


def _act(action: OnLetters, selection: Selection, *, dry_run: bool, yes: bool) -> None:
    _warn(action)
    if selection.ids and not action.count:
        raise NotFound(
            f"no dead letter has the id {', '.join(sorted(selection.ids))}; see: aztask dlq list"
        )
    act_on(action, dry_run=dry_run, yes=yes)


def _warn(found: LettersFound | GroupsFound | OnLetters) -> None:
    say_left_out(found.left_out)
    _warn_of_notes(found.damaged)


def _warn_of_notes(damaged: Sequence[tuple[str, str]]) -> None:
    warn_of_damage(
        "dead-letter note",
        damaged,
        "the dead letters themselves are intact: replay or purge them by these ids",
    )
