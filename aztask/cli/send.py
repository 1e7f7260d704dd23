"""``aztask send TASK``: one invocation, by name."""

from __future__ import annotations

from typing import Any

import click

from aztask.app import App
from aztask.cli.failures import CommandFailed
from aztask.cli.options import Duration, JsonValue, app_option
from aztask.cli.output import print_json
from aztask.cli.target import app_spec, open_app, results_of
from aztask.errors import (
    EncodeError,
    ResultTimeout,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    UnknownTask,
    did_you_mean,
)
from aztask.task import SendOptions


@click.command("send")
@app_option
@click.argument("task")
@click.option(
    "--args", type=JsonValue(list), default="[]", help="Positional arguments, a JSON list."
)
@click.option(
    "--kwargs", type=JsonValue(dict), default="{}", help="Keyword arguments, a JSON object."
)
@click.option("--delay", type=Duration(), help="Time until it may start.")
@click.option("-q", "--queue", help="Where to send it. [default: the task's queue]")
@click.option("--task-id", help="An id of your own; one that is known already is not sent again.")
@click.option(
    "--expires", type=Duration(least=0.001), help="Time after which it is not started any more."
)
@click.option("--session", help="Tasks of one session run in order; the queue must have sessions.")
@click.option("--force", is_flag=True, help="Send a known --task-id again, to run once more.")
@click.option("--wait", is_flag=True, help="Wait for the end, and print the value as JSON.")
@click.option("--timeout", type=Duration(), help="With --wait: how long. [default: no limit]")
def command(
    task: str,
    args: list[Any],
    kwargs: dict[str, Any],
    wait: bool,
    timeout: float | None,
    **options: Any,
) -> None:
    """Send one invocation of TASK and print its id.

    With --wait the id goes to stderr, and stdout gets the value alone. Without -A, TASK need not be
    known here: the message goes to --queue, or to "default"; with --session that has sessions.
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout goes with --wait", click.get_current_context())
    given = {name: value for name, value in options.items() if value not in (None, False)}
    _check_texts(task, given)
    with open_app(creates=True) as app:
        if app_spec() is None and given.get("session"):
            app.queue(given.get("queue") or app.settings.default_queue, sessions=True)
        if wait:
            results_of(app)  # say now that there is nothing to wait for, not after the send
        _check_call(app, task, args, kwargs)
        try:
            result = app.send(task, args, kwargs, **SendOptions(**given))  # type: ignore[typeddict-item]  # names and types are those of the options above
        except EncodeError as error:
            raise click.UsageError(str(error)) from error
        click.echo(result.id, err=wait)
        if wait:
            _print_value(result.get, result.id, timeout)


def _check_texts(task: str, options: dict[str, Any]) -> None:
    """What is empty was meant to be something: an unset shell variable, mostly."""
    for name, value in (("TASK", task), *options.items()):
        if value == "":
            raise click.UsageError(f"{name.replace('_', '-')} is empty")


def _check_call(app: App, task: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Where the app is known, so are its tasks and what they take."""
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


def _print_value(get: Any, task_id: str, timeout: float | None) -> None:
    try:
        print_json(get(timeout=timeout))
    except TaskFailed as error:
        raise CommandFailed(f"task {task_id} failed: {error}") from error
    except (TaskCancelled, TaskExpired, ResultTimeout) as error:
        raise CommandFailed(str(error)) from error
