"""``aztask doctor``: check the setup, and say what to do about each problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from aztask.app import App
from aztask.operate.bundle import bundle, write_bundle
from aztask.operate.celeryapp import CeleryApp, examine_celery
from aztask.operate.cli.failures import FAILURE, OK, CommandFailed, diagnose
from aztask.operate.cli.options import (
    LONGEST_LEASE,
    Duration,
    Text,
    all_names,
    app_option,
    chosen_app,
    confirm,
    json_option,
    queues_option,
    yes_option,
)
from aztask.operate.cli.output import print_json, say_left_out
from aztask.operate.cli.target import open_app
from aztask.operate.doctor import examine, queues_to_examine
from aztask.operate.owners import adoption
from aztask.operate.queues import LeftOut
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
    help="Remove stored payloads that nothing needs.",
)
@click.option(
    "--adopt",
    "old_owner",
    type=Text(),
    metavar="OWNER",
    help="Move the result store's rows of another owner, BROKER or APP on BROKER, to this app.",
)
@click.option(
    "--bundle",
    "bundle_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Pack the findings for a bug report into this new zip file, without secrets.",
)
@yes_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    queues: Sequence[tuple[str, ...]],
    lease: float | None,
    collect: bool,
    old_owner: str | None,
    bundle_file: Path | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Check that broker, queues, permissions, clock, results and events match the app.

    Each finding is one line: ok, warning or problem, and what to do next. The check changes nothing
    and receives no message; --collect removes payloads that are left over. The exit code is that of
    the worst problem: 3 unreachable, 4 configuration or permission, 5 a queue is missing, 1
    anything else. Warnings alone exit with 0.

    Of a Celery app it checks the routes, serializers, acknowledgements and time limits, too, and
    its queues and results as Celery's workers use them.

    --bundle packs versions, findings, settings, plans of queues, names of tasks, and which
    variables are set. Secrets are masked; no message, argument or result is read.

    --adopt is for a broker that was moved or renamed, or whose standby took over: the runs,
    workflows, schedules and other rows of the old broker become those of this app's broker. It asks
    first, and checks nothing else. Stop the workers of the old broker before.
    """
    with open_app(celery=True) as app:
        if old_owner is not None:
            _adopt(app, old_owner, yes=yes)
            return
        named = chosen_app(ctx) is not None
        names = all_names(queues)
        if not names:
            left_out = LeftOut()
            names = queues_to_examine(app, left_out, named=named)
            say_left_out(left_out)
        if isinstance(app, CeleryApp):
            findings = examine_celery(app, names, lease)
        else:
            findings = examine(app, names, lease=lease, named=named, collect=collect)
        found = []
        for finding in findings:
            found.append(finding)
            _print(finding, as_json=as_json)
        if bundle_file is not None:
            _pack(app, found, bundle_file)
    levels = Counter(finding.level for finding in found)
    problems, warnings = levels[Level.PROBLEM], levels[Level.WARNING]
    click.echo(f"{plural(problems, 'problem')}, {plural(warnings, 'warning')}", err=True)
    ctx.exit(_exit_code(found))


def _pack(app: App, found: Sequence[Finding], path: Path) -> None:
    try:
        write_bundle(path, files := bundle(app, found))
    except FileExistsError:
        raise CommandFailed(f"{path} exists already; choose another name") from None
    note = f"wrote {visible(str(path))}: {plural(len(files), 'file')}; read them before you send it"
    click.echo(note, err=True)


def _adopt(app: App, old: str, *, yes: bool) -> None:
    action = adoption(app, old)
    if confirm(str(action), dry_run=False, yes=yes):
        click.echo(f"moved {plural(action.act(), 'row')} to {app.owner}")


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
