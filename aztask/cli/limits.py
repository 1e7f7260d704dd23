"""``aztask limits``: the limits of the app, and how far each one is used."""

from __future__ import annotations

import click

from aztask.canvas.limits import Limit
from aztask.cli.failures import NotFound
from aztask.cli.options import Text, app_option, json_option
from aztask.cli.output import print_json, print_table, span
from aztask.cli.target import open_app, results_of
from aztask.errors import ConfigurationError, did_you_mean
from aztask.limits.usage import LimitUsage, usage_of
from aztask.results.controls import controls_of
from aztask.support.display import visible


@click.command("limits")
@app_option
@click.argument("name", required=False, type=Text())
@click.option("--key", type=Text(), help="Show the limit NAME for this key.")
@json_option
def command(name: str | None, key: str | None, as_json: bool) -> None:
    """List the limits of the app, and how far each one is used.

    wait: how long a task that arrives now waits for its slot. running: how many permits workers
    hold. A limit with a key has these for each key: give NAME and --key.
    """
    if key is not None and name is None:
        raise click.UsageError("--key belongs to a limit: aztask limits NAME --key KEY")
    with open_app(required="aztask limits") as app:
        if name is not None and name not in app.limits:
            hint = did_you_mean(name, tuple(app.limits))
            raise NotFound(f"the app declares no limit {name!r}.{hint}")
        limits = [each for each in app.limits.values() if name in (None, each.name)]
        if key is not None and limits[0].key is None:
            raise click.UsageError(f"limit {name!r} has no key")
        store = controls_of(results_of(app))
        if store is None:
            raise ConfigurationError("this result store keeps no limits; use local:// or tables://")
        used = [
            usage_of(store, limit, key or "") if limit.key is None or key is not None else None
            for limit in limits
        ]
    if as_json:
        for limit, usage in zip(limits, used, strict=True):
            print_json(_record(limit, usage, key))
        return
    rows = [_row(limit, usage) for limit, usage in zip(limits, used, strict=True)]
    print_table(["limit", "rate", "burst", "wait", "running", "most"], rows)
    for limit, usage in zip(limits, used, strict=True):
        if usage is not None and usage.damage:
            click.echo(f"aztask: limit {visible(limit.name)}: {usage.damage}", err=True)


def _row(limit: Limit, usage: LimitUsage | None) -> list[object]:
    rate = limit.rate
    wait = None if usage is None or usage.wait_seconds is None else span(usage.wait_seconds)
    held = None if usage is None or usage.held is None else sum(usage.held.values())
    return [
        limit.name,
        None if rate is None else f"{rate.count}/{rate.period:g}s",
        None if rate is None else rate.burst,
        "for each key" if usage is None else wait,
        held,
        limit.concurrency,
    ]


def _record(limit: Limit, usage: LimitUsage | None, key: str | None) -> dict[str, object]:
    rate = limit.rate
    return {
        "limit": limit.name,
        "keyed": limit.key is not None,
        "key": key,
        "rate": None if rate is None else {"count": rate.count, "period_seconds": rate.period},
        "burst": None if rate is None else rate.burst,
        "concurrency": limit.concurrency,
        "wait_seconds": None if usage is None else usage.wait_seconds,
        "held": None if usage is None else usage.held,
        "damage": None if usage is None else usage.damage or None,
    }
