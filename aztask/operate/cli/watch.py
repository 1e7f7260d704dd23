"""``aztask watch``: notices to a webhook."""

from __future__ import annotations

import threading
from pathlib import Path

import click

from aztask.operate.cli.failures import CommandFailed
from aztask.operate.cli.options import app_option
from aztask.operate.cli.output import print_table
from aztask.operate.cli.target import open_app
from aztask.operate.watch.rules import read_rules
from aztask.operate.watch.watcher import Watcher, watcher_of
from aztask.worker.logs import FORMATS, configure
from aztask.worker.stopsignals import DRAIN, NOW, handle


@click.command("watch")
@app_option
@click.option(
    "--rule",
    "--rules",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="The file of rules, in TOML.",
)
@click.option("--once", is_flag=True, help="Look once, send what is new, and exit: for cron.")
@click.option("--check", is_flag=True, help="Show what holds now, and send nothing.")
@click.option(
    "--log-format", type=click.Choice(FORMATS), default=FORMATS[0], help="Format the log on stderr."
)
def command(rule: Path, once: bool, check: bool, log_format: str) -> None:
    """Send a notice to a webhook when a rule holds, and once more when it ends.

    Rules are about backlogs, old messages, new failures, missed schedules, silent workers and open
    circuit breakers. Several watchers send each notice once.
    """
    file = read_rules(rule)
    configure(log_format)
    stopping = threading.Event()
    handle(lambda *_: stopping.set(), *DRAIN, *NOW)
    with open_app() as app:
        watcher = watcher_of(app, file)
        if check:
            _show(watcher)
        elif once:
            turn = watcher.turn()
            click.echo(f"{turn.sent} sent", err=True)
            if turn.problems:
                raise CommandFailed("; ".join(turn.problems))
        else:
            watcher.run(stopping)


def _show(watcher: Watcher) -> None:
    rows: list[tuple[str, str, str]] = []
    for name, found in watcher.holds().items():
        rows += [(name, "holds", each.text) for each in found.holds.values()]
        rows += [(name, "unreadable", why) for why in found.unknown.values()]
        if not found.holds and not found.unknown:
            rows.append((name, "-", ""))
    print_table(("rule", "state", "about"), rows)
