"""``aztask schedule``: list and show schedules, pause, resume, trigger and backfill them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import click

from aztask.app import App
from aztask.operate.cli.group import CliGroup
from aztask.operate.cli.options import Moment, Text, app_option, json_option
from aztask.operate.cli.output import iso_time, print_json, print_table
from aztask.operate.cli.target import app_spec, open_app
from aztask.operate.schedules import (
    MOST_AT_ONCE,
    EndBeforeStart,
    Made,
    NextTime,
    ScheduleShown,
    SetAside,
    SeveralOwners,
    backfill,
    pause,
    resume,
    schedule,
    schedules,
    trigger,
)
from aztask.support.display import visible

Command = Callable[..., None]


@click.group("schedule", cls=CliGroup)
@app_option
def command() -> None:
    """List, show, pause, resume, trigger and backfill schedules."""


@command.command("list")
@app_option
@json_option
def list_(as_json: bool) -> None:
    """List all schedules with their next time.

    A schedule in the state new is declared in the app, and no worker has started it yet. Schedules
    of other apps and brokers that share the result store are listed with their owner. Below the
    table: schedules that a worker has put aside, and why.
    """
    with open_app(celery=True) as app:
        listed, aside = schedules(app)
    if as_json:
        for found in listed:
            more = {"owner": found.owner, "failing": _failing(found.aside)}
            print_json({**_described(found), **more})
        return
    rows = [_row(found) for found in listed]
    heads = ["name", "state", "when", "next, local", "next, UTC", "task", "owner"]
    shared = any(row[-1] for row in rows)
    print_table(heads if shared else heads[:-1], rows if shared else [row[:-1] for row in rows])
    for name, why in sorted(aside.items()):
        click.echo(visible(f"{name} fails {_failing(why)}"))


def _row(found: ScheduleShown) -> list[object]:
    first = found.next[0] if found.next else NextTime("", "")
    row = [found.name, found.state, found.when, first.local, first.utc]
    return [*row, found.task or found.damage, found.owner or ""]


@command.command("show")
@app_option
@click.argument("name", type=Text())
@click.option("--limit", type=click.IntRange(0, 200), default=10, help="Show so many occurrences.")
@json_option
def show(name: str, limit: int, as_json: bool) -> None:
    """Show a schedule: its rules, its next five times, and its newest occurrences."""
    with _meant() as app:
        shown = schedule(app, name, limit, any_owner=_any_owner())
    found = {**_described(shown.schedule), "failing": _failing(shown.schedule.aside)}
    made = shown.made
    if as_json:
        print_json({**found, "occurrences": [_occurrence(each) for each in made]})
        return
    for key, value in found.items():
        if key != "next":
            text = "-" if value is None else visible(str(value))
            click.echo(f"{key + ':':<14}{text}")
    for due in found.get("next", ()):
        click.echo(f"{'next:':<14}{due['local']}   {due['utc']}")
    if made:
        click.echo()
        rows = [[iso_time(one.at), one.state, one.kind, one.task_id, one.why] for one in made]
        print_table(["time", "state", "kind", "task id", "reason"], rows)


@command.command("pause")
@app_option
@click.argument("name", type=Text())
def pause_(name: str) -> None:
    """Make no occurrences until resume, on all workers, whatever restarts."""
    with _meant() as app:
        pause(app, name, any_owner=_any_owner()).act()
    click.echo(f"{visible(name)} is paused")


@command.command("resume")
@app_option
@click.argument("name", type=Text())
def resume_(name: str) -> None:
    """Go on after pause. Times in between are skipped; backfill sends them."""
    with _meant() as app:
        resume(app, name, any_owner=_any_owner()).act()
    click.echo(f"{visible(name)} is active")


@command.command("trigger")
@app_option
@click.argument("name", type=Text())
def trigger_(name: str) -> None:
    """Send the schedule's task now, and print its id. The next times stay as they are."""
    with _meant() as app:
        task_id = trigger(app, name, any_owner=_any_owner()).act()
    click.echo(task_id)


@command.command("backfill")
@app_option
@click.argument("name", type=Text())
@click.option("--from", "start", type=Moment(), required=True, help="The first time.")
@click.option("--to", "end", type=Moment(), required=True, help="The last time.")
def backfill_(name: str, start: datetime, end: datetime) -> None:
    """Send the tasks of past times that were not sent, and print their ids.

    Times without an offset are in the schedule's time zone. At most 10,000 tasks, the latest ones.
    """
    with _meant() as app:
        try:
            action = backfill(app, name, start, end, any_owner=_any_owner())
        except EndBeforeStart:
            raise click.UsageError("--from is after --to") from None
        ids = action.act()
    for task_id in ids:
        click.echo(task_id)
    more = f", at most {MOST_AT_ONCE} at once" if len(ids) == MOST_AT_ONCE else ""
    click.echo(f"sent {len(ids)} task{'' if len(ids) == 1 else 's'}{more}", err=True)


def _any_owner() -> bool:
    """Whether no app was named, so that the schedule may be that of any owner."""
    return app_spec() is None


@contextmanager
def _meant() -> Iterator[App]:
    """Open the app. Raises a usage error if several apps have a schedule of the name."""
    with open_app(celery=True) as app:
        try:
            yield app
        except SeveralOwners as error:
            raise click.UsageError(str(error)) from None


def _failing(aside: SetAside | None) -> str | None:
    if aside is None:
        return None
    return f"since {iso_time(aside.since)} in worker {aside.worker}: {aside.reason}"


def _described(found: ScheduleShown) -> dict[str, Any]:
    described: dict[str, Any] = {"name": found.name, "state": found.state}
    if found.state == "unreadable":
        return {**described, "damage": found.damage}
    described |= {"when": found.when, "task": found.task}
    if (more := found.details) is not None:
        described |= {
            "queue": more.queue,
            "missed": more.rules.missed,
            "grace": more.rules.late_seconds,
            "overlap": more.rules.overlap,
            "jitter": more.rules.jitter,
            "release": more.release,
            "made": more.made,
            "unsent": more.unsent,
            "origin": "code" if more.of_code else "run time",
        }
    return {**described, "next": [{"utc": each.utc, "local": each.local} for each in found.next]}


def _occurrence(made: Made) -> dict[str, Any]:
    return {
        "at": iso_time(made.at),
        "made_at": iso_time(made.made_at),
        "kind": made.kind,
        "state": made.state,
        "task_id": made.task_id,
        "why": made.why,
        "by": made.by,
    }
