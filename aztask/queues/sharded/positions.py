"""Positions in a sharded queue: which shard a message is in, and its position there.

Rules
1. A number of the service becomes a number: `STRIDE` times it, plus the shard. So the order of
   positions is about that of the sends, and they stay as small as positions elsewhere.
2. A text becomes a text with the shard in front: ``3:`` and the position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aztask.address.shards import MOST_SHARDS
from aztask.errors import ConfigurationError
from aztask.queues.base import Position

STRIDE: Final = MOST_SHARDS


def outer_position(shard: int, position: Position) -> Position:
    """The position in the sharded queue of a message of this shard."""
    if isinstance(position, int):
        return position * STRIDE + shard
    return f"{shard}:{position}"


def inner_position(position: Position) -> tuple[int, Position]:
    """The shard of a position, and the position there. Raises ConfigurationError for another text.

    A number may be given as text, as on a command line.
    """
    if isinstance(position, str):
        shard, colon, rest = position.partition(":")
        if colon and shard.isdecimal():
            return int(shard), rest
        if not position.isdecimal():
            raise ConfigurationError(
                f"{position!r} is not a position of a queue with shards; give one that peek shows"
            )
    inner, shard_number = divmod(int(position), STRIDE)
    return shard_number, inner


def by_shard(positions: Sequence[Position], count: int) -> dict[int, list[Position]]:
    """The positions in each shard. Those in a shard that does not exist are skipped."""
    found: dict[int, list[Position]] = {}
    for each in positions:
        shard, inner = inner_position(each)
        if shard < count:
            found.setdefault(shard, []).append(inner)
    return found


def behind(after: Position | None, shard: int) -> Position | None:
    """Behind which position of a shard those come that are behind `after` in the whole queue."""
    if after is None:
        return None
    known, inner = inner_position(after)
    if isinstance(inner, str):
        raise ConfigurationError(f"{after!r} is not the position of a page; give a number")
    return inner if shard <= known else inner - 1
