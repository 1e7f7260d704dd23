"""Printing the messages of a queue for ``aztask queues peek``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aztask.app import App
from aztask.cli.output import iso_time, local_time, print_json, print_table, to_json
from aztask.cli.waiting import Waiting
from aztask.errors import CodecError

COLUMNS = ["id", "task", "state", "due", "enqueued", "deliveries", "retries"]


def print_messages(app: App, found: Sequence[Waiting], *, arguments: bool, as_json: bool) -> None:
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


def _described(app: App, each: Waiting, *, arguments: bool) -> dict[str, Any]:
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
        args, kwargs, problem = _arguments(app, each)
        described |= {"args": args, "kwargs": kwargs, "problem": problem}
    return described


def _shown(app: App, each: Waiting) -> str:
    args, kwargs, problem = _arguments(app, each)
    if problem:
        return f"({problem})" if _apart(each) else f"(cannot be read: {problem})"
    if args is None:
        return "-"
    return to_json(args) + (f" {to_json(kwargs)}" if kwargs else "")


def _apart(each: Waiting) -> bool:
    return each.message is not None and each.message.payload is not None


def _arguments(app: App, each: Waiting) -> tuple[Any, Any, str]:
    """(args, kwargs, why they cannot be read or ""); None for a pointer, which has no arguments."""
    if each.message is None:
        return None, None, each.problem
    if each.message.pointer is not None:
        return None, None, ""
    try:
        args, kwargs = app.codec.decode_arguments(each.message)
    except CodecError as error:
        return None, None, str(error)
    return args, kwargs, ""
