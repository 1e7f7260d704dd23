"""``aztask steps``: a task's recorded steps, and going back. ``aztask signal``: signals to it."""

from __future__ import annotations

from typing import Any

import click

from aztask.operate import steps as operations
from aztask.operate.cli.group import CliCommand, CliGroup
from aztask.operate.cli.options import (
    JsonValue,
    Text,
    app_option,
    confirm,
    dry_run_option,
    json_option,
    yes_option,
)
from aztask.operate.cli.output import iso_time, local_time, print_json, print_table, to_json
from aztask.operate.cli.target import app_spec, open_app
from aztask.operate.stepcheck import check as checked
from aztask.operate.stepcheck import open_tasks
from aztask.operate.steps import ShownStep, reset, steps
from aztask.support.display import one_line, plural, visible

LONGEST = 80
"""Characters of a value in the table."""


@click.group("steps", cls=CliGroup, invoke_without_command=True)
@app_option
@click.option("--check", is_flag=True, help="Check that open tasks fit the code that is here.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=1_000, help="Check at most so many tasks."
)
@yes_option
@click.pass_context
def command(ctx: click.Context, check: bool, limit: int, yes: bool) -> None:
    """Show the recorded steps of a task, and go back to one of them.

    With --check, call open tasks with the code that is here, before you deploy it. Each is called
    in a child process without network, gets its recorded steps, and is ended at the first step
    that is not recorded: no function of a step runs. The lines between steps run. The exit code is
    1 if a task asks for other steps than it has recorded, or fails.
    """
    if check and ctx.invoked_subcommand is None:
        _check(ctx, limit, yes=yes)
    elif check:
        raise click.UsageError("--check takes no command: aztask steps --check")
    elif ctx.invoked_subcommand is None:
        raise click.UsageError("name a command, such as aztask steps show ID, or give --check")


def _check(ctx: click.Context, limit: int, *, yes: bool) -> None:
    with open_app(required="aztask steps --check", reads=True) as app:
        tasks = open_tasks(app, limit)
    count = sum(bool(each.call) for each in tasks)
    what = f"run the lines between the steps of {plural(count, 'open task')} here"
    if count and not confirm(f"{what}, in a process without network", dry_run=False, yes=yes):
        return
    found = list(checked(app_spec() or "", tasks))
    print_table(
        ["id", "task", "end", "what"],
        [
            [visible(each.task_id), visible(each.task), each.end, one_line(each.text, LONGEST)]
            for each in sorted(found, key=lambda each: not each.bad)
        ],
    )
    if any(each.bad for each in found):
        ctx.exit(1)


@command.command("show")
@app_option
@click.argument("task_id", type=Text(), metavar="ID")
@json_option
def show(task_id: str, as_json: bool) -> None:
    """Show the recorded steps of a task, in the order in which they were recorded.

    A history begins with the first run; a forced send and a fresh replay begin a new one.
    """
    with open_app(reads=True) as app:
        found = steps(app, task_id)
    if as_json:
        for each in found:
            print_json(_described(each))
        return
    several = len({each.history for each in found}) > 1
    print_table(
        [*(["history"] if several else []), "step", "branch", "state", "at", "failures", "value"],
        [[*([each.history] if several else []), *_row(each)] for each in found],
    )


def _row(found: ShownStep) -> list[object]:
    record = found.record
    value = found.problem or ("" if found.value is None else to_json(found.value))
    return [
        visible(record.label),
        record.branch,
        record.state,
        local_time(record.at),
        record.attempts or "",
        one_line(value, LONGEST),
    ]


def _described(found: ShownStep) -> dict[str, object]:
    record = found.record
    return {
        "history": found.history,
        "kind": record.kind,
        "step": record.label,
        "branch": record.branch,
        "state": record.state,
        "at": iso_time(record.at),
        "due": iso_time(record.due) if record.due else None,
        "failures": record.attempts,
        "value": found.value,
        "problem": found.problem,
    }


@command.command("reset")
@app_option
@click.argument("task_id", type=Text(), metavar="ID")
@click.option(
    "--from",
    "first",
    type=Text(),
    required=True,
    metavar="STEP",
    help="Forget this step and those after it.",
)
@dry_run_option
@yes_option
def reset_(task_id: str, first: str, dry_run: bool, yes: bool) -> None:
    """Go back: forget a step, and all that were recorded after it.

    The next run of the task runs them again, with the same step keys: a service that knows a key
    may answer as before. STEP: as show prints it, such as "ship" or "ship #2". This does not start
    the task; if it is a dead letter, replay that afterwards.
    """
    with open_app() as app:
        action = reset(app, task_id, first)
        if not confirm(str(action), dry_run=dry_run, yes=yes):
            return
        action.act()
        click.echo(f"forgot {plural(action.done, 'step')}; replay it: aztask dlq replay {task_id}")


@click.command(
    "signal", cls=CliCommand, extra='give the value as JSON, for example \'{"by": "ann"}\''
)
@app_option
@click.argument("task_id", type=Text(), metavar="ID")
@click.argument("name", type=Text())
@click.argument("value", type=JsonValue(object), default="null")
def signal(task_id: str, name: str, value: Any) -> None:
    """Send the signal NAME with a value to a task that waits for it.

    VALUE is JSON, null by default. A task that waits for the signal, with context.wait_for, goes on
    with the value. One that has not asked for it yet gets it when it asks: signals of one name are
    taken in the order in which they were sent.
    """
    with open_app() as app:
        operations.signal(app, task_id, name, value).act()
        click.echo(f"sent {visible(name)} to task {visible(task_id)}")
