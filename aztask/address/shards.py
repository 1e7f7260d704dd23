"""Shards: the queues of a service that hold the messages of one queue of an app.

Rules
1. Shard 0 has the name of the queue, shard 3 of ``orders`` is ``orders-shard-3``. All services
   allow such names. So a queue that gets shards keeps its messages, and programs that know of none
   send to shard 0.
2. Senders choose among the first `ShardCount.sent`. Readers go through `ShardCount.read`, which
   are more while the shards of a larger number are emptied.
3. A message belongs to the shard that a hash of its session says, else of its task id, else of its
   message id, else of its body. So all messages of a task, also of different senders, are in one
   shard, where its service recognises copies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from aztask.errors import ConfigurationError
from aztask.message.envelope import Envelope
from aztask.support.checks import shown

MOST_SHARDS: Final = 64

_NAME: Final = re.compile(r"(.+)-shard-([1-9][0-9]?)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ShardCount:
    """How many shards a queue has: for those that send, and for those that read; 1 is none."""

    sent: int = 1
    read: int = 1

    def __bool__(self) -> bool:
        return self.read > 1


UNSHARDED: Final = ShardCount()

ShardCounts = Mapping[str, ShardCount]
"""The queues that have shards."""


def shard_name(queue: str, number: int) -> str:
    """The name of the queue that is shard `number` of `queue`."""
    return queue if number == 0 else f"{queue}-shard-{number}"


def shard_names(queue: str, count: int) -> tuple[str, ...]:
    """The names of all shards."""
    return tuple(shard_name(queue, number) for number in range(count))


def read_shard_name(name: str) -> tuple[str, int]:
    """The queue and the number of the shard; another queue is shard 0 of itself."""
    found = _NAME.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, 0)


def shard_of_session(session: str, count: int) -> int:
    """The shard of a session, also for its receiver."""
    return _shard(b"session", session.encode("utf-8", "surrogatepass"), count)


def shard_of(envelope: Envelope, count: int) -> int:
    """The shard that the message belongs to, see rule 3."""
    if envelope.session is not None:
        return shard_of_session(envelope.session, count)
    name = envelope.headers.get("id") or envelope.message_id
    if isinstance(name, str) and name:
        return _shard(b"id", name.encode("utf-8", "surrogatepass"), count)
    return _shard(b"body", envelope.body, count)


def _shard(kind: bytes, value: bytes, count: int) -> int:
    digest = sha256(kind + b"\0" + value).digest()
    return int.from_bytes(digest[:8], "big") % count


def check_shards(name: str, value: Any) -> int:
    """The number of shards, 1 to `MOST_SHARDS`: a check of a setting."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_SHARDS:
        raise ConfigurationError(
            f"{name} is a whole number from 1 to {MOST_SHARDS}, not {shown(value)}"
        )
    return value
