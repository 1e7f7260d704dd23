"""Dead letters on a terminal: one of them in full, and acting on many: ask, act, and report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from aztask.app import App
from aztask.operate.cli.failures import CommandFailed
from aztask.operate.cli.options import confirm
from aztask.operate.cli.output import iso_time, local_time, print_fields, print_json, to_json
from aztask.operate.deadletters import HOLD_VALUES, DeadLetterView
from aztask.operate.deadletters.actions import OnLetters
from aztask.operate.queues import arguments_of
from aztask.support.display import MASK, plural, visible

SHOWN_BYTES = 256
HIDDEN = "(hidden; --values shows it)"
PAST: Final = {"replay": "replayed", "purge": "purged"}


def act_on(
    action: OnLetters,
    *,
    dry_run: bool,
    yes: bool,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Ask, act, and report what was done, also after an interruption.

    Raises CommandFailed if some dead letters could not be received.
    """
    if not action.count:
        click.echo(f"there is nothing to {action.name}")
        return
    if not confirm(str(action), dry_run=dry_run, yes=yes):
        return
    try:
        action.act(progress=progress)
    finally:
        click.echo(f"{PAST[action.name]} {plural(action.report.done, 'dead letter')}")
    report = action.report
    if report.unreadable:
        click.echo(
            f"{plural(report.unreadable, 'dead letter')} could not be read or sent again, so not "
            "replayed: see aztask dlq show, then purge",
            err=True,
        )
    if report.held_back:
        click.echo(
            f"{plural(report.held_back, 'dead letter')} of unique tasks not replayed, because "
            "other tasks hold their keys: replay again when those have ended",
            err=True,
        )
    if report.refused:
        click.echo(
            f"{plural(report.refused, 'dead letter')} not replayed, because workers refused them "
            "as too old or unsigned, so that any program may have sent them: check with aztask dlq "
            "show who did, then purge them, or add --refused to aztask dlq replay",
            err=True,
        )
    for task_id, holder in sorted(report.blocked.items()):
        click.echo(
            f"not replayed: {visible(task_id)} is unique, and task {visible(holder)} holds its key",
            err=True,
        )
    if report.lost:
        raise CommandFailed(
            f"{plural(report.lost, 'dead letter')} could not be received: removed in the meantime, "
            "or leased by another process, whose lease soon expires if it died; see: aztask dlq "
            "list"
        )


def summary(letter: DeadLetterView) -> dict[str, Any]:
    """The object that ``list --json`` prints for a dead letter."""
    return {
        "id": letter.id,
        "queue": letter.queue,
        "position": letter.position,
        "message_id": letter.envelope.message_id,
        "task": letter.task,
        "reason": letter.reason,
        "description": letter.description,
        "signature": letter.signature,
        "enqueued_at": iso_time(letter.at),
        "delivery_count": letter.delivery_count,
        "resubmit_count": letter.resubmit_count,
        "generation": letter.message.generation if letter.message else None,
        "problem": letter.problem,
    }


def print_letter(app: App, letter: DeadLetterView, *, as_json: bool, values: bool) -> None:
    """Print everything about a dead letter: origin, reason, headers, arguments and bytes.

    * `values`: whether to print arguments, and what else holds them. Without, they are hidden: the
      output of a command ends up in tickets and logs. Secret ones are hidden in any case.
    """
    found = arguments_of(app, letter.message, letter.problem)
    known, problem = found.args is not None, found.problem
    headers = dict(letter.envelope.headers)
    if found.secret or not values:
        hidden = MASK if values else HIDDEN
        headers.update(dict.fromkeys(headers.keys() & HOLD_VALUES, hidden))
    if as_json:
        print_json(
            {
                **summary(letter),
                "problem": problem,
                "content_type": letter.envelope.content_type,
                "headers": headers,
                "body_bytes": len(letter.envelope.body),
                **({"args": found.args, "kwargs": found.kwargs} if values else {}),
                **({"body": letter.envelope.body} if values and not found.secret else {}),
            }
        )
        return
    shown = to_json if values else _hidden
    message = letter.message
    print_fields(
        [
            ("id", letter.id),
            ("queue", letter.queue),
            ("position", letter.position),
            ("message id", letter.envelope.message_id or None),
            ("task", letter.task),
            ("reason", letter.reason),
            ("description", letter.description or None),
            ("problem", problem or None),
            ("enqueued", local_time(letter.at)),
            ("deliveries", letter.delivery_count),
            ("retries", letter.resubmit_count),
            ("generation", message.generation if message else None),
            ("sent by", message.origin if message else None),
            ("args", shown(found.args) if known else None),
            ("kwargs", shown(found.kwargs) if known else None),
            (
                "body",
                None if known or found.secret else _shown(letter.envelope.body, values=values),
            ),
        ]
    )
    for name, value in sorted(headers.items()):
        click.echo(f"  {visible(str(name))}: {to_json(value)}")


def _hidden(value: object) -> str:
    return HIDDEN if value else to_json(value)


def _shown(body: bytes, *, values: bool) -> str:
    if not values:
        return f"{len(body):,} bytes {HIDDEN}"
    rest = len(body) - SHOWN_BYTES
    more = f" and {rest:,} more bytes (--json shows all)" if rest > 0 else ""
    return f"{body[:SHOWN_BYTES]!r}{more}"
