"""Asking before something is done that cannot be undone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def dry_run_option(command: Command) -> Command:
    """Add ``--dry-run``, which only says what would be done."""
    option: Callable[[Command], Command] = click.option(
        "--dry-run", is_flag=True, help="Only say what would be done."
    )
    return option(command)


def yes_option(command: Command) -> Command:
    """Add ``--yes``, which answers the question in advance."""
    option: Callable[[Command], Command] = click.option(
        "-y", "--yes", is_flag=True, help="Do not ask for confirmation."
    )
    return option(command)


def confirm(what: str, *, dry_run: bool, yes: bool) -> bool:
    """Ask on a terminal whether to do `what`; elsewhere a missing --yes is a usage error."""
    if dry_run:
        click.echo(f"would {what}")
        return False
    if yes:
        return True
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError(
            f"this would {what}; add --yes to do it, or --dry-run to only see it"
        )
    click.confirm(f"{what}?", abort=True, err=True)
    return True
