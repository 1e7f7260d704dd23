"""``aztask send TASK``: send one invocation by the task's name."""

from __future__ import annotations

from typing import Any

import click

from aztask.app import App
from aztask.errors import (
    EncodeError,
    ResultTimeout,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    UnknownTask,
    did_you_mean,
)
from aztask.operate.action import results_of
from aztask.operate.cli.failures import CommandFailed
from aztask.operate.cli.group import CliCommand
from aztask.operate.cli.options import Duration, JsonValue, app_option
from aztask.operate.cli.output import to_json
from aztask.operate.cli.target import app_spec, open_app
from aztask.support.display import MASK, printable
from aztask.taskoptions import SESSION_CHARACTERS, TASK_ID_CHARACTERS, SendOptions
from aztask.typed.conversion import as_plain


@click.command(
    "send",
    cls=CliCommand,
    extra="give the task's arguments as JSON, for example --args '[\"a.png\"]'",
)
@app_option
@click.argument("task")
@click.option(
    "--args", type=JsonValue(list), default="[]", help="Positional arguments, as a JSON list."
)
@click.option(
    "--kwargs", type=JsonValue(dict), default="{}", help="Keyword arguments, as a JSON object."
)
@click.option("--delay", type=Duration(), help="Start the task no earlier than after this time.")
@click.option("-q", "--queue", help="Send it to this queue. [default: the task's queue]")
@click.option("--priority", help="Send it with this priority of the queue. [default: the task's]")
@click.option("--task-id", help="Use your own id; if the id is already known, nothing is sent.")
@click.option(
    "--expires", type=Duration(least=0.001), help="Do not start the task once this time has passed."
)
@click.option(
    "--session", help="Run in order with this session's tasks; the queue must have sessions."
)
@click.option(
    "--force",
    is_flag=True,
    help="Send even if --task-id is already known: the task runs once more.",
)
@click.option(
    "--wait", is_flag=True, help="Wait until the task has ended, and print its value as JSON."
)
@click.option("--timeout", type=Duration(), help="Wait at most this long. [default: no limit]")
def command(
    task: str,
    args: list[Any],
    kwargs: dict[str, Any],
    wait: bool,
    timeout: float | None,
    **options: Any,
) -> None:
    """Send one invocation of TASK and print its id.

    With --wait, the id goes to stderr and only the value goes to stdout. Without -A, any name is
    accepted as TASK, and the message goes to --queue or to "default"; with --session, that queue
    is taken to have sessions.
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout needs --wait", click.get_current_context())
    given = {name: value for name, value in options.items() if value not in (None, False)}
    _check_texts(task, given)
    with open_app(creates=True) as app:
        if app_spec() is None and given.get("session"):
            app.queue(given.get("queue") or app.settings.default_queue, sessions=True)
        for line in app.overruled:
            click.echo(f"aztask: {line}", err=True)
        if wait:
            results_of(app)  # without results there is nothing to wait for: fail before the send
        _check_call(app, task, args, kwargs)
        try:
            result = app.send(task, args, kwargs, **SendOptions(**given))  # type: ignore[typeddict-item]  # names and types are those of the options above
        except EncodeError as error:
            raise click.UsageError(str(error)) from error
        click.echo(result.id, err=wait)
        if wait:
            known = app.tasks.get(task)
            secret = known is not None and known.conversion.secret_result
            _print_value(result.get, result.id, timeout, secret=secret)


def _check_texts(task: str, options: dict[str, Any]) -> None:
    """Refuse empty values, which mostly come from unset shell variables, and ids that no message
    can carry: wrong input of a command line, not a wrong configuration.
    """
    for name, value in (("TASK", task), *options.items()):
        if value == "":
            option = name if name == "TASK" else f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} is empty; is a shell variable unset?")
    for name, most in (("task_id", TASK_ID_CHARACTERS), ("session", SESSION_CHARACTERS)):
        value, option = options.get(name) or "", f"--{name.replace('_', '-')}"
        if not value.isprintable():
            raise click.UsageError(
                f"{option} {printable(value, 60)} holds characters that cannot be printed"
            )
        if len(value) > most:
            raise click.UsageError(f"{option} takes 1 to {most} characters, not {len(value)}")


def _check_call(app: App, task: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Check task and arguments if the app is known."""
    if app_spec() is None:
        return
    known = app.tasks.get(task)
    if known is None:
        hint = did_you_mean(task, list(app.tasks))
        raise UnknownTask(f"the app has no task {task!r}.{hint} See: aztask tasks")
    try:
        known.check_arguments(tuple(args), kwargs)
    except TypeError as error:
        raise click.UsageError(str(error)) from error


def _print_value(get: Any, task_id: str, timeout: float | None, *, secret: bool) -> None:
    try:
        value = as_plain(get(timeout=timeout))
        click.echo(MASK if secret else to_json(value))  # the whole value: programs read it
    except TaskFailed as error:
        raise CommandFailed(f"task {task_id} failed: {error}") from error
    except (TaskCancelled, TaskExpired, ResultTimeout) as error:
        raise CommandFailed(str(error)) from error
