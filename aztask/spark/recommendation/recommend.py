"""From the event log to published lease advice.

Rules
1. The job over the events runs once. Decisions are cheap: if another writer publishes first, they
   are made again from the newest document. So another writer's advice is never overwritten.
2. Only lease advice is published. Recommendations on prefetch and splits are for people.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql import DataFrame

from aztask.adaptive.document import LeaseDocument, LeaseStore, publish_advice
from aztask.errors import AztaskError
from aztask.lease.bounds import Bounds
from aztask.spark.recommendation.evidence import QueueEvidence, observe
from aztask.spark.recommendation.recommendation import Recommendation, recommended

TRIES: Final = 8


@dataclass(frozen=True, slots=True)
class Publication:
    """The result of a publication. revision: of the document now. queues: with changed advice."""

    recommendations: tuple[Recommendation, ...]
    revision: int
    queues: tuple[str, ...]


def recommend(
    events: DataFrame,
    *,
    published: LeaseDocument = LeaseDocument(),
    bounds: Bounds = Bounds(),
    queues: Sequence[str] = (),
    at: float | None = None,
) -> tuple[Recommendation, ...]:
    """The recommendations for each queue of the events, or for `queues` only. Runs a job.

    published: the advice in force; see `aztask.adaptive.stores.open_lease_store`. bounds: the
    shortest and the longest lease; ``most`` is what the service grants. at: seconds since 1970
    (UTC); None: now.
    """
    return decide_queues(observe(events), published, bounds, queues=queues, at=at)


def publish(
    events: DataFrame,
    store: LeaseStore,
    *,
    bounds: Bounds = Bounds(),
    queues: Sequence[str] = (),
    at: float | None = None,
) -> Publication:
    """`recommend` with the document in `store`, and publish the leases that change.

    Another writer's document is never overwritten: it is read, and the decisions are made again.
    Raises AztaskError if that happens `TRIES` times, BrokerUnavailable, and DecodeError if the
    stored document is damaged. If the process dies, the document is either the old or the new one.
    """
    return publish_evidence(observe(events), store, bounds=bounds, queues=queues, at=at)


def decide_queues(
    evidence: Mapping[str, QueueEvidence],
    published: LeaseDocument,
    bounds: Bounds,
    *,
    queues: Sequence[str] = (),
    at: float | None = None,
) -> tuple[Recommendation, ...]:
    """The recommendations that follow from the evidence, by queue."""
    now = time.time() if at is None else at
    return tuple(
        recommended(each, published.entry(queue).advice, bounds, at=now)
        for queue, each in sorted(evidence.items())
        if queue and (not queues or queue in queues)
    )


def publish_evidence(
    evidence: Mapping[str, QueueEvidence],
    store: LeaseStore,
    *,
    bounds: Bounds = Bounds(),
    queues: Sequence[str] = (),
    at: float | None = None,
) -> Publication:
    """As `publish`, with evidence that was collected before."""
    for _ in range(TRIES):
        stored = store.load()
        found = decide_queues(evidence, stored.document, bounds, queues=queues, at=at)
        changed = {each.queue: each.advice for each in found if _changes_lease(each)}
        if not changed:
            return Publication(found, stored.document.revision, ())
        if publish_advice(store, changed, stored):
            return Publication(found, stored.document.revision + 1, tuple(changed))
    raise AztaskError(
        f"nothing was published: another writer published first {TRIES} times; try again"
    )


def _changes_lease(recommendation: Recommendation) -> bool:
    """Whether the advice changes the lease in force; advice to keep it is not published."""
    advice, lease = recommendation.advice, recommendation.current_lease_seconds
    return advice.lease_seconds is not None and (advice.lease_seconds != lease or advice.renew)
