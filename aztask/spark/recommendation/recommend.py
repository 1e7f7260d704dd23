"""From the event log to published lease advice.

Rules
1. The job over the events runs once. Deciding takes no time, so it is done again from the newest
   document where somebody published meanwhile: what they decided and counted is never overwritten.
2. What is published is lease advice alone: prefetch and the split of a queue are for people.
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
    """What a publication did. revision: of the document now. queues: whose advice changed."""

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
    """What is recommended for each queue of the events, or for these. Runs a job.

    published: the advice in force; see `aztask.adaptive.stores.open_lease_store`. bounds: between
    what leases may be chosen; ``most`` is what the service grants. at: UTC epoch seconds; None:
    now.
    """
    return decided(observe(events), published, bounds, queues=queues, at=at)


def publish(
    events: DataFrame,
    store: LeaseStore,
    *,
    bounds: Bounds = Bounds(),
    queues: Sequence[str] = (),
    at: float | None = None,
) -> Publication:
    """`recommend` against the document in `store`, and publish the leases that change.

    A document of another writer is never overwritten: it is read, and decided upon again; after
    `TRIES` of them AztaskError. Raises BrokerUnavailable, and DecodeError where what is stored is
    no document. If the process dies before the end, the document is the old one or the new one.
    """
    return publish_seen(observe(events), store, bounds=bounds, queues=queues, at=at)


def decided(
    seen: Mapping[str, QueueEvidence],
    published: LeaseDocument,
    bounds: Bounds,
    *,
    queues: Sequence[str] = (),
    at: float | None = None,
) -> tuple[Recommendation, ...]:
    """The recommendations for what was seen."""
    now = time.time() if at is None else at
    return tuple(
        recommended(each, published.entry(queue).advice, bounds, at=now)
        for queue, each in sorted(seen.items())
        if queue and (not queues or queue in queues)
    )


def publish_seen(
    seen: Mapping[str, QueueEvidence],
    store: LeaseStore,
    *,
    bounds: Bounds = Bounds(),
    queues: Sequence[str] = (),
    at: float | None = None,
) -> Publication:
    """`publish`, for what was seen already."""
    for _ in range(TRIES):
        stored = store.load()
        found = decided(seen, stored.document, bounds, queues=queues, at=at)
        changed = {each.queue: each.advice for each in found if _says_more(each)}
        if not changed:
            return Publication(found, stored.document.revision, ())
        if publish_advice(store, changed, stored):
            return Publication(found, stored.document.revision + 1, tuple(changed))
    raise AztaskError(
        f"nothing was published: {TRIES} times another writer published first; try again"
    )


def _says_more(recommendation: Recommendation) -> bool:
    """Whether the advice differs from the lease in force: what says "kept" is not published."""
    advice, lease = recommendation.advice, recommendation.current_lease_seconds
    return advice.lease_seconds is not None and (advice.lease_seconds != lease or advice.renew)
