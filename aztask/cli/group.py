"""A group of commands that says which one was probably meant."""

from __future__ import annotations

import click

from aztask.errors import did_you_mean


class Group(click.Group):
    """Like Click's, with our own word for an unknown command, in every version of Click."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuse an unknown command."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            raise click.UsageError(f"there is no command {name!r}.{did_you_mean(name, known)}", ctx)
        return super().resolve_command(ctx, args)
