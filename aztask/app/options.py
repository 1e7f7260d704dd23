"""The names and types of what ``App(...)`` and ``app.queue(...)`` take.

Written by docs/generate/settings.py from the settings in `aztask.config`; edit those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TypedDict

from aztask.message.encryption import ContentCodec
from aztask.retry import RetryStrategy
from aztask.support.display import Secret


class AppOptions(TypedDict, total=False):
    """The options of ``App(...)``, described in docs/reference/settings.md."""

    owner: str
    lease: float | timedelta
    max_lease: float | timedelta
    renew_at: float
    max_deliveries: int
    max_steps: int
    max_wait: float | timedelta
    unknown_task_grace: float | timedelta
    result_retention: float | timedelta
    serializer: str
    accept: Sequence[str]
    signing_keys: Sequence[str | Secret]
    id_key: str | Secret
    encryption_keys: Sequence[str | Secret]
    encrypt: bool
    content_codec: ContentCodec
    old_signatures: bool
    signature_max_age: float | timedelta
    signature_clock_skew: float | timedelta
    environment: str
    version: str
    celery_may_send: Sequence[str]
    strict: bool
    argsrepr: bool
    poll_ceiling: float | timedelta
    default_queue: str
    retry_strategy: RetryStrategy
    max_held: int
    events_container: str
    events_account: str | Secret
    events_retention: float | timedelta
    events_keep: bool
    events_max_bytes: int
    lease_advice: str
    lease_advice_account: str | Secret
    payloads: str
    payloads_account: str | Secret
    payload_threshold: int
    payload_lifetime: float | timedelta
    adaptive: bool | tuple[float | timedelta, float | timedelta]


class QueueOptionNames(TypedDict, total=False):
    """The options of ``app.queue(name, ...)``, described in docs/reference/settings.md."""

    lease: float | timedelta
    max_lease: float | timedelta
    max_deliveries: int
    duplicate_window: float | timedelta
    time_to_live: float | timedelta
    sessions: bool
    adaptive: bool | tuple[float | timedelta, float | timedelta]
    signature_max_age: float | timedelta
    priorities: Mapping[str, int]
    shards: int
    old_shards: int
