"""``aztask spark recommend``: leases, prefetch and splits of queues, from the event log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from aztask.app import App
from aztask.config import read_environment
from aztask.errors import ConfigurationError
from aztask.leaseadvice.document import LeaseDocument, LeaseStore
from aztask.operate.cli.options import (
    LONGEST_LEASE,
    Duration,
    NameList,
    all_names,
    app_option,
    json_option,
)
from aztask.operate.cli.output import print_json, print_table
from aztask.operate.cli.target import app_spec, find_app
from aztask.queues.lease.bounds import LONGEST, MIN_SAMPLES, SHORTEST, Bounds
from aztask.spark.cli.session import SessionOptions, events_options, open_session
from aztask.support.display import visible


@click.command("recommend")
@app_option
@events_options
@click.option(
    "-Q",
    "--queues",
    type=NameList(),
    multiple=True,
    help="Only these queues, a,b or several times. [default: all in the log]",
)
@click.option(
    "--least",
    type=Duration(least=0.1, most=LONGEST_LEASE),
    default=f"{SHORTEST:g}s",
    help="The shortest lease to recommend.",
)
@click.option(
    "--most",
    type=Duration(least=0.1, most=LONGEST_LEASE),
    help="The longest lease to recommend. [default: the longest that the broker grants]",
)
@click.option(
    "--min-samples",
    type=click.IntRange(1),
    default=MIN_SAMPLES,
    help="Change a lease only if the queue has at least so many deliveries.",
)
@click.option(
    "--publish", is_flag=True, help="Publish the leases, for workers and senders with lease_advice."
)
@json_option
def command(
    path: str,
    account_variable: str | None,
    queues: Sequence[tuple[str, ...]],
    publish: bool,
    spark_options: SessionOptions,
    as_json: bool,
    **limits: Any,
) -> None:
    """Recommend leases, prefetch and splits of queues, from the event log.

    PATH is a directory, blob://ACCOUNT/CONTAINER, or any path that Spark reads (abfss://, dbfs:/,
    file:///). A published lease is changed only if it is far
    off. Workers and senders with lease_advice follow the leases that --publish writes. The broker
    says how long a lease may be; without -A and AZTASK_BROKER, give --most (5m for Service Bus).
    """
    app = find_app()
    try:
        bounds = _bounds(app, **limits)
        store = app.leases.store if app.leases.enabled else None
        if publish and store is None:
            raise ConfigurationError(
                "--publish needs a place: set lease_advice of the app, or "
                "AZTASK_LEASE_ADVICE, to auto, a file's path or blob://ACCOUNT/CONTAINER"
            )
        found, published = _work(
            path, account_variable, all_names(queues), bounds, store, publish, spark_options
        )
    finally:
        app.close()
    _show(found, as_json=as_json)
    if published:
        click.echo(published, err=True)


def _work(
    place: str,
    account_variable: str | None,
    queues: Sequence[str],
    bounds: Bounds,
    store: LeaseStore | None,
    publish: bool,
    spark_options: SessionOptions,
) -> tuple[Sequence[Any], str]:
    """(the recommendations, a line about what was published)."""
    from aztask.spark.events.frame import read_events
    from aztask.spark.recommendation.recommend import decide_queues, observe, publish_evidence
    from aztask.spark.session import translated_errors

    with open_session(spark_options, "aztask recommend") as spark, translated_errors():
        evidence = observe(read_events(spark, place, account_variable=account_variable).events)
    if not publish or store is None:
        document = store.load().document if store is not None else LeaseDocument()
        return decide_queues(evidence, document, bounds, queues=queues), ""
    done = publish_evidence(evidence, store, bounds=bounds, queues=queues)
    if not done.queues:
        return done.recommendations, f"nothing to publish: revision {done.revision} stays in force"
    names = visible(", ".join(done.queues))
    return done.recommendations, f"published revision {done.revision}: {names}"


def _bounds(app: App, least: float, most: float | None, min_samples: int) -> Bounds:
    if most is not None:
        longest = most
    elif app_spec() is None and read_environment("AZTASK_BROKER") is None:
        longest = LONGEST
    else:
        longest = app.broker.capabilities.max_lease_seconds
    return Bounds(min(least, longest), longest, min_samples)


def _held(evidence: Any) -> object:
    """The p99 of held time; deliveries that were cut off would have been held for longer."""
    if evidence.p99_seconds is None or evidence.cut_off <= 0.01 * evidence.samples:
        return evidence.p99_seconds
    return f"> {evidence.p99_seconds:.3g}"


def _show(found: Sequence[Any], *, as_json: bool) -> None:
    if as_json:
        for each in found:
            print_json(each.as_dict())
        return
    print_table(
        ["queue", "deliveries", "held p99", "lost", "lease", "advised", "renewed", "prefetch"],
        [
            [
                each.queue,
                each.advice.evidence.samples,
                _held(each.advice.evidence),
                each.advice.evidence.losses,
                each.current_lease_seconds,
                "renew" if each.advice.renew else each.advice.lease_seconds,
                f"{100 * each.renewed_part:.2g} %",
                each.prefetch,
            ]
            for each in found
        ],
    )
    for each in found:
        click.echo()
        click.secho(visible(each.queue), bold=True)
        for name, reason in each.reasons.items():
            click.echo(f"  {name}: {visible(reason)}")
