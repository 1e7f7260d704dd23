"""Groups of commands that suggest a name for a mistyped one, and load commands late."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from aztask.errors import did_you_mean


class Group(click.Group):
    """Like Click's, with the same error for an unknown command in every version of Click."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raise a usage error with a suggestion for an unknown command."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            raise click.UsageError(f"there is no command {name!r}.{did_you_mean(name, known)}", ctx)
        return super().resolve_command(ctx, args)


class LazyGroup(Group):
    """Imports ``PACKAGE.NAME`` when NAME is run, and takes the `command` in it.

    package: the package whose modules are the commands. table: their names and their short help,
    so that a list of them imports none of them.
    """

    def __init__(
        self, *args: Any, package: str = "", table: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._package = package
        self._table = dict(table or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of the table, in which a newcomer needs them."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of the command and return it; None for an unknown name."""
        if cmd_name not in self._table:
            return None
        command: click.Command = import_module(f"{self._package}.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, without importing them."""
        if self._table:
            with formatter.section("Commands"):
                formatter.write_dl(list(self._table.items()))
