"""Acting on dead letters from a terminal: count, ask, act, and say what was done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import click

from aztask.cli.confirm import confirm
from aztask.cli.failures import CommandFailed, visible
from aztask.cli.output import plural
from aztask.deadletters.view import DeadLetters, Report

Act = Callable[[DeadLetters, Callable[[Report], None]], Report]


def act_on(
    meant: Sequence[tuple[DeadLetters, int]],
    words: tuple[str, str],
    act: Act,
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    """Ask, act, and say what was done, also when it is broken off.

    meant: whose dead letters, and how many of each. words: "replay" and "replayed". Raises Failed
    where some could not be had.
    """
    verb, past = words
    counts = [(letters, count) for letters, count in meant if count]
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
            f"{plural(unreadable, 'dead letter')} could not be read and cannot be sent again: look "
            "with aztask dlq show, then purge",
            err=True,
        )
    if lost := sum(report.lost for report in reports.values()):
        raise CommandFailed(
            f"{plural(lost, 'dead letter')} could not be had: gone meanwhile, or under somebody "
            "else's lease, which ends soon if that one died; look again: aztask dlq list"
        )
