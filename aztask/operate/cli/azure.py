"""``aztask azure``: files that make what the app needs on Azure, and how they differ from there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from aztask.errors import AztaskError
from aztask.operate.cli.failures import CommandFailed
from aztask.operate.cli.group import CliGroup
from aztask.operate.cli.options import app_option, json_option
from aztask.operate.cli.output import print_json
from aztask.operate.cli.target import app_spec, open_app
from aztask.operate.provision.files import files_of
from aztask.operate.provision.plan import (
    SERVICES,
    AzurePlan,
    Service,
    differences,
    plan_for_azure,
)
from aztask.operate.verify import CHECKS, as_html, report, verify
from aztask.operate.verifybench import leftovers
from aztask.operate.verifylong import verify_long
from aztask.operate.verifystores import marks_left
from aztask.support.display import plural, visible

Command = TypeVar("Command", bound=Callable[..., Any])

FOLDER: Final = Path("azure")
A_FILE: Final = click.Path(dir_okay=False, path_type=Path)
STATES: Final = {"passed": "green", "failed": "red", "skipped": "yellow", "waiting": "yellow"}
COLOURS: Final = {"add": "green", "change": "yellow", "replace": "red", "unknown": "yellow"}


@click.group("azure", cls=CliGroup)
def command() -> None:
    """Write files for what the app needs on Azure, and compare it with what is there."""


def plan_options(command: Command) -> Command:
    """Add the options that a plan depends on."""
    for option in (
        click.option(
            "--partitioned/--not-partitioned",
            default=None,
            help="Spread the messages of each Service Bus queue over several stores.",
        ),
        click.option(
            "--job",
            "jobs",
            multiple=True,
            metavar="QUEUE",
            help="Serve this queue with jobs, which no scale-down ends; repeatable. [default: "
            "queues with a task whose time_limit is more than 10 minutes]",
        ),
        click.option(
            "--service",
            type=click.Choice(SERVICES),
            help="Where the queues are. [default: that of the app's broker, else servicebus]",
        ),
    ):
        command = option(command)
    return command


@command.command("init")
@app_option
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=FOLDER)
@plan_options
@click.option("--force", is_flag=True, help="Replace files of an earlier run.")
@json_option
def init_(folder: Path, force: bool, as_json: bool, **options: Any) -> None:
    """Write files into FOLDER that make what the app needs on Azure.

    Bicep, an ARM template, Terraform, azure.yaml for azd, and manifests for Kubernetes with KEDA:
    queues, result table, containers, identities with the roles that they need, workers on Container
    Apps, alerts. Nothing is created, and no service is asked. The files have not been tried on
    Azure: see docs/how-to/production/make-the-resources.md.
    """
    with open_app(required="aztask azure init", reads=False, creates=True) as app:
        plan = _plan(app, options)
    files = files_of(plan)
    there = sorted(name for name in files if (folder / name).exists())
    if there and not force:
        raise CommandFailed(
            f"{folder} has {', '.join(there)} already; --force replaces them, or choose another "
            "folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    if as_json:
        print_json({"folder": str(folder), "files": sorted(files), "plan": asdict(plan)})
        return
    shown = visible(str(folder))
    click.echo(f"wrote {shown}: {len(files)} files, for {plural(len(plan.queues), 'queue')}")
    click.echo(f"Read {shown}/README.md. Nothing of it has been tried on Azure.", err=True)


def _plan(app: Any, options: dict[str, Any]) -> AzurePlan:
    service: Service | None = options["service"]
    return plan_for_azure(
        app,
        app_spec() or "",
        service=service,
        jobs=options["jobs"],
        partitioned=options["partitioned"],
    )


@command.command("diff")
@app_option
@plan_options
@json_option
def diff_(as_json: bool, **options: Any) -> None:
    """Compare what the app needs with the queues and the result store that its addresses name.

    Each difference is an addition, a change that the service makes in place, or a replacement: what
    Service Bus cannot change on an existing queue (sessions, duplicate detection, partitioning),
    with the commands for a new queue, the drain and the switch. Nothing is changed. aztask doctor
    finds the same. The exit code is 0 without differences, 1 with some.

    Reading the settings of Service Bus queues needs the permission Manage.
    """
    with open_app(required="aztask azure diff", reads=True) as app:
        found = list(differences(app, _plan(app, options)))
    for each in found:
        if as_json:
            print_json(asdict(each))
            continue
        word = click.style(f"{each.kind:8}", fg=COLOURS[each.kind])
        click.echo(f"{word} {visible(each.subject)}: {visible(each.text)}")
        for name, (there, planned) in each.settings.items():
            click.echo(f"           {name.replace('_', ' ')}: {_shown(there)} -> {_shown(planned)}")
        for line in each.commands:
            click.echo(f"           {line}")
    counts = Counter(each.kind for each in found)
    summary = ", ".join(f"{count} to {kind}" for kind, count in counts.items())
    click.echo(summary or "no difference", err=True)
    click.get_current_context().exit(1 if found else 0)


@command.command("verify")
@app_option
@click.option(
    "--check",
    "names",
    type=click.Choice(tuple(CHECKS)),
    multiple=True,
    help="Run this check alone; repeatable. [default: all checks]",
)
@click.option("--clean", is_flag=True, help="Delete what runs have left, and run nothing.")
@click.option(
    "--long",
    "kept",
    type=A_FILE,
    help="Run the proofs of minutes and days instead, and keep in this file how far they are.",
)
@click.option("--html", "page", type=A_FILE, help="Write the report as a page into this file.")
@click.option("--report", "file", type=A_FILE, help="Write the report as JSON into this file.")
@json_option
def verify_(
    names: tuple[str, ...],
    clean: bool,
    kept: Path | None,
    page: Path | None,
    file: Path | None,
    as_json: bool,
) -> None:
    """Try on the app's service what only a service can show: locks, sessions, duplicates and so on.

    Each check makes a queue, a table or a container of its own, whose name begins with
    aztask-verify- (a table's: aztaskverify), and deletes it. Of your own queues, only the lock is
    read. The run takes about three minutes and 3,000 requests, and needs the permission Manage.
    Each line names the rule of docs/rules.md that it proves. The exit code is 1 if a check failed.

    The checks of roles need a credential of each role: AZTASK_VERIFY_SENDER, AZTASK_VERIFY_WORKER,
    AZTASK_VERIFY_OPERATOR and AZTASK_VERIFY_SCALER may hold a connection string with its key,
    entra:CLIENT_ID for a managed identity, or entra:TENANT_ID/CLIENT_ID/SECRET. With them, rows and
    blobs whose names begin with aztask-verify- are written into the app's own result table and
    containers, and deleted.

    --long tries links that are idle for eleven minutes, makes the service refuse sends, which other
    programs on it feel, and looks after seven days at what was prepared at the first call. Run the
    same command again when it says so, or after a kill. --clean deletes the queues of a long run,
    too.

    The reports have no address, key or name of yours.
    """
    with open_app(reads=True) as app:
        if clean:
            refused = 0
            for each in chain(leftovers(app), marks_left(app)):
                what = f"{each.what} {visible(each.name)}"
                try:
                    each.delete()
                except AztaskError as error:  # the others can be deleted all the same
                    refused += 1
                    click.echo(f"{what} could not be deleted: {error}", err=True)
                else:
                    click.echo(f"deleted {what}")
            click.get_current_context().exit(1 if refused else 0)
        if kept is not None and names:
            raise click.UsageError("--check and --long exclude each other")
        found = []
        for proof in verify(app, names) if kept is None else verify_long(app, kept):
            found.append(proof)
            if as_json:
                print_json(asdict(proof))
            else:
                word = click.style(f"{proof.state:8}", fg=STATES[proof.state])
                click.echo(f"{word} {proof.check} (rule {proof.rule}): {visible(proof.text)}")
        whole = report(app, found)
    for target, text in ((page, as_html(whole)), (file, json.dumps(whole, indent=2) + "\n")):
        if target is not None:
            target.write_text(text, encoding="utf-8")
    counts = Counter(each.state for each in found)
    click.echo(", ".join(f"{count} {state}" for state, count in counts.items()), err=True)
    click.get_current_context().exit(1 if counts["failed"] else 0)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
