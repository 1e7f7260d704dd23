"""``aztask doctor``: check the setup, and say what to do about each problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import click

from aztask.app import App
from aztask.cli.failures import FAILURE, OK, diagnose
from aztask.cli.listing import all_queues
from aztask.cli.options import (
    LONGEST_LEASE,
    Duration,
    all_names,
    app_option,
    chosen_app,
    json_option,
    queues_option,
)
from aztask.cli.output import print_json
from aztask.cli.target import open_app
from aztask.doctor.examination import examine
from aztask.errors import AztaskError
from aztask.support.display import plural, visible
from aztask.support.finding import Finding, Level

COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}


@click.command("doctor")
@app_option
@queues_option("Queues to check: a,b or -Q a -Q b. [default: those that the app names]")
@click.option(
    "--lease",
    type=Duration(least=0.1, most=LONGEST_LEASE),
    help="Check against this worker --lease. [default: the app's setting]",
)
@click.option(
    "--collect",
    is_flag=True,
    help="Remove stored payloads that no message refers to.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    queues: Sequence[tuple[str, ...]],
    lease: float | None,
    collect: bool,
    as_json: bool,
) -> None:
    """Check that broker, queues, permissions, clock, results and events match the app.

    Each finding is one line: ok, warning or problem, and what to do next. The check changes nothing
    and receives no message; --collect removes payloads that are left over. The exit code is that of
    the worst problem: 3 unreachable, 4 configuration or permission, 5 a queue is missing, 1
    anything else. Warnings alone exit with 0.
    """
    with open_app() as app:
        named = chosen_app(ctx) is not None
        names = all_names(queues) or tuple(_queues(app, named=named))
        found = []
        for finding in examine(app, names, lease=lease, named=named, collect=collect):
            found.append(finding)
            _print(finding, as_json=as_json)
    levels = Counter(finding.level for finding in found)
    problems, warnings = levels[Level.PROBLEM], levels[Level.WARNING]
    click.echo(f"{plural(problems, 'problem')}, {plural(warnings, 'warning')}", err=True)
    ctx.exit(_exit_code(found))


def _queues(app: App, *, named: bool) -> Sequence[str]:
    """The app's queues; without an app, those of the broker, if it may be asked."""
    if named:
        return app.queue_names()
    try:
        return all_queues(app) or app.queue_names()
    except AztaskError:
        return app.queue_names()


def _print(finding: Finding, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "level": finding.level.value,
                "subject": finding.subject,
                "check": finding.check,
                "text": finding.text,
                "advice": finding.advice or None,
            }
        )
        return
    word = click.style(f"{finding.level.value:8}", fg=COLOURS[finding.level])
    click.echo(f"{word} {visible(str(finding))}")


def _exit_code(found: Sequence[Finding]) -> int:
    """The code of the worst problem: unreachable, then configuration, then not found."""
    codes = set(_codes(found))
    return next((code for code in (3, 4, 5, 2) if code in codes), FAILURE if codes else OK)


def _codes(found: Sequence[Finding]) -> Iterator[int]:
    for finding in found:
        if finding.level is Level.PROBLEM:
            yield diagnose(finding.error)[0] if finding.error is not None else FAILURE
