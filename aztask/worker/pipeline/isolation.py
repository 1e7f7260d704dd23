"""One bad delivery in a batch: find it, and let its neighbours through.

A stage works on whole batches, because a batch costs one request or one transaction. When a batch
fails for a reason that no outage explains, it is split in halves until the delivery that fails
stands alone. A batch of 256 with one bad delivery costs 16 further calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aztask.errors import BrokerError, ConfigurationError
from aztask.worker.pipeline.work import WorkItem

UNDONE = (BrokerError, ConfigurationError)
"""What a broker or a store raises when it did nothing, or not everything: every delivery waits.
Permissions that are refused may be granted again, and a worker does not end because of them."""


def isolated(
    items: Sequence[WorkItem],
    work: Callable[[Sequence[WorkItem]], None],
    *,
    unavailable: Callable[[Sequence[WorkItem], Exception], None],
    refused: Callable[[WorkItem, Exception], None],
) -> None:
    """Give `items` to `work`, so that a delivery that cannot be processed harms no other one.

    `work` may be called again with some of the items after it raised, so it must be repeatable.
    `unavailable` gets the items of a call that raised one of `UNDONE`, `refused` each item that
    makes `work` raise anything else when it is alone.
    """
    if not items:
        return
    try:
        work(items)
    except UNDONE as error:
        unavailable(items, error)
    except Exception as error:  # noqa: BLE001  # a store, a codec or a broker may raise anything
        if len(items) == 1:
            refused(items[0], error)
            return
        half = len(items) // 2
        for part in (items[:half], items[half:]):
            isolated(part, work, unavailable=unavailable, refused=refused)
