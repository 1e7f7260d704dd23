"""Acting on dead letters from a terminal: count, ask, act, and report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import click

from aztask.cli.confirm import confirm
from aztask.cli.failures import CommandFailed
from aztask.deadletters.view import DeadLetters, Report
from aztask.support.display import plural, visible

Act = Callable[[DeadLetters, Callable[[Report], None]], Report]


def act_on(
    selected: Sequence[tuple[DeadLetters, int]],
    words: tuple[str, str],
    act: Act,
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    """Ask, act, and report what was done, also after an interruption.

    * selected: the dead letters of each queue, and how many of them are selected.
    * words: the verb and its past, such as "replay" and "replayed".
    * act: does it for one queue and reports its progress.

    Raises CommandFailed if some dead letters could not be received.
    """
    verb, past = words
    counts = [(letters, count) for letters, count in selected if count]
    total = sum(count for _, count in counts)
    if not total:
        click.echo(f"there is nothing to {verb}")
        return
    places = ", ".join(f"{count:,} of {visible(letters.queue)}" for letters, count in counts)
    if not confirm(f"{verb} {plural(total, 'dead letter')} ({places})", dry_run=dry_run, yes=yes):
        return
    reports: dict[str, Report] = {}
    try:
        for letters, _ in counts:
            reports[letters.queue] = act(letters, partial(reports.__setitem__, letters.queue))
    finally:
        done = sum(report.done for report in reports.values())
        click.echo(f"{past} {plural(done, 'dead letter')}")
    if unreadable := sum(report.unreadable for report in reports.values()):
        click.echo(
            f"{plural(unreadable, 'dead letter')} could not be read, so not replayed: see aztask "
            "dlq show, then purge",
            err=True,
        )
    blocked = [pair for report in reports.values() for pair in report.blocked.items()]
    for task_id, holder in sorted(blocked):
        click.echo(
            f"not replayed: {visible(task_id)} is unique, and task {visible(holder)} holds its key",
            err=True,
        )
    if lost := sum(report.lost for report in reports.values()):
        raise CommandFailed(
            f"{plural(lost, 'dead letter')} could not be received: removed in the meantime, or "
            "leased by another process, whose lease soon expires if it died; see: aztask dlq list"
        )
