"""``aztask completion SHELL``: print the script that completes commands and options in a shell."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_AZTASK_COMPLETE"
"""The variable by which the script asks for completions; Click derives the name from ``aztask``."""


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@click.pass_context
def command(ctx: click.Context, shell: str | None) -> None:
    """Print the script that completes commands and options in your shell.

    Without SHELL, it takes the shell of the variable SHELL. Add the line to the file that your
    shell reads at its start: eval "$(aztask completion bash)" for bash and zsh, aztask completion
    fish | source for fish. bash must be 4.4 or newer.
    """
    name = shell or Path(os.environ.get("SHELL", "")).name
    kind = get_completion_class(name) if name in SHELLS else None
    if kind is None:
        raise click.UsageError(f"name the shell: aztask completion {' or '.join(SHELLS)}", ctx)
    root = ctx.find_root()
    completion = kind(root.command, {}, "aztask", VARIABLE)
    # Not `source()`: for bash it starts bash to read its version, which warns on stderr.
    click.echo(completion.source_template % completion.source_vars())
