"""``aztask spark dlq``: dead letters by the million."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from typing import Any

import click

from aztask.cli.confirm import dry_run_option, yes_option
from aztask.cli.deadletter_act import act_on
from aztask.cli.failures import visible
from aztask.cli.group import Group
from aztask.cli.options import NameList, Rate, all_names, app_option, json_option
from aztask.cli.output import local_time, print_json, print_table
from aztask.cli.progress import Progress
from aztask.cli.spark.session import SessionOptions, open_session, session_options
from aztask.cli.target import app_spec, open_app
from aztask.deadletters.view import DeadLetters, Report
from aztask.spark.submission.target import Target

COLUMNS = ("id", "queue", "task", "reason", "enqueued_at", "resubmit_count", "description")


@click.group("dlq", cls=Group)
@app_option
def command() -> None:
    """Look at dead letters by the million, and replay a selection.

    Looking takes nothing. Without -Q, the dead letters of all queues are meant; with --snapshot,
    those that were written down with list --to.
    """


def letters_options(function: Callable[..., None]) -> Callable[..., None]:
    """Which dead letters, gathered into one `LetterOptions`."""

    @click.option(
        "-Q",
        "--queues",
        type=NameList(),
        multiple=True,
        help="Only these queues, a,b or several times. [default: all]",
    )
    @click.option("--where", help="Only those for which this Spark SQL expression is true.")
    @click.option("--signature", help="Only those of this error signature, as groups shows it.")
    @click.option(
        "--snapshot", metavar="PATH", help="Look into a snapshot instead of into the queues."
    )
    @session_options
    @wraps(function)
    def gathered(
        *args: Any,
        queues: Sequence[tuple[str, ...]],
        where: str | None,
        signature: str | None,
        snapshot: str | None,
        wish: SessionOptions,
        **rest: Any,
    ) -> None:
        wanted = LetterOptions(all_names(queues), where, signature, snapshot, wish)
        function(*args, wanted=wanted, **rest)

    return gathered


class LetterOptions:
    """What the options of `letters_options` said."""

    def __init__(
        self,
        queues: tuple[str, ...],
        where: str | None,
        signature: str | None,
        snapshot: str | None,
        wish: SessionOptions,
    ) -> None:
        self._queues = queues
        self.narrowed = where is not None or signature is not None
        self._where = where
        self._signature = signature
        self._snapshot = snapshot
        self._wish = wish

    @contextmanager
    def letters(self) -> Iterator[Any]:
        """The DataFrame, in a session; Spark's errors in the block are told in one line."""
        from aztask.spark.deadletters.letters import dead_letters
        from aztask.spark.queries import told_plainly

        if self._snapshot is None:
            with open_app():
                pass  # a missing app or queue file is said before Spark starts
        with open_session(self._wish, "aztask dlq") as spark, told_plainly():
            if self._snapshot is None:
                target = Target.of_environment(app_spec())
                found = dead_letters(spark, target, self._queues)
            else:
                found = spark.read.parquet(self._snapshot)
                if self._queues:
                    found = found.where(found["queue"].isin(*self._queues))
            if self._where is not None:
                found = found.where(self._where)
            if self._signature is not None:
                found = found.where(found["signature"] == self._signature)
            yield found


@command.command("list")
@app_option
@letters_options
@click.option("--limit", type=click.IntRange(1), default=100, help="How many at most.")
@click.option("--sample", type=click.IntRange(1), help="So many of every group, drawn by chance.")
@click.option("--to", metavar="PATH", help="Write all of them to Parquet files there: a snapshot.")
@json_option
def list_(
    wanted: LetterOptions, limit: int, sample: int | None, to: str | None, as_json: bool
) -> None:
    """List dead letters, or write them down."""
    with wanted.letters() as letters:
        from aztask.spark import deadletters

        found = letters if sample is None else deadletters.sample(letters, sample)
        if to is not None:
            found.write.parquet(to)
            click.echo(f"wrote the dead letters to {visible(to)}", err=True)
            return
        rows = found.orderBy("queue", "enqueued_at", "id").limit(limit).collect()
    if as_json:
        for row in rows:
            print_json(row.asDict())
        return
    print_table(
        [name.removesuffix("_at").replace("resubmit_count", "retries") for name in COLUMNS],
        [[_shown(row[name]) for name in COLUMNS] for row in rows],
    )


@command.command("groups")
@app_option
@letters_options
@json_option
def groups(wanted: LetterOptions, as_json: bool) -> None:
    """Count dead letters by task, reason and error signature, the largest groups first."""
    with wanted.letters() as letters:
        from aztask.spark import deadletters

        rows = deadletters.groups(letters).collect()
    if as_json:
        for row in rows:
            print_json(row.asDict())
        return
    columns = ("count", "queue", "task", "reason", "first_at", "last_at", "example", "signature")
    print_table(
        [name.removesuffix("_at") for name in columns],
        [[_shown(row[name]) for name in columns] for row in rows],
    )


@command.command("replay")
@app_option
@letters_options
@click.option("--all", "everything", is_flag=True, help="All of them.")
@click.option("--rate", type=Rate(), help="At most so many a second.")
@dry_run_option
@yes_option
def replay(
    wanted: LetterOptions, everything: bool, rate: float | None, dry_run: bool, yes: bool
) -> None:
    """Send dead letters again, with all their retries.

    They are removed from the dead letters once they are sent. Broken off and run again, each is
    replayed once.
    """
    if everything == wanted.narrowed:
        raise click.UsageError(
            "--all goes without --where and --signature"
            if everything
            else "say which: --where, --signature or --all",
            click.get_current_context(),
        )
    with wanted.letters() as letters:
        from aztask.spark.deadletters.letters import selections, size

        selected = selections(letters)
    with open_app() as app:
        meant = [(DeadLetters(app, queue), size(found)) for queue, found in selected.items()]
        shown = Progress(sum(count for _, count in meant), "dead letters")

        def act(letters: DeadLetters, progress: Callable[[Report], None]) -> Report:
            def both(report: Report) -> None:
                progress(report)
                shown.show(report.done + report.lost)

            return letters.replay(selected[letters.queue], rate=rate, progress=both)

        act_on(meant, ("replay", "replayed"), act, dry_run=dry_run, yes=yes)


def _shown(value: Any) -> Any:
    return local_time(value.timestamp()) if isinstance(value, datetime) else value
