"""Printing one dead letter, for people or as JSON."""

from __future__ import annotations

from typing import Any

import click

from aztask.app import App
from aztask.cli.output import iso_time, local_time, print_fields, print_json, to_json
from aztask.deadletters.letters import DeadLetterView
from aztask.errors import CodecError
from aztask.support.display import visible

SHOWN_BYTES = 256


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


def print_letter(app: App, letter: DeadLetterView, *, as_json: bool) -> None:
    """Print everything about a dead letter: origin, reason, headers, arguments and bytes."""
    arguments, problem = _arguments(app, letter)
    if as_json:
        print_json(
            {
                **summary(letter),
                "problem": problem,
                "content_type": letter.envelope.content_type,
                "headers": dict(letter.envelope.headers),
                "args": arguments[0] if arguments else None,
                "kwargs": arguments[1] if arguments else None,
                "body": letter.envelope.body,
            }
        )
        return
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
            ("args", to_json(arguments[0]) if arguments else None),
            ("kwargs", to_json(arguments[1]) if arguments else None),
            ("body", _shown(letter.envelope.body) if arguments is None else None),
        ]
    )
    for name, value in sorted(letter.envelope.headers.items()):
        click.echo(f"  {visible(str(name))}: {to_json(value)}")


def _arguments(
    app: App, letter: DeadLetterView
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]] | None, str]:
    """(args and kwargs or None, why they cannot be decoded or "")."""
    if letter.message is None:
        return None, letter.problem
    try:
        return app.codec.decode_arguments(letter.message), ""
    except CodecError as error:
        return None, str(error)


def _shown(body: bytes) -> str:
    rest = len(body) - SHOWN_BYTES
    more = f" and {rest:,} more bytes (--json shows all)" if rest > 0 else ""
    return f"{body[:SHOWN_BYTES]!r}{more}"
