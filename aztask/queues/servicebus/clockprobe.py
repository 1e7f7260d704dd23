"""The message that finds the service's time: scheduled ahead, peeked at, cancelled.

Rules
1. A probe is due soon and lives shortly, so one that stays (the process died, or its cancellation
   was not answered) is gone within two minutes. Only if our clock is wrong by more than that is the
   next one due later, see `DUE_SECONDS`.
2. A probe is recognised by its message id. Receivers complete one that they get, and peeks skip it:
   it is no task, in the queue or among the dead letters, where a queue may keep what expires. Nor
   is it counted there, see `Peeking.without_probes`; a replay or a purge that meets it removes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from aztask.queues.delivery import Delivery
from aztask.settlement import Complete, Settlement

logger = logging.getLogger(__name__)

PREFIX: Final = "aztask-clock-"
TIME_TO_LIVE: Final = 60.0
"""Seconds that a probe is in the queue once it is due: long enough for a worker to drop it."""

DUE_SECONDS: Final = (60.0, 2 * 3600.0, 2 * 86400.0)
"""When a probe is due, in seconds from now by our clock.

If our clock is behind the service's by more than that, the probe is due at once and cannot be
peeked at as a scheduled one. Then the next one is tried.
"""

MARGIN: Final = 5.0
"""A time that is so close to the due time may be the due time itself, and is not used."""


def is_probe(message_id: str) -> bool:
    """Whether a message is a probe."""
    return message_id.startswith(PREFIX)


def without_probes(
    deliveries: list[Delivery],
    settle: Callable[[Sequence[tuple[Delivery, Settlement]]], Any],
    *,
    delete: bool = False,
) -> list[Delivery]:
    """The deliveries that are no probes. Probes are completed; delete: they are gone already."""
    probes = [each for each in deliveries if is_probe(each.envelope.message_id)]
    if not probes:
        return deliveries
    logger.debug("dropped %d clock probes of %s", len(probes), probes[0].queue)
    if not delete:
        settle([(each, Complete()) for each in probes])
    return [each for each in deliveries if not is_probe(each.envelope.message_id)]
