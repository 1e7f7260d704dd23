"""One bad delivery in a batch: find it, and process the others.

A stage works on batches, because a batch costs one request or one transaction. If a batch fails for
a reason other than an outage, it is split in halves until the bad delivery is alone. A batch of 256
with one bad delivery costs 16 further calls. A delivery whose row is encrypted with a missing key
is one of those, although it waits as in an outage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aztask.errors import BrokerError, ConfigurationError
from aztask.message.encryption import Locked
from aztask.worker.pipeline.work import WorkItem

UNDONE = (BrokerError, ConfigurationError)
"""Errors after which a broker or a store did nothing, or not everything: every delivery waits.
A missing permission is one of them: it may be granted again, so it does not end the worker."""


def isolated(
    items: Sequence[WorkItem],
    work: Callable[[Sequence[WorkItem]], None],
    *,
    unavailable: Callable[[Sequence[WorkItem], Exception], None],
    refused: Callable[[WorkItem, Exception], None],
) -> None:
    """Give `items` to `work`, so that a bad delivery does not harm the others.

    * work: may be called again with some of the items after it raised, so it must be repeatable.
    * unavailable: gets the items of a call that raised one of `UNDONE`.
    * refused: gets each item that makes `work` raise any other error when it is alone.
    """
    if not items:
        return
    try:
        work(items)
    except Exception as error:  # noqa: BLE001  # a store, a codec or a broker may raise anything
        alone = len(items) == 1
        if isinstance(error, UNDONE) and (alone or not isinstance(error, Locked)):
            unavailable(items, error)
            return
        if alone:
            refused(items[0], error)
            return
        half = len(items) // 2
        for part in (items[:half], items[half:]):
            isolated(part, work, unavailable=unavailable, refused=refused)
