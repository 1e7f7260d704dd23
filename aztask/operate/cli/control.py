"""``aztask control`` and ``aztask limits``: pause, drain, scale; limits, their use and changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import click

from aztask.app import App
from aztask.operate.action import results_of
from aztask.operate.cli.failures import CommandFailed
from aztask.operate.cli.group import CliGroup
from aztask.operate.cli.options import Duration, NameList, Text, all_names, app_option, json_option
from aztask.operate.cli.output import ago, iso_time, print_json, print_table
from aztask.operate.cli.target import NAMELESS, open_app
from aztask.operate.controls import (
    MOST,
    ControlState,
    LimitChange,
    LimitShown,
    Names,
    OpenBreaker,
    Pause,
    Scale,
    Scope,
    change_limit,
    controls,
    pause,
    resume,
    resume_all,
    scale,
)
from aztask.operate.controls import (
    limits as limits_of,
)
from aztask.operate.draining import permits_of, wait_until_idle
from aztask.support.display import printable, visible
from aztask.support.durations import span

Command = TypeVar("Command", bound=Callable[..., Any])
Lists = tuple[tuple[str, ...], ...]

OBEYED: Final = "workers obey within 5 seconds"
RESET: Final = 0


class Concurrency(click.ParamType[int]):
    """A concurrency, or ``reset``, which is `RESET`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; fails with a usage error."""
        text = str(value)
        if text == "reset":
            return RESET
        if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= MOST):
            self.fail(
                f"{printable(text, 40)} is not a concurrency; write a number from 1 to {MOST}, or "
                "reset. To stop tasks, use aztask control pause",
                param,
                ctx,
            )
        return int(text)


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


@click.group("control", cls=CliGroup, invoke_without_command=True)
@app_option
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Pause and drain queues and tasks, scale workers, change limits, while they run.

    Without a command, it lists what is paused, scaled and changed, as list does.
    """
    if ctx.invoked_subcommand is None:
        _print_pauses(as_json=as_json)
    elif as_json:
        raise click.UsageError("--json belongs after the command: aztask control list --json")


@command.command("list")
@app_option
@json_option
def list_(as_json: bool) -> None:
    """List what is paused, scaled, changed or stopped by a circuit breaker, and by whom."""
    _print_pauses(as_json=as_json)


@command.command("pause")
@app_option
@selection
def pause_(queues: Lists, tasks: Lists, tenants: tuple[str, ...]) -> None:
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
def resume_(queues: Lists, tasks: Lists, tenants: tuple[str, ...], everything: bool) -> None:
    """Resume queues, tasks and tenants.

    Messages of a task or tenant that was paused come back when their delay has ended: after at most
    a quarter of the time that it was paused, and at most 10 minutes. The circuit breaker of a task
    is closed, too.
    """
    if everything == bool(queues or tasks or tenants):
        raise click.UsageError(
            "name what to resume with --queue, --task or --tenant, or give --all"
        )
    chosen = None if everything else _chosen(queues, tasks, tenants)
    with open_app() as app:
        changed = (resume_all(app) if chosen is None else resume(app, chosen)).act()
    if chosen is not None:
        done = {(Scope.TASK, each.task) for each in changed.breakers}
        _print_others(chosen, changed.pauses, "is not paused", done)
    for each in changed.pauses:
        click.echo(f"{visible(str(each))} is resumed")
    for row in changed.breakers:
        click.echo(f"the circuit breaker of task {visible(row.task)} is closed")
    if everything and not changed.pauses and not changed.breakers:
        click.echo("nothing is paused")


@command.command("scale")
@app_option
@click.argument("size", type=Concurrency(), metavar="N|reset")
@click.option(
    "--worker", "workers", type=Text(), multiple=True, help="Scale this worker; repeatable."
)
@click.option(
    *("-Q", "--queue", "queues"),
    type=NameList(),
    multiple=True,
    help="Scale the workers of these queues: a,b or -Q a -Q b.",
)
def scale_(size: int, workers: tuple[str, ...], queues: Lists) -> None:
    """Let workers run N tasks at the same time, instead of their --concurrency.

    Without --worker or --queue it applies to all workers, those that start later too, until it is
    reset. Every worker obeys within 5 seconds; tasks that run go on. What is said of a worker
    comes before what is said of its queues, and that before what is said of all.

    reset ends this: for the given workers and queues, or without them for all.
    """
    with open_app() as app:
        wanted = None if size == RESET else size
        changed = scale(app, wanted, workers, all_names(queues)).act()
    what = "--concurrency applies again" if wanted is None else f"{size} tasks at the same time"
    for each in changed:
        click.echo(f"{visible(str(each))}: {what}; {OBEYED}")
    if not changed:
        click.echo("nothing is scaled there" if workers or queues else "nothing is scaled")


