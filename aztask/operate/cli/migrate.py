"""``aztask migrate``: what a project uses of Celery, a diff of a rewrite, and beat's schedules."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from aztask.errors import CodecError, ConfigurationError, DuplicateTask, NotFound
from aztask.operate.celeryapp import CeleryApp
from aztask.operate.celeryschedules import make_schedule
from aztask.operate.cli.failures import CommandFailed
from aztask.operate.cli.group import CliGroup, extra_module
from aztask.operate.cli.options import app_option, json_option
from aztask.operate.cli.output import print_json
from aztask.operate.cli.target import open_app
from aztask.support.display import plural, visible

if TYPE_CHECKING:
    from aztask.celery.migration.answers import Unread, Use
    from aztask.celery.migration.project import Reading

PROGRESS_SECONDS: Final = 0.2


@click.group("migrate", cls=CliGroup)
def command() -> None:
    """Check what a Celery project needs to move to aztask, and rewrite a part of it."""


@command.command("check")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--all", "show_all", is_flag=True, help="Also list uses that have a counterpart.")
@json_option
def check(path: Path, show_all: bool, as_json: bool) -> None:
    """List every use of Celery below PATH that has no counterpart in aztask, with file and line.

    Reads Python files, scripts and service files; it imports and runs nothing. With --all, it lists
    every use, and what to write instead. A use is certain, or likely if it was judged by a name.
    Every other name of Celery, Kombu and the packages around them is listed as unknown. Exits with
    1 if a use has no counterpart, or a file cannot be read.
    """
    reading = _read(path)
    if not reading.files:
        raise NotFound(f"there is no Python file, script or service file below {path}")
    missing = [use for use in reading.uses if use.missing]
    unknown = sum(use.sure == "unknown" for use in reading.uses)
    shown = reading.uses if show_all else missing
    if as_json:
        _print_json(shown, reading.unread)
    else:
        _print_lines(shown, reading.unread)
    click.echo(
        f"{plural(reading.files, 'file')}: {plural(len(reading.uses), 'use')} of Celery,"
        f" {len(missing)} without a counterpart"
        + (f", {unknown} of them unknown" if unknown else "")
        + ("" if show_all or len(missing) == len(reading.uses) else "; --all lists every use"),
        err=True,
    )
    if reading.unread:
        raise CommandFailed(f"could not read {plural(len(reading.unread), 'file')}")
    if missing:
        raise click.exceptions.Exit(1)


@command.command("rewrite")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--write", is_flag=True, help="Change the files instead of printing a diff.")
def rewrite(path: Path, write: bool) -> None:
    """Print a diff that rewrites what a program can, and comments where you must decide.

    It translates options of tasks, apply_async, retry, requests, loggers and imports of PATH's
    Python files where the new code means the same. Above every other statement that uses Celery it
    writes a comment, "# aztask: ...", with what the check says. It runs nothing. Exits with 1 if a
    file cannot be read. Needs pip install "aztask[migrate]".
    """
    module = extra_module("aztask.celery.migration.rewrite", "aztask migrate rewrite", "migrate")
    found, unread = module.rewrite_project(path)
    changed = [each for each in found if each.before != each.after]
    for each in changed:
        if write:
            with each.path.open("w", encoding="utf-8", newline="") as file:
                file.write(each.after)
        else:
            click.echo(each.diff(), nl=False)
    _print_lines([], unread)
    click.echo(f"{plural(len(changed), 'file')} {'changed' if write else 'to change'}", err=True)
    if unread:
        raise CommandFailed(f"could not read {plural(len(unread), 'file')}")


@command.command("schedules")
@app_option
@click.option("--write", is_flag=True, help="Make the entries instead of printing them.")
def schedules(write: bool) -> None:
    """Print what becomes of each periodic task of django_celery_beat, or make schedules of them.

    Needs an app (-A), and DJANGO_SETTINGS_MODULE. With the Celery app of the site they are entries
    for beats with beat_scheduler = "aztask.celery:Scheduler"; with an aztask app, schedules of its
    tasks, which its workers send. aztask schedule shows and changes them. Running it again changes
    what has changed. Exits with 1 if a task cannot be carried over.
    """
    with open_app(required="aztask migrate schedules", celery=True) as app:
        if isinstance(app, CeleryApp):
            app.entries_address()
        module = extra_module("aztask.django.periodic", "aztask migrate schedules", "django")
        left = 0
        for row in module.periodic_tasks():
            if isinstance(app, CeleryApp) and row.name in app.celery.conf.beat_schedule:
                _say(row, "in beat_schedule: beat takes it from the code")
                continue
            notes = [row.note] if row.note else []
            try:
                if row.entry is None:
                    raise ConfigurationError(row.note)
                if not isinstance(app, CeleryApp):
                    notes += make_schedule(app, row.entry, paused=row.paused, write=write)
                elif write and not app.schedules.put(row.entry, paused=row.paused):
                    raise ConfigurationError("the code of a beat has an entry of this name")
            except (ConfigurationError, CodecError, DuplicateTask, TypeError) as error:
                left += 1
                _say(row, f"not carried over: {error}")
            else:
                note = f" ({'; '.join(notes)})" if notes else ""
                _say(row, f"{row.entry.trigger}: {row.entry.task}{note}")
    if left:
        raise CommandFailed(f"{plural(left, 'task')} not carried over")


def _say(row: Any, text: str) -> None:
    click.echo(visible(f"{row.name}: {text}"))


def _read(path: Path) -> Reading:
    """Read the project; on a terminal, the number of files is shown as it grows."""
    live = sys.stderr is not None and sys.stderr.isatty()
    told = 0.0

    def progress(count: int) -> None:
        nonlocal told
        if live and time.monotonic() - told > PROGRESS_SECONDS:
            told = time.monotonic()
            click.echo(f"\r{plural(count, 'file')} looked at", err=True, nl=False)

    reading: Reading = import_module("aztask.celery.migration.project").read_project(path, progress)
    if told:
        click.echo("\r\033[K", err=True, nl=False)
    return reading


def _print_lines(uses: Sequence[Use], unread: Sequence[Unread]) -> None:
    for use in uses:
        place, name = visible(f"{use.file}:{use.line}"), _title(use)
        sure = "" if use.sure == "certain" else f" ({use.sure})"
        click.echo(f"{place}: {name}: {_plain(use.text)}{sure}")
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
