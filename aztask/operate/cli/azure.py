"""``aztask azure``: files that make what the app needs on Azure, and how they differ from there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeVar

import click

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
from aztask.support.display import plural, visible

Command = TypeVar("Command", bound=Callable[..., Any])

FOLDER: Final = Path("azure")
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


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
