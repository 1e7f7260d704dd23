"""``aztask control``: pause and resume queues and tasks for all workers, and drain them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from aztask.app import App
from aztask.cli.control_scale import OBEYED, control_store, controls_in, scale
from aztask.cli.draining import keyed_limit, permits_of, wait_until_idle
from aztask.cli.failures import CommandFailed
from aztask.cli.group import Group
from aztask.cli.options import Duration, NameList, Text, all_names, app_option, json_option
from aztask.cli.output import ago, iso_time, print_json, print_table
from aztask.cli.target import NAMELESS, open_app, results_of
from aztask.limits.breakers import Breakers, OpenBreaker
from aztask.limits.control import Controls, Pause, Scope
from aztask.limits.scale import Scale
from aztask.support.display import visible
from aztask.support.masking import printable

Command = TypeVar("Command", bound=Callable[..., Any])
Names = tuple[tuple[str, ...], ...]


def selection(command: Command) -> Command:
    """Add ``--queue``, ``--task`` and ``--tenant``, which say what the command applies to."""
    tenants: Callable[[Command], Command] = click.option(
        "--tenant",
        "tenants",
        type=Text(),
        multiple=True,
        metavar="LIMIT=KEY",
        help="Apply to the tasks of this key of a limit; repeatable.",
    )
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
    return queues(tasks(tenants(command)))


@click.group("control", cls=Group, invoke_without_command=True)
@app_option
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Pause and drain queues, tasks and tenants, and scale workers, while they run.

    Without a command, it lists what is paused and scaled, as list does.
    """
    if ctx.invoked_subcommand is None:
        _print_pauses(as_json=as_json)
    elif as_json:
        raise click.UsageError("--json belongs after the command: aztask control list --json")


@command.command("list")
@app_option
@json_option
def list_(as_json: bool) -> None:
    """List what is paused, scaled or stopped by a circuit breaker, since when and by whom."""
    _print_pauses(as_json=as_json)


@command.command("pause")
@app_option
@selection
def pause(queues: Names, tasks: Names, tenants: tuple[str, ...]) -> None:
    """Pause queues, tasks and tenants until they are resumed, over restarts too.

    Every worker obeys within 5 seconds, and new workers obey before they receive anything. Tasks
    that run go on. From a paused queue, nothing is received. A message of a paused task is put off:
    it waits in its queue, for 5 seconds at first and then longer and longer, but at most for a
    quarter of the time that the task has been paused, and for 10 minutes.

    A tenant is a key of a limit that the app declares with key=: its tasks are put off likewise.
    """
    chosen = _chosen(queues, tasks, tenants)
    with open_app() as app:
        _pause(app, chosen)


@command.command("resume")
@app_option
@selection
@click.option("--all", "everything", is_flag=True, help="Resume everything that is paused.")
def resume(queues: Names, tasks: Names, tenants: tuple[str, ...], everything: bool) -> None:
    """Resume queues, tasks and tenants.

    Messages of a task or tenant that was paused come back when their delay has ended: after at most
    a quarter of the time that it was paused, and at most 10 minutes. The circuit breaker of a task
    is closed, too.
    """
    if everything == bool(queues or tasks or tenants):
        raise click.UsageError(
            "name what to resume with --queue, --task or --tenant, or give --all"
        )
    with open_app() as app:
        store = control_store(app)
        controls, breakers = Controls(store), Breakers(store)
        closed: list[OpenBreaker] = []
        if everything:
            ended = controls.resume_all()
            closed = breakers.close_all()
        else:
            chosen = _chosen(queues, tasks, tenants)
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


command.add_command(scale)


@command.command("drain")
@app_option
@selection
@click.option(
    "--timeout",
    type=Duration(least=1.0),
    default="10m",
    help="Give up waiting after this time; the pause stays.",
)
def drain(queues: Names, tasks: Names, tenants: tuple[str, ...], timeout: float) -> None:
    """Pause queues, tasks and tenants, and wait until no worker runs one of their tasks.

    Exit code 1 means that some still ran after --timeout. The pause stays in both cases: end it
    with aztask control resume.

    Silent workers are not waited for: if one still lives, it stops its tasks itself when their
    leases end.

    For a tenant, its limit must have a concurrency: its permits show what runs.
    """
    chosen = _chosen(queues, tasks, tenants)
    with open_app() as app:
        permits = [permits_of(app, name) for name in tenants]
        _pause(app, chosen)
        names = {(scope, name) for scope, group in chosen for name in group}
        left = wait_until_idle(results_of(app), names, timeout, permits)
    if left:
        raise CommandFailed(f"still running after {timeout:g} s: {left}")
    click.echo("no worker runs these tasks")


def _pause(app: App, chosen: list[tuple[Scope, tuple[str, ...]]]) -> None:
    controls = controls_in(app)
    for name in (name for scope, group in chosen if scope is Scope.TASK for name in group):
        if app.name != NAMELESS and name not in app.tasks:
            click.echo(f"aztask: the app registers no task {visible(name)}", err=True)
    for name in (name for scope, group in chosen if scope is Scope.TENANT for name in group):
        if app.name != NAMELESS:
            keyed_limit(app, name)
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


def _chosen(
    queues: Names, tasks: Names, tenants: tuple[str, ...]
) -> list[tuple[Scope, tuple[str, ...]]]:
    """The names by scope. Raises a usage error if there is none."""
    found = [
        (Scope.QUEUE, all_names(queues)),
        (Scope.TASK, all_names(tasks)),
        (Scope.TENANT, tuple(dict.fromkeys(tenants))),
    ]
    if not any(names for _, names in found):
        raise click.UsageError("name what it applies to with --queue, --task or --tenant")
    for tenant in tenants:
        limit, equals, key = tenant.partition("=")
        if not (limit and equals and key):
            raise click.UsageError(
                f"--tenant {printable(tenant, 60)} is not LIMIT=KEY, for example customer=acme"
            )
    return [(scope, names) for scope, names in found if names]


def _print_pauses(*, as_json: bool) -> None:
    with open_app(reads=True) as app:
        store = control_store(app)
        state = Controls(store).read()
        breakers = list(Breakers(store).read().values())
    pauses, scales = state.listed(), sorted(state.scales.values(), key=lambda each: each.at)
    if as_json:
        for each in pauses:
            record = {"scope": each.scope.value, "name": each.name}
            print_json({**record, "paused_at": iso_time(each.at), "by": each.by})
        for row in breakers:
            print_json(_breaker_record(row))
        for scaled in scales:
            print_json(_scale_record(scaled))
        return
    now = time.time()
    rows = [[each.scope.value, each.name, ago(each.at, now), each.by] for each in pauses]
    rows += [["breaker", row.task, ago(row.at, now), f"{row.by}: {row.why}"] for row in breakers]
    print_table(["what", "name", "paused", "by"], rows)
    if scales:
        click.echo()
        rows = [[str(each), str(each.size), ago(each.at, now), each.by] for each in scales]
        print_table(["scaled", "concurrency", "since", "by"], rows)


def _scale_record(scaled: Scale) -> dict[str, object]:
    return {
        "scale": scaled.reach.value,
        "name": scaled.name,
        "concurrency": scaled.size,
        "scaled_at": iso_time(scaled.at),
        "by": scaled.by,
    }


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