@command.command("limit")
@app_option
@click.argument("name", type=Text())
@click.option("--rate", type=Text(), help='Starts per time, for example "10/s" or "600/m".')
@click.option("--burst", type=int, help="How many of them may come at once.")
@click.option("--concurrency", type=int, help="How many tasks run at the same time.")
@click.option("--reset", is_flag=True, help="Use the numbers of the declaration again.")
def limit_(
    name: str, rate: str | None, burst: int | None, concurrency: int | None, reset: bool
) -> None:
    """Change the numbers of limit NAME for all workers, until they are reset.

    What is not given stays as the app declares it; with a cost, a burst that it does not declare is
    what the rate counts. Workers that start later obey too, and a deploy with other numbers changes
    nothing. The slots that tasks hold already are kept. A call whose cost is above a smaller
    --burst waits for a full burst. --reset also ends a change of a limit that the app no longer
    declares.
    """
    numbers = (rate, burst, concurrency)
    if reset == any(each is not None for each in numbers):
        raise click.UsageError("give --rate, --burst or --concurrency, or else --reset")
    with open_app(required="aztask control limit") as app:
        changed = change_limit(app, name, rate=rate, burst=burst, concurrency=concurrency).act()
    for each in changed:
        what = each.numbers or "the numbers of its declaration apply again"
        click.echo(f"{visible(str(each))}: {what}; {OBEYED}")
    if not changed:
        click.echo(f"limit {visible(name)} is not changed")


@command.command("drain")
@app_option
@selection
@click.option(
    "--timeout",
    type=Duration(least=1.0),
    default="10m",
    help="Give up waiting after this time; the pause stays.",
)
def drain(queues: Lists, tasks: Lists, tenants: tuple[str, ...], timeout: float) -> None:
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
        left = wait_until_idle(results_of(app), set(chosen.each()), timeout, permits)
    if left:
        raise CommandFailed(f"still running after {timeout:g} s: {left}")
    click.echo("no worker runs these tasks")


def _pause(app: App, chosen: Names) -> None:
    action = pause(app, chosen, checked=app.name != NAMELESS)
    for name in action.unknown:
        click.echo(f"aztask: the app registers no task {visible(name)}", err=True)
    new = action.act()
    for each in new:
        click.echo(f"{visible(str(each))} is paused; {OBEYED}")
    _print_others(chosen, new, "is paused already")


def _print_others(
    chosen: Names,
    changed: Sequence[Pause],
    what: str,
    others: Iterable[tuple[Scope, str]] = (),
) -> None:
    """Say of each chosen name that did not change why. others: names that changed, too."""
    done = {*others, *((each.scope, each.name) for each in changed)}
    for scope, name in chosen.each():
        if (scope, name) not in done:
            click.echo(f"{scope.value} {visible(name)} {what}")


def _chosen(queues: Lists, tasks: Lists, tenants: tuple[str, ...]) -> Names:
    """The names. Raises a usage error if there is none."""
    chosen = Names(all_names(queues), all_names(tasks), tuple(dict.fromkeys(tenants)))
    if not chosen.each():
        raise click.UsageError("name what it applies to with --queue, --task or --tenant")
    for tenant in tenants:
        limit, equals, key = tenant.partition("=")
        if not (limit and equals and key):
            raise click.UsageError(
                f"--tenant {printable(tenant, 60)} is not LIMIT=KEY, for example customer=acme"
            )
    return chosen


def _print_pauses(*, as_json: bool) -> None:
    with open_app(reads=True) as app:
        found = controls(app)
    if as_json:
        for each in found.pauses:
            record: dict[str, object] = {"scope": each.scope.value, "name": each.name}
            record |= {"paused_at": iso_time(each.at), "by": each.by}
            every = (each.scope, each.name) in found.unowned.pauses
            print_json({**record, "every_broker": every})
        for app_name, row in found.breakers:
            print_json(_breaker_record(row, app_name))
        for scaled in found.scales:
            print_json(_scale_record(scaled))
        for change in found.limits:
            print_json(_change_record(change))
        return
    now = time.time()
    rows = [[each.scope.value, each.name, ago(each.at, now), each.by] for each in found.pauses]
    rows += [
        ["breaker", row.task, ago(row.at, now), f"{row.by}: {row.why}"] for _, row in found.breakers
    ]
    print_table(["what", "name", "paused", "by"], rows)
    if found.scales:
        click.echo()
        rows = [[str(each), str(each.size), ago(each.at, now), each.by] for each in found.scales]
        print_table(["scaled", "concurrency", "since", "by"], rows)
    if found.limits:
        click.echo()
        rows = [
            [each.limit, each.app, each.numbers, ago(each.at, now), each.by]
            for each in found.limits
        ]
        print_table(["limit", "app", "changed to", "since", "by"], rows)
    if found.unowned:
        click.echo(f"aztask: {_for_every_broker(found.unowned)}", err=True)


