"""The names and types of what ``App(...)`` and ``app.queue(...)`` take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from aztask.masking import Secret
from aztask.retry import RetryStrategy


class AppOptions(TypedDict, total=False):
    """What ``App(...)`` takes beside its name and addresses; see `aztask.config.Settings`."""

    lease: float
    max_lease: float
    renew_at: float
    max_deliveries: int
    unknown_task_grace: float
    result_retention: float
    serializer: str
    accept: Sequence[str]
    signing_keys: Sequence[str | Secret]
    poll_ceiling: float
    default_queue: str
    events_container: str
    events_account: str | Secret
    events_keep: bool
    events_max_bytes: int
    retry_strategy: RetryStrategy
    max_held: int
    lease_advice: str
    lease_advice_account: str | Secret
    adaptive: bool | tuple[float, float]


class QueueOptionNames(TypedDict, total=False):
    """What ``app.queue(name, ...)`` takes; see `aztask.config.QueueSettings`."""

    lease: float
    max_lease: float
    max_deliveries: int
    duplicate_window: float
    time_to_live: float
    adaptive: bool | tuple[float, float]
    sessions: bool
