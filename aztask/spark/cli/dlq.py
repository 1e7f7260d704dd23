"""``aztask spark dlq``: listing, grouping and replaying dead letters by the million."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from typing import Any

import click

from aztask.operate.cli.group import CliGroup
from aztask.operate.cli.letters import act_on
from aztask.operate.cli.options import (
    NameList,
    PositiveRate,
    all_names,
    app_option,
    dry_run_option,
    json_option,
    yes_option,
)
from aztask.operate.cli.output import ProgressLine, local_time, print_json, print_table
from aztask.operate.cli.target import app_spec, open_app
from aztask.operate.deadletters.actions import replay_counted
from aztask.spark.cli.session import (
    SessionOptions,
    check_tables,
    open_session,
    session_options,
    tables_option,
)
from aztask.spark.submission.submission import Target
from aztask.support.display import plural, visible

COLUMNS = ("id", "queue", "task", "reason", "enqueued_at", "resubmit_count", "description")


@click.group("dlq", cls=CliGroup)
@app_option
def command() -> None:
    """List and group dead letters by the million, and replay a selection.

    Listing removes nothing. Without -Q, all queues are read. With --snapshot, a snapshot is read
    that list --to has written.
    """


def letters_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options that select dead letters; the command gets them as ``selection``."""

    @click.option(
        "-Q",
        "--queues",
        type=NameList(),
        multiple=True,
        help="Only these queues, a,b or several times. [default: all]",
    )
    @click.option("--where", help="Only those that match this Spark SQL expression.")
    @click.option("--signature", help="Only those with this error signature, as groups shows it.")
    @click.option("--snapshot", metavar="PATH", help="Read this snapshot instead of the queues.")
    @session_options
    @wraps(function)
    def gathered(
        *args: Any,
        queues: Sequence[tuple[str, ...]],
        where: str | None,
        signature: str | None,
        snapshot: str | None,
        spark_options: SessionOptions,
        **rest: Any,
    ) -> None:
        selection = LetterOptions(all_names(queues), where, signature, snapshot, spark_options)
        function(*args, selection=selection, **rest)

    return gathered


class LetterOptions:
    """The values of the options of `letters_options`."""

    def __init__(
        self,
        queues: tuple[str, ...],
        where: str | None,
        signature: str | None,
        snapshot: str | None,
        spark_options: SessionOptions,
    ) -> None:
        self._queues = queues
        self.narrowed = where is not None or signature is not None
        self._where = where
        self._signature = signature
        self._snapshot = snapshot
        self._spark_options = spark_options

    @property
    def whole(self) -> bool:
        """Whether all dead letters of the queues are selected, as they are now."""
        return not self.narrowed and self._snapshot is None

    def queues(self) -> Sequence[str]:
        """The queues of -Q, otherwise all that the broker has."""
        with open_app() as app:
            return self._queues or tuple(app.broker.queues())

    @contextmanager
    def letters(self, queues: Sequence[str] | None = None) -> Iterator[Any]:
        """Open a session and yield the DataFrame; Spark's errors in the block become one line.

        queues: instead of those of -Q.
        """
        from aztask.spark.deadletters import dead_letters
        from aztask.spark.session import translated_errors

        if self._snapshot is None:
            with open_app():
                pass  # reports a missing app or queue file before Spark starts
        with open_session(self._spark_options, "aztask dlq") as spark, translated_errors():
            if self._snapshot is None:
                target = Target.of_environment(app_spec())
                found = dead_letters(spark, target, self._queues if queues is None else queues)
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
@click.option("--limit", type=click.IntRange(1), default=100, help="Show at most so many.")
@click.option(
    "--sample", type=click.IntRange(1), help="Show so many of every group, chosen by a hash."
)
@click.option(
    "--to", metavar="PATH", help="Write all of them to Parquet files there, as a snapshot."
)
@tables_option
@json_option
def list_(
    selection: LetterOptions,
    limit: int,
    sample: int | None,
    to: str | None,
    tables: str | None,
    as_json: bool,
) -> None:
    """List dead letters, or write them to a snapshot.

    With --tables, all dead letters of the queues become their rows in the Delta table dead_letters,
    in the place of earlier ones.
    """
    if tables is not None:
        if sample is not None or to is not None or not selection.whole:
            raise click.UsageError(
                "--tables writes all dead letters of queues: it excludes --where, --signature, "
                "--snapshot, --sample and --to",
                click.get_current_context(),
            )
        _store(selection, tables)
        return
    with selection.letters() as letters:
        from aztask.spark import deadletters

        found = letters if sample is None else deadletters.sample(letters, sample)
        if to is not None:
            found.write.parquet(to)
            click.echo(f"wrote the dead letters to {visible(to)}", err=True)
            return
        groups = ("queue",) if sample is None else deadletters.GROUP_BY
        rows = found.orderBy(*groups, "enqueued_at", "id").limit(limit).collect()
    if as_json:
        for row in rows:
            print_json(row.asDict())
        return
    columns = COLUMNS if sample is None else (*COLUMNS, "signature")  # which names the group
    heads = {"enqueued_at": "sent", "resubmit_count": "retries"}
    print_table(
        [heads.get(name, name) for name in columns],
        [[_shown(row[name]) for name in columns] for row in rows],
    )


