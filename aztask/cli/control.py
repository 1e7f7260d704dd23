"""``aztask control``: pause and resume queues and tasks for all workers, and drain them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from aztask.app import App
from aztask.cli.draining import wait_until_idle
from aztask.cli.failures import CommandFailed
from aztask.cli.group import Group
from aztask.cli.options import Duration, NameList, all_names, app_option, json_option
from aztask.cli.output import ago, iso_time, print_json, print_table
from aztask.cli.target import NAMELESS, open_app, results_of
from aztask.errors import ConfigurationError
from aztask.limits.breakers import Breakers, OpenBreaker
from aztask.limits.control import Controls, Pause, Scope
from aztask.results.controls import ControlStore, controls_of
from aztask.support.display import visible

Command = TypeVar("Command", bound=Callable[..., Any])
Names = tuple[tuple[str, ...], ...]

OBEYED = "workers obey within 5 seconds"


def selection(command: Command) -> Command:
    """Add ``--queue`` and ``--task``, which say what the command applies to."""
    queues: Callable[[Command], Command] = click.option(
        *("-Q", "--queue", "queues"),
        type=NameList(),
        multiple=True,
        help="Apply to these queues: a,b or -Q a -Q b.",
    )
    tasks: Callable[[Command], Command] = click.option(
        *("-t", "--task", "tasks"),
        type=NameList(),
        multiple=True,
        help="Apply to these tasks, by their registered names.",
    )
    return queues(tasks(command))


@click.group("control", cls=Group, invoke_without_command=True)
@app_option
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Pause, resume and drain queues and tasks, for all workers.

    Without a command, it lists what is paused, as list does.
    """
    if ctx.invoked_subcommand is None:
        _print_pauses(as_json=as_json)
    elif as_json:
        raise click.UsageError("--json belongs after the command: aztask control list --json")


@command.command("list")
@app_option
@json_option
def list_(as_json: bool) -> None:
    """List what is paused, since when and by whom, and which circuit breakers are open."""
    _print_pauses(as_json=as_json)


@command.command("pause")
@app_option
@selection
def pause(queues: Names, tasks: Names) -> None:
    """Pause queues and tasks until they are resumed, over restarts too.

    Every worker obeys within 5 seconds, and new workers obey before they receive anything. Tasks
    that run go on. From a paused queue, nothing is received. A message of a paused task is put off:
    it waits in its queue, for 5 seconds at first and each time twice as long, at most 10 minutes.
    """
    chosen = _chosen(queues, tasks)
    with open_app() as app:
        _pause(app, chosen)


@command.command("resume")
@app_option
@selection
@click.option("--all", "everything", is_flag=True, help="Resume everything that is paused.")
def resume(queues: Names, tasks: Names, everything: bool) -> None:
    """Resume queues and tasks.

    Messages of a task that was paused come back when their delay has ended: after at most 10
    minutes. The circuit breaker of a task is closed, too.
    """
    if everything == bool(queues or tasks):
        raise click.UsageError("name what to resume with --queue or --task, or give --all")
    with open_app() as app:
        store = _store(app)
        controls, breakers = Controls(store), Breakers(store)
        closed: list[OpenBreaker] = []
        if everything:
            ended = controls.resume_all()
            closed = breakers.close_all()
        else:
            chosen = _chosen(queues, tasks)
            ended = [each for scope, names in chosen for each in controls.resume(scope, names)]
            closed = breakers.close(all_names(tasks))
            done = {(Scope.TASK, each.task) for each in closed}
            _print_others(chosen, ended, "is not paused", done)
        for each in ended:
            click.echo(f"{visible(str(each))} is resumed")
        for row in closed:
            click.echo(f"the circuit breaker of task {visible(row.task)} is closed")
        if everything and not ended and not closed:
            click.echo("nothing is paused")


@command.command("drain")
@app_option
@selection
@click.option(
    "--timeout",
    type=Duration(least=1.0),
    default="10m",
    help="Give up waiting after this time; the pause stays.",
)
def drain(queues: Names, tasks: Names, timeout: float) -> None:
    """Pause queues and tasks, and wait until no worker runs one of their tasks.

    Exit code 1 means that some still ran after --timeout. The pause stays in both cases: end it
    with aztask control resume.

    Silent workers are not waited for: if one still lives, it stops its tasks itself when their
    leases end.
    """
    chosen = _chosen(queues, tasks)
    with open_app() as app:
        _pause(app, chosen)
        names = {(scope, name) for scope, group in chosen for name in group}
        left = wait_until_idle(results_of(app), names, timeout)
    if left:
        raise CommandFailed(f"still running after {timeout:g} s: {left}")
    click.echo("no worker runs these tasks")


def _pause(app: App, chosen: list[tuple[Scope, tuple[str, ...]]]) -> None:
    controls = Controls(_store(app))
    for name in (name for scope, group in chosen if scope is Scope.TASK for name in group):
        if app.name != NAMELESS and name not in app.tasks:
            click.echo(f"aztask: the app registers no task {visible(name)}", err=True)
    at = time.time()
    new = [each for scope, names in chosen for each in controls.pause(scope, names, at)]
    for each in new:
        click.echo(f"{visible(str(each))} is paused; {OBEYED}")
    _print_others(chosen, new, "is paused already")


def _print_others(
    chosen: list[tuple[Scope, tuple[str, ...]]],
    changed: list[Pause],
    what: str,
    others: Iterable[tuple[Scope, str]] = (),
) -> None:
    """Say of each chosen name that did not change why. others: names that changed, too."""
    done = {*others, *((each.scope, each.name) for each in changed)}
    for scope, names in chosen:
        for name in names:
            if (scope, name) not in done:
                click.echo(f"{scope.value} {visible(name)} {what}")


def _chosen(queues: Names, tasks: Names) -> list[tuple[Scope, tuple[str, ...]]]:
    """The names by scope. Raises a usage error if there is none."""
    found = [(Scope.QUEUE, all_names(queues)), (Scope.TASK, all_names(tasks))]
    if not any(names for _, names in found):
        raise click.UsageError("name what it applies to with --queue or --task")
    return [(scope, names) for scope, names in found if names]


def _store(app: App) -> ControlStore:
    """The control entries of the app's result store. Raises ConfigurationError if it has none."""
    store = controls_of(results_of(app))
    if store is None:
        raise ConfigurationError("this result store cannot keep pauses; use local:// or tables://")
    return store


def _print_pauses(*, as_json: bool) -> None:
    with open_app(reads=True) as app:
        store = _store(app)
        pauses = Controls(store).read().listed()
        breakers = list(Breakers(store).read().values())
    if as_json:
        for each in pauses:
            record = {"scope": each.scope.value, "name": each.name}
            print_json({**record, "paused_at": iso_time(each.at), "by": each.by})
        for row in breakers:
            print_json(_breaker_record(row))
        return
    now = time.time()
    rows = [[each.scope.value, each.name, ago(each.at, now), each.by] for each in pauses]
    rows += [["breaker", row.task, ago(row.at, now), f"{row.by}: {row.why}"] for row in breakers]
    print_table(["what", "name", "paused", "by"], rows)


def _breaker_record(row: OpenBreaker) -> dict[str, object]:
    return {
        "scope": "breaker",
        "name": row.task,
        "paused_at": iso_time(row.at),
        "by": row.by,
        "reason": row.why,
        "next_probe_at": iso_time(row.until),
        "failed_probes": row.failures,
    }
