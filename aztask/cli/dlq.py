"""``aztask dlq``: list, show, replay and purge dead letters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from itertools import islice
from typing import Any, TypeVar

import click

from aztask.app import App
from aztask.cli.confirm import dry_run_option, yes_option
from aztask.cli.deadletter_act import Act, act_on
from aztask.cli.deadletter_view import print_letter, summary
from aztask.cli.failures import NotFound
from aztask.cli.group import Group
from aztask.cli.listing import all_queues, skipping, warn_of_damage
from aztask.cli.options import NameList, Rate, Text, all_names, app_option, json_option
from aztask.cli.output import iso_time, local_time, print_json, print_table
from aztask.cli.target import open_app
from aztask.deadletters.letters import Group as LetterGroup
from aztask.deadletters.view import DeadLetters, DeadLetterView, Selection

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group("dlq", cls=Group)
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
    with open_app(reads=True) as app:
        places = _queues(app, queues)
        letters = list(islice(_find(places, queues, selection), limit))
    _warn(places)
    if as_json:
        for letter in letters:
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
            for letter in letters
        ],
    )


@command.command("groups")
@app_option
@queues_option
@json_option
def groups(queues: Sequence[tuple[str, ...]], as_json: bool) -> None:
    """Count dead letters by task, reason and signature.

    The largest groups come first. A signature is the error text without the parts that differ from
    case to case: numbers, ids, addresses, quoted texts and paths.
    """
    found: list[tuple[str, LetterGroup]] = []
    with open_app(reads=True) as app:
        places = _queues(app, queues)
        for letters in places:
            with _reading(letters, queues):
                found += [(letters.queue, group) for group in letters.groups()]
    _warn(places)
    if as_json:
        for queue, group in found:
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
            for queue, group in found
        ],
    )


@command.command("show")
@app_option
@click.argument("letter_id", type=Text(), metavar="ID")
@queues_option
@json_option
def show(letter_id: str, queues: Sequence[tuple[str, ...]], as_json: bool) -> None:
    """Show everything about one dead letter.

    ID: a task id, a message id or @POSITION, as list shows them.
    """
    with open_app(reads=True) as app:
        places = _queues(app, queues)
        letters = list(_find(places, queues, Selection(frozenset([letter_id]))))
        if not letters:
            _warn(places)
            raise NotFound(f"there is no dead letter {letter_id!r}; see: aztask dlq list")
        for letter in letters:
            print_letter(app, letter, as_json=as_json)


@command.command("replay")
@app_option
@selection_options
@queues_option
@click.option("--rate", type=Rate(), help="Send at most this many per second.")
@dry_run_option
@yes_option
def replay(
    selection: Selection,
    queues: Sequence[tuple[str, ...]],
    rate: float | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Send dead letters to their queues again, with all their retries.

    Each one is removed from the dead letters after it was sent. ID: a task id, a message id or
    @POSITION, as list shows them.
    """
    with open_app() as app:
        _act(
            app,
            queues,
            selection,
            ("replay", "replayed"),
            lambda letters, progress: letters.replay(selection, rate=rate, progress=progress),
            dry_run=dry_run,
            yes=yes,
        )


@command.command("purge")
@app_option
@selection_options
@queues_option
@dry_run_option
@yes_option
def purge(
    selection: Selection, queues: Sequence[tuple[str, ...]], dry_run: bool, yes: bool
) -> None:
    """Delete dead letters permanently.

    ID: a task id, a message id or @POSITION, as list shows them.
    """
    with open_app() as app:
        _act(
            app,
            queues,
            selection,
            ("purge", "purged"),
            lambda letters, progress: letters.purge(selection, progress=progress),
            dry_run=dry_run,
            yes=yes,
        )


def _act(
    app: App,
    queues: Sequence[tuple[str, ...]],
    selection: Selection,
    words: tuple[str, str],
    act: Act,
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    places = _queues(app, queues)
    selected = []
    for letters in places:
        with _reading(letters, queues):
            selected.append((letters, letters.count(selection)))
    _warn(places)
    if selection.ids and not any(count for _, count in selected):
        raise NotFound(
            f"no dead letter has the id {', '.join(sorted(selection.ids))}; see: aztask dlq list"
        )
    act_on(selected, words, act, dry_run=dry_run, yes=yes)


def _queues(app: App, queues: Sequence[tuple[str, ...]]) -> list[DeadLetters]:
    names = all_names(queues) or all_queues(app)
    return [DeadLetters(app, name) for name in names]


def _reading(
    letters: DeadLetters, queues: Sequence[tuple[str, ...]]
) -> AbstractContextManager[None]:
    """Skip a queue that refuses, unless it was named with -Q."""
    return nullcontext() if queues else skipping(letters.queue)


def _find(
    places: Sequence[DeadLetters], queues: Sequence[tuple[str, ...]], selection: Selection
) -> Iterator[DeadLetterView]:
    for letters in places:
        with _reading(letters, queues):
            yield from letters.find(selection)


def _warn(places: Sequence[DeadLetters]) -> None:
    damaged = [pair for letters in places for pair in letters.damaged.items()]
    warn_of_damage(
        "dead-letter note",
        damaged,
        "the dead letters themselves are intact: replay or purge them by these ids",
    )