def _store(selection: LetterOptions, tables: str) -> None:
    check_tables(tables)
    queues = selection.queues()
    with selection.letters(queues) as letters:
        from aztask.spark import place_of, store_dead_letters

        report = store_dead_letters(letters, place_of(tables), queues)
    click.echo(
        f"wrote {plural(report.rows, 'dead letter')} of {plural(report.files, 'queue')} to "
        f"{visible(tables)}"
        + (f"; of {plural(report.there, 'queue')} it has later ones" if report.there else ""),
        err=True,
    )


@command.command("groups")
@app_option
@letters_options
@json_option
def groups(selection: LetterOptions, as_json: bool) -> None:
    """Count dead letters by task, reason and error signature, the largest groups first.

    FIRST SENT and LAST SENT are times of sending: no service tells when it was dead-lettered.
    """
    with selection.letters() as letters:
        from aztask.spark import deadletters

        rows = deadletters.groups(letters).collect()
    if as_json:
        for row in rows:
            print_json(row.asDict())
        return
    columns = ("count", "queue", "task", "reason", "first_at", "last_at", "example", "signature")
    print_table(
        [name.replace("_at", " sent") for name in columns],
        [[_shown(row[name]) for name in columns] for row in rows],
    )


@command.command("replay")
@app_option
@letters_options
@click.option("--all", "everything", is_flag=True, help="Replay all of them.")
@click.option("--rate", type=PositiveRate(), help="Replay at most so many per second.")
@dry_run_option
@yes_option
def replay(
    selection: LetterOptions, everything: bool, rate: float | None, dry_run: bool, yes: bool
) -> None:
    """Send dead letters again, with all their retries.

    Each is removed from the dead letters after it was sent. You can interrupt the command and run
    it again: each dead letter is replayed once.
    """
    if everything == selection.narrowed:
        raise click.UsageError(
            "--all excludes --where and --signature"
            if everything
            else "select with --where, --signature or --all",
            click.get_current_context(),
        )
    with selection.letters() as letters:
        from aztask.spark.deadletters import selections, size

        selected = selections(letters)
    with open_app() as app:
        counted = {queue: (found, size(found)) for queue, found in selected.items()}
        action = replay_counted(app, counted, rate=rate)
        shown = ProgressLine(action.count, "dead letters")
        act_on(action, dry_run=dry_run, yes=yes, progress=shown.show)


def _shown(value: Any) -> Any:
    return local_time(value.timestamp()) if isinstance(value, datetime) else value
