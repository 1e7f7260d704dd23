"""``aztask run TASK``: run one task here and now, with its traceback."""

from __future__ import annotations

from typing import Any

import click

from aztask.errors import EncodeError, TaskControl
from aztask.operate.cli.failures import CommandFailed
from aztask.operate.cli.group import CliCommand
from aztask.operate.cli.options import JsonValue, Text, app_option
from aztask.operate.cli.output import to_json
from aztask.operate.cli.target import open_app
from aztask.operate.runhere import (
    LocalCall,
    LocalParts,
    RunStopped,
    call_of,
    run_here,
    task_named,
    traceback_of,
)
from aztask.support.display import MASK, hide, mask, visible


@click.command(
    "run",
    cls=CliCommand,
    extra="give the task's arguments as JSON, for example --args '[\"a.png\"]'",
)
@app_option
@click.argument("task", required=False)
@click.option(
    "--args", type=JsonValue(list), default="[]", help="Positional arguments, as a JSON list."
)
@click.option(
    "--kwargs", type=JsonValue(dict), default="{}", help="Keyword arguments, as a JSON object."
)
@click.option(
    "--from",
    "task_id",
    type=Text(),
    metavar="ID",
    help="Take the arguments of this dead letter, waiting message or task of a workflow.",
)
def command(task: str | None, args: list[Any], kwargs: dict[str, Any], task_id: str | None) -> None:
    """Run TASK in this process, and print its value as JSON.

    What the task emits, or yields as a generator, is printed before the value, one part on each
    line. context.sleep returns at once.

    Nothing is sent, recorded or settled: with --from, the message stays where it is. An error is
    printed with its whole traceback. The code runs in the main thread with the terminal's input, so
    breakpoint(), pdb and profilers work.

    What the task itself sends and writes is real.
    """
    if (task is None) == (task_id is None):
        raise click.UsageError("give the name of a task, or --from with an id; not both")
    if task_id is not None and (args or kwargs):
        raise click.UsageError("--from brings its own arguments; leave out --args and --kwargs")
    # Arguments of a message are read from queues; a call that was given needs none.
    with open_app(required="aztask run", reads=task_id is not None, creates=True) as app:
        if task_id is not None:
            call = call_of(app, task_id)
            click.echo(
                f"{visible(call.task.name)} with the arguments of {visible(task_id)} from "
                f"{visible(call.found)}",
                err=True,
            )
        else:
            call = LocalCall(task_named(app, task or ""), tuple(args), kwargs)
        try:
            call.task.check_arguments(call.args, call.kwargs)
        except TypeError as error:
            raise click.UsageError(str(error)) from error
        conversion = call.task.conversion
        hide("aztask run", conversion.secret_texts(call.args, call.kwargs))
        call = call.typed()
        try:
            value = run_here(app, call, _PrintedParts(app))
        except TaskControl as error:
            raised = f"{type(error).__name__}: {mask(str(error))}"
            raise CommandFailed(f"the task raised {raised}") from error
        except RunStopped as error:
            raise CommandFailed(visible(mask(str(error)))) from error
        except Exception as error:
            click.echo(mask(traceback_of(error)), nl=False, err=True)
            raise CommandFailed(f"task {visible(call.task.name)} failed") from error
        try:
            value = conversion.written_result(value)
            app.codec.encode_value(value)
        except EncodeError as error:
            raise CommandFailed(f"the task returned what cannot be a result: {error}") from error
        click.echo(MASK if conversion.secret_result else to_json(value))


class _PrintedParts(LocalParts):
    def show(self, value: Any) -> None:
        """Print the part as one line of JSON."""
        click.echo(to_json(value))
