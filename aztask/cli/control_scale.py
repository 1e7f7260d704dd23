"""``aztask control scale``: change how many tasks workers run at the same time, while they run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import click

from aztask.app import App
from aztask.cli.failures import CommandFailed
from aztask.cli.options import NameList, Text, all_names, app_option
from aztask.cli.target import open_app, results_of
from aztask.errors import ConfigurationError, did_you_mean
from aztask.limits.control import Controls
from aztask.limits.scale import MOST, Reach
from aztask.results.base import WorkerRecord
from aztask.results.controls import ControlStore, controls_of
from aztask.support.display import visible
from aztask.support.masking import printable

OBEYED: Final = "workers obey within 5 seconds"
RESET: Final = 0


class Size(click.ParamType[int]):
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


@click.command("scale")
@app_option
@click.argument("size", type=Size(), metavar="N|reset")
@click.option(
    "--worker", "workers", type=Text(), multiple=True, help="Scale this worker; repeatable."
)
@click.option(
    *("-Q", "--queue", "queues"),
    type=NameList(),
    multiple=True,
    help="Scale the workers of these queues: a,b or -Q a -Q b.",
)
def scale(size: int, workers: tuple[str, ...], queues: tuple[tuple[str, ...], ...]) -> None:
    """Let workers run N tasks at the same time, instead of their --concurrency.

    Without --worker or --queue it applies to all workers, those that start later too, until it is
    reset. Every worker obeys within 5 seconds; tasks that run go on. What is said of a worker
    comes before what is said of its queues, and that before what is said of all.

    reset ends this: for the given workers and queues, or without them for all.
    """
    with open_app() as app:
        controls = controls_in(app)
        chosen = _chosen(workers, all_names(queues))
        if size == RESET:
            _reset(controls, chosen)
            return
        found = results_of(app).workers()
        _check_workers(found, workers)
        living = {each.name for each in found if not each.stopped}
        entries = controls.read().scales
        forget = {name for reach, name in entries if reach is Reach.WORKER} - living
        for reach, names in chosen or [(Reach.ALL, ("",))]:
            for each in controls.scale(reach, names, size, time.time(), forget=forget):
                click.echo(f"{visible(str(each))}: {size} tasks at the same time; {OBEYED}")


def controls_in(app: App) -> Controls:
    """What is paused and scaled, in the app's result store. Raises as `control_store` does."""
    return Controls(control_store(app))


def control_store(app: App) -> ControlStore:
    """The control entries of the app's result store. Raises ConfigurationError if it has none."""
    store = controls_of(results_of(app))
    if store is None:
        raise ConfigurationError("this result store cannot keep pauses; use local:// or tables://")
    return store


def _chosen(
    workers: tuple[str, ...], queues: tuple[str, ...]
) -> list[tuple[Reach, tuple[str, ...]]]:
    found = [(Reach.WORKER, tuple(dict.fromkeys(workers))), (Reach.QUEUE, queues)]
    return [(reach, names) for reach, names in found if names]


def _reset(controls: Controls, chosen: list[tuple[Reach, tuple[str, ...]]]) -> None:
    if chosen:
        ended = [each for reach, names in chosen for each in controls.unscale(reach, names)]
    else:
        ended = controls.unscale(None, ())
    for each in ended:
        click.echo(f"{visible(str(each))}: --concurrency applies again; {OBEYED}")
    if not ended:
        click.echo("nothing is scaled there" if chosen else "nothing is scaled")


def _check_workers(found: Sequence[WorkerRecord], names: tuple[str, ...]) -> None:
    """Raise CommandFailed for a worker that does not run."""
    living = [each.name for each in found if not each.stopped and not each.damage]
    for name in names:
        if name not in living:
            hint = did_you_mean(name, living)
            raise CommandFailed(f"no worker {printable(name, 60)} runs.{hint} See: aztask workers")
