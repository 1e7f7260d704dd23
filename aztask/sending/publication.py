"""Messages that are to be published, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aztask.message.message import TaskMessage


class Publication(NamedTuple):
    """Messages for one queue, to be received `delay` seconds from now."""

    queue: str
    messages: Sequence[TaskMessage]
    delay: float