def _for_every_broker(unowned: ControlState) -> str:
    names = [*map(str, unowned.listed()), *map(str, unowned.scales.values())]
    return (
        f"a release before 0.2 set these for every broker of the result store: "
        f"{visible(', '.join(names))}; set or resume them again here, and they are yours alone"
    )


def _scale_record(scaled: Scale) -> dict[str, object]:
    return {
        "scale": scaled.reach.value,
        "name": scaled.name,
        "concurrency": scaled.size,
        "scaled_at": iso_time(scaled.at),
        "by": scaled.by,
    }


def _change_record(change: LimitChange) -> dict[str, object]:
    rate = {"count": change.count, "period_seconds": change.period}
    return {
        "limit": change.limit,
        "app": change.app or None,
        "rate": None if change.count is None else rate,
        "burst": change.burst,
        "concurrency": change.concurrency,
        "changed_at": iso_time(change.at),
        "by": change.by,
    }


def _breaker_record(row: OpenBreaker, app_name: str) -> dict[str, object]:
    return {
        "scope": "breaker",
        "name": row.task,
        "app": app_name or None,
        "paused_at": iso_time(row.at),
        "by": row.by,
        "reason": row.why,
        "next_probe_at": iso_time(row.until),
        "failed_probes": row.failures,
    }


# -- limits ----------------------------------------------------------------------------------


@click.command("limits")
@app_option
@click.argument("name", required=False, type=Text())
@click.option("--key", type=Text(), help="Show the limit NAME for this key.")
@json_option
def limits(name: str | None, key: str | None, as_json: bool) -> None:
    """List the limits of the app, and how far each one is used.

    cost: "each" if tasks use more or less of the rate than one. wait: how long a task that arrives
    now waits for its slot; with a cost, one of cost 1. running: how many permits workers
    hold. A limit with a key has these for each key: give NAME and --key.
    """
    if key is not None and name is None:
        raise click.UsageError("--key belongs to a limit: aztask limits NAME --key KEY")
    with open_app(required="aztask limits") as app:
        declared = app.limits.get(name) if name is not None else None
        if key is not None and declared is not None and declared.key is None:
            raise click.UsageError(f"limit {name!r} has no key")
        found = limits_of(app, name, key)
    if as_json:
        for each in found:
            print_json(_limit_record(each, key))
        return
    print_table(
        ["limit", "rate", "burst", "cost", "wait", "running", "most"],
        [_limit_row(each) for each in found],
    )
    for each in found:
        if each.usage is not None and each.usage.damage:
            line = f"aztask: limit {visible(each.limit.name)}: {each.usage.damage}"
            click.echo(line, err=True)
        if each.change is not None:
            line = f"{visible(str(each.change))} was changed to {each.change.numbers}"
            click.echo(f"aztask: {line}, by {visible(each.change.by)}", err=True)


def _limit_row(shown: LimitShown) -> list[object]:
    limit, usage = shown.limit, shown.usage
    rate = limit.rate
    wait = None if usage is None or usage.wait_seconds is None else span(usage.wait_seconds)
    held = None if usage is None or usage.held is None else sum(usage.held.values())
    return [
        limit.name,
        None if rate is None else f"{rate.count}/{rate.period:g}s",
        None if rate is None else rate.burst,
        None if rate is None else 1 if limit.cost is None else "each",
        "for each key" if usage is None else wait,
        held,
        limit.concurrency,
    ]


def _limit_record(shown: LimitShown, key: str | None) -> dict[str, object]:
    limit, usage = shown.limit, shown.usage
    rate = limit.rate
    return {
        "limit": limit.name,
        "keyed": limit.key is not None,
        "key": key,
        "rate": None if rate is None else {"count": rate.count, "period_seconds": rate.period},
        "burst": None if rate is None else rate.burst,
        "weighed": limit.cost is not None,
        "concurrency": limit.concurrency,
        "changed_by": None if shown.change is None else shown.change.by,
        "wait_seconds": None if usage is None else usage.wait_seconds,
        "held": None if usage is None else usage.held,
        "damage": None if usage is None else usage.damage or None,
    }
