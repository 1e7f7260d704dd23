"""Queue names of Azure Storage, with room for the suffix of our dead-letter queues.

Source: the service's documentation, "Naming queues and metadata".
"""

from __future__ import annotations

import re
from typing import Final

from aztask.errors import InvalidQueueName

POISON_SUFFIX: Final = "-poison"
LONGEST_NAME: Final = 63 - len(POISON_SUFFIX)

_NAME: Final = re.compile(r"[a-z0-9](?:-?[a-z0-9])+", re.ASCII)


def check_name(queue: str) -> None:
    """Raise InvalidQueueName unless the service allows the name and its dead-letter queue's."""
    shown = ascii(queue if len(queue) <= 2 * LONGEST_NAME else queue[:LONGEST_NAME] + "...")
    if not 3 <= len(queue) <= LONGEST_NAME or not _NAME.fullmatch(queue):
        raise InvalidQueueName(
            f"{shown} cannot name a Storage queue: use 3 to {LONGEST_NAME} characters, lower-case "
            "letters, digits and single hyphens between them"
        )
    if queue.endswith(POISON_SUFFIX):
        raise InvalidQueueName(
            f"{shown} looks like a dead-letter queue, because it ends in {POISON_SUFFIX}: choose "
            f"a name of 3 to {LONGEST_NAME} characters with another ending"
        )


def poison_name(queue: str) -> str:
    """The name of the queue that holds the dead letters."""
    return queue + POISON_SUFFIX
