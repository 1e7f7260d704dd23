"""``aztask tasks``: list the tasks that an app registers."""

from __future__ import annotations

from inspect import Parameter
from typing import Any

import click

from aztask.app import App
from aztask.cli.options import app_option, json_option
from aztask.cli.output import print_json, print_table
from aztask.cli.target import open_app
from aztask.task import Task


@click.command("tasks")
@app_option
@json_option
def command(as_json: bool) -> None:
    """List the tasks that the app registers."""
    with open_app(required="aztask tasks") as app:
        found = [app.tasks[name] for name in sorted(app.tasks)]
        if as_json:
            for task in found:
                print_json(_described(app, task))
            return
        print_table(
            ["task", "queue", "retries", "time limit", "about"],
            [
                [
                    f"{task.name}{_signature(task)}",
                    _queue(app, task),
                    task.retry.max_retries,
                    f"{task.time_limit:g} s" if task.time_limit else None,
                    _about(task),
                ]
                for task in found
            ],
        )


def _described(app: App, task: Task[..., Any]) -> dict[str, Any]:
    return {
        "task": task.name,
        "signature": _signature(task),
        "queue": _queue(app, task),
        "max_retries": task.retry.max_retries,
        "retry_strategy": task.retry_strategy,
        "time_limit_seconds": task.time_limit,
        "soft_time_limit_seconds": task.soft_time_limit,
        "lease_seconds": task.lease,
        "max_lease_seconds": task.max_lease,
        "expires_seconds": task.expires,
        "delivery": task.delivery,
        "about": _about(task),
    }


def _signature(task: Task[..., Any]) -> str:
    """The parameters that a caller gives: without the context, which the worker gives."""
    parameters = list(task.signature.parameters.values())
    if task.with_context and parameters and parameters[0].kind is not Parameter.VAR_POSITIONAL:
        del parameters[0]
    return str(task.signature.replace(parameters=parameters))


def _queue(app: App, task: Task[..., Any]) -> str:
    return app.queue_for(task, {})


def _about(task: Task[..., Any]) -> str | None:
    lines = (task.__doc__ or "").strip().splitlines()
    return lines[0] if lines else None
