"""Groups of commands that suggest a name for a mistyped one, and load commands late."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import click

from aztask.errors import ConfigurationError, did_you_mean

OTHER_OPTIONS: Final = {
    "--autoscale": "--concurrency",
    "--countdown": "--delay",
    "--eta": "--delay",
    "-l": "--log-level",
    "-n": "--name",
    "-q": "--queues",
}
"""Options of other tools, and those that take their place here."""


class CliCommand(click.Command):
    """A command that suggests options for those of other tools.

    extra: what to write instead of a positional argument that the command does not take.
    """

    def __init__(self, *args: Any, extra: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._extra = extra

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises a usage error that names what to write instead."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            other = OTHER_OPTIONS.get(error.option_name)
            if any(other in param.opts for param in self.params):
                raise click.UsageError(
                    f"there is no option {error.option_name!r}. Did you mean {other!r}?", ctx
                ) from None
            raise
        except click.UsageError as error:
            if self._extra and "unexpected extra argument" in error.message:
                raise click.UsageError(f"{error.message.rstrip('.')}: {self._extra}", ctx) from None
            raise


class CliGroup(click.Group):
    """Like Click's, with the same error for an unknown command in every version of Click."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raise a usage error with a suggestion for an unknown command."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            hint = self.hint(name) or did_you_mean(name, known)
            raise click.UsageError(f"there is no command {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def hint(self, name: str) -> str:
        """What to write instead of `name`, with a leading space, if that is known; else ""."""
        return ""


class LazyGroup(CliGroup):
    """Imports ``PACKAGE.NAME`` when NAME is run, and takes its `command`.

    package: the package whose modules are the commands. table: their names and their short help,
    so that a list of them imports none of them. others: names from other tools, and what to write
    here instead. beside: commands that are in another command's module, under their own names.
    elsewhere: modules of commands that are in no module of `package`.
    """

    def __init__(
        self,
        *args: Any,
        package: str = "",
        table: Mapping[str, str] | None = None,
        others: Mapping[str, str] | None = None,
        beside: Mapping[str, str] | None = None,
        elsewhere: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._package = package
        self._table = dict(table or {})
        self._others = dict(others or {})
        self._beside = dict(beside or {})
        self._elsewhere = dict(elsewhere or {})

    def hint(self, name: str) -> str:
        """The counterpart of a command of another tool."""
        other = self._others.get(name)
        return f" Write: {other}." if other else ""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of the table, in which a newcomer needs them."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of the command and return it; None for an unknown name."""
        if cmd_name not in self._table:
            return None
        home = self._beside.get(cmd_name, cmd_name)
        name = cmd_name if home != cmd_name else "command"
        module = self._elsewhere.get(home, f"{self._package}.{home}")
        command: click.Command = getattr(import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, without importing them."""
        if self._table:
            with formatter.section("Commands"):
                formatter.write_dl(list(self._table.items()))


# -- loads the modules of commands that need an extra --------------------------------------


def telemetry_module(name: str) -> Any:
    """A module of `aztask.telemetry.prometheus`. Raises ConfigurationError without the extra."""
    return extra_module(f"aztask.telemetry.prometheus.{name}", "--http", "prometheus")


def extra_module(module: str, what: str, extra: str) -> Any:
    """Import a module of aztask that needs an extra.

    what: the command or option, for the error. Raises ConfigurationError without the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is None or error.name.startswith("aztask"):
            raise
        raise ConfigurationError(
            f"{what} needs a package that is missing ({error.name}); install it with: "
            f'pip install "aztask[{extra}]"'
        ) from None
