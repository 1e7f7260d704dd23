"""``aztask migrate check PATH``: what a project uses of Celery that aztask does not have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aztask.errors import NotFound
from aztask.operate.cli.failures import CommandFailed
from aztask.operate.cli.group import CliGroup, extra_module
from aztask.operate.cli.options import json_option
from aztask.operate.cli.output import print_json
from aztask.support.display import plural, visible

if TYPE_CHECKING:
    from aztask.celery.migration.answers import Unread, Use
    from aztask.celery.migration.project import Reading


@click.group("migrate", cls=CliGroup)
def command() -> None:
    """Check what a Celery project needs before it can move to aztask."""


@command.command("check")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--all", "show_all", is_flag=True, help="Also list uses that have a counterpart.")
@json_option
def check(path: Path, show_all: bool, as_json: bool) -> None:
    """List every use of Celery below PATH that has no counterpart in aztask, with file and line.

    Reads Python files, scripts and service files; it imports and runs nothing. With --all, it lists
    every use, and what to write instead. Exits with 1 if a use has no counterpart, or a file
    cannot be read. Needs pip install "aztask[migrate]".
    """
    reading: Reading = extra_module(
        "aztask.celery.migration.project", "aztask migrate check", "migrate"
    ).read_project(path)
    if not reading.files:
        raise NotFound(f"there is no Python file, script or service file below {path}")
    missing = [use for use in reading.uses if use.missing]
    shown = reading.uses if show_all else missing
    if as_json:
        _print_json(shown, reading.unread)
    else:
        _print_lines(shown, reading.unread)
    click.echo(
        f"{plural(reading.files, 'file')}: {plural(len(reading.uses), 'use')} of Celery,"
        f" {len(missing)} without a counterpart"
        + ("" if show_all or len(missing) == len(reading.uses) else "; --all lists every use"),
        err=True,
    )
    if reading.unread:
        raise CommandFailed(f"could not read {plural(len(reading.unread), 'file')}")
    if missing:
        raise click.exceptions.Exit(1)


def _print_lines(uses: Sequence[Use], unread: Sequence[Unread]) -> None:
    for use in uses:
        place, name = visible(f"{use.file}:{use.line}"), _title(use)
        click.echo(f"{place}: {name}: {_plain(use.text)}")
    for file in unread:
        click.echo(visible(f"{file.file}:{file.line}: not read: {file.reason}"))


def _print_json(uses: Sequence[Use], unread: Sequence[Unread]) -> None:
    for use in uses:
        row: dict[str, Any] = {**asdict(use), "text": _plain(use.text)}
        print_json({**row, "error": None})
    for file in unread:
        print_json({"file": file.file, "line": file.line, "error": file.reason})


_TITLES = {
    "settings": "setting ",
    "signals": "signal ",
    "task": "task ",
    "request": "request.",
    "send": "send option ",
    "app": "app.",
    "signature": "signature.",
    "result": "result.",
    "control": "control ",
    "worker": "celery worker ",
}


def _title(use: Use) -> str:
    return _TITLES.get(use.section, "") + use.name


def _plain(text: str) -> str:
    """The answer without the marks of Markdown."""
    return re.sub(r"`([^`]*)`", r"\1", text)
