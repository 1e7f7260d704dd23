"""``aztask schedule``: list and show schedules, pause, resume, trigger and backfill them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

import click

from aztask.app import App
from aztask.cli.failures import NotFound
from aztask.cli.group import Group
from aztask.cli.options import Text, app_option, json_option
from aztask.cli.output import iso_time, print_json, print_table
from aztask.cli.target import open_app, results_of
from aztask.errors import CodecError, ConfigurationError, ResultDamaged
from aztask.results.damage import Damaged
from aztask.schedules.engine import ScheduleEngine, View
from aztask.schedules.schedules import MOST_BACKFILLED, Plan
from aztask.schedules.stored import Made
from aztask.schedules.triggers import Cron, Trigger
from aztask.support.display import visible

NEXT_TIMES: Final = 5
Command = Callable[..., None]


class Moment(click.ParamType[datetime]):
    """A time: ``2026-11-01T02:00:00Z``; without an offset, the schedule's own time zone."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The time; fails with a usage error."""
        if isinstance(value, datetime):
            return value
        try:
            return datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is not a time; write 2026-11-01T02:00:00Z", param, ctx)


@click.group("schedule", cls=Group)
@app_option
def command() -> None:
    """List, show, pause, resume, trigger and backfill schedules."""


@command.command("list")
@app_option
@json_option
def list_(as_json: bool) -> None:
    """List all schedules with their next time.

    A schedule in the state new is declared in the app, and no worker has started it yet.
    """
    rows: list[list[object]] = []
    with open_app() as app:
        engine = _engine(app)
        now = engine.store.now()
        stored = {name: _described(engine, name, view, now) for name, view in engine.views()}
        declared = {name: _declared(plan, now) for name, plan in app.schedules.declared.items()}
        for name, found in sorted({**declared, **stored}.items()):
            if as_json:
                print_json(found)
            else:
                due = found.get("next") or [{"utc": "", "local": ""}]
                first = due[0]
                row = [name, found["state"], found.get("when", ""), first["local"], first["utc"]]
                rows.append([*row, found.get("task", found.get("damage", ""))])
    if not as_json:
        print_table(["name", "state", "when", "next, local", "next, UTC", "task"], rows)


@command.command("show")
@app_option
@click.argument("name", type=Text())
@click.option("--limit", type=click.IntRange(0, 200), default=10, help="Show so many occurrences.")
@json_option
def show(name: str, limit: int, as_json: bool) -> None:
    """Show a schedule: its rules, its next five times, and its newest occurrences."""
    with open_app() as app:
        engine = _engine(app)
        view = _found(app, name)
        found = _described(engine, view.name, view, engine.store.now())
        made = engine.history(view.name, limit)
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
        shown = [[iso_time(one.at), one.state, one.kind, one.task_id, one.why] for one in made]
        print_table(["time", "state", "kind", "task id", "reason"], shown)


@command.command("pause")
@app_option
@click.argument("name", type=Text())
def pause(name: str) -> None:
    """Make no occurrences until resume, on all workers, whatever restarts."""
    with open_app() as app:
        _engine(app)
        _check(app, name, app.schedules.pause(name))
    click.echo(f"{visible(name)} is paused")


@command.command("resume")
@app_option
@click.argument("name", type=Text())
def resume(name: str) -> None:
    """Go on after pause. Times in between are skipped; backfill sends them."""
    with open_app() as app:
        _engine(app)
        _check(app, name, app.schedules.resume(name))
    click.echo(f"{visible(name)} is active")


@command.command("trigger")
@app_option
@click.argument("name", type=Text())
def trigger(name: str) -> None:
    """Send the schedule's task now, and print its id. The next times stay as they are."""
    with open_app() as app:
        _engine(app)
        _found(app, name)
        task_id = app.schedules.trigger(name)
        _check(app, name, task_id)
    click.echo(task_id)


@command.command("backfill")
@app_option
@click.argument("name", type=Text())
@click.option("--from", "start", type=Moment(), required=True, help="The first time.")
@click.option("--to", "end", type=Moment(), required=True, help="The last time.")
def backfill(name: str, start: datetime, end: datetime) -> None:
    """Send the tasks of past times that were not sent, and print their ids.

    Times without an offset are in the schedule's time zone. At most 10,000 tasks, the latest ones.
    """
    with open_app() as app:
        engine = _engine(app)
        view = _found(app, name)
        found = engine.definition(view).trigger
        tz = found.zone if isinstance(found, Cron) else UTC
        times = [each if each.utcoffset() is not None else each.replace(tzinfo=tz)
                 for each in (start, end)]  # fmt: skip
        if times[0] > times[1]:
            raise click.UsageError("--from is after --to")
        ids = app.schedules.backfill(name, *times) or []
    for task_id in ids:
        click.echo(task_id)
    more = f", at most {MOST_BACKFILLED} at once" if len(ids) == MOST_BACKFILLED else ""
    click.echo(f"sent {len(ids)} task{'' if len(ids) == 1 else 's'}{more}", err=True)


def _engine(app: App) -> ScheduleEngine:
    results_of(app)
    return app.schedules.engine


def _found(app: App, name: str) -> View:
    try:
        view = app.schedules.view(name)
    except Damaged as damage:
        raise ResultDamaged(f"schedule {visible(name)} cannot be read: {damage.reason}") from None
    _check(app, name, view)
    assert view is not None  # noqa: S101  # checked in the line above
    return view


def _check(app: App, name: str, found: object) -> None:
    if found:
        return
    full = app.schedules.full_name(name)
    if full in app.schedules.declared:
        raise NotFound(
            f"schedule {visible(full)} is new; it starts with the next worker or aztask scheduler"
        )
    raise NotFound(f"no schedule has the name {visible(full)}; aztask schedule list shows all")


def _described(
    engine: ScheduleEngine, name: str, view: View | Damaged, now: float
) -> dict[str, Any]:
    if isinstance(view, Damaged):
        return {"name": name, "state": "unreadable", "damage": view.reason}
    schedule = view.schedule
    found: dict[str, Any] = {"name": name, "state": schedule.state_at(now)}
    try:
        definition = engine.definition(view)
    except (Damaged, CodecError, ConfigurationError) as error:
        return {**found, "state": "unreadable", "damage": str(error)}
    trigger = definition.trigger
    start = None if schedule.paused_at is not None else schedule.watermark
    rules = definition.rules
    return {
        **found,
        "when": str(trigger),
        "task": definition.message.task,
        "queue": definition.message.queue,
        "missed": rules.missed,
        "grace": rules.late_seconds,
        "overlap": rules.overlap,
        "jitter": rules.jitter,
        "release": schedule.release,
        "made": schedule.made,
        "unsent": len(view.open),
        "origin": "run time" if schedule.claimed_at is None else "code",
        "next": _next_times(trigger, start, now),
    }


def _declared(plan: Plan, now: float) -> dict[str, Any]:
    return {
        "name": plan.name,
        "state": "new",
        "when": str(plan.trigger),
        "task": plan.call.task.name,
        "next": _next_times(plan.trigger, now, now),
    }


def _next_times(trigger: Trigger, start: float | None, now: float) -> list[dict[str, str]]:
    """The next times after `start` that are not past; none if it is None."""
    times = [] if start is None else trigger.after(start)
    zone = trigger.zone if isinstance(trigger, Cron) else None
    return [
        {
            "utc": datetime.fromtimestamp(each, UTC).isoformat().replace("+00:00", "Z"),
            "local": datetime.fromtimestamp(each, zone).astimezone(zone).isoformat(),
        }
        for each in islice((each for each in times if each > now), NEXT_TIMES)
    ]


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
