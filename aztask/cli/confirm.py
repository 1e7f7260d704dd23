"""Asking before something is changed that cannot be changed back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def dry_run_option(command: Command) -> Command:
    """``--dry-run``: say what would happen."""
    option: Callable[[Command], Command] = click.option(
        "--dry-run", is_flag=True, help="Say what would be done, and do nothing."
    )
    return option(command)


def yes_option(command: Command) -> Command:
    """``--yes``: do not ask."""
    option: Callable[[Command], Command] = click.option(
        "-y", "--yes", is_flag=True, help="Do not ask."
    )
    return option(command)


def confirm(what: str, *, dry_run: bool, yes: bool) -> bool:
    """Whether to do it. Asks on a terminal; elsewhere --yes is needed, or it is a usage error."""
    if dry_run:
        click.echo(f"would {what}")
        return False
    if yes:
        return True
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError(f"this would {what}; add --yes, or --dry-run to look only")
    click.confirm(f"{what}?", abort=True, err=True)
    return True
