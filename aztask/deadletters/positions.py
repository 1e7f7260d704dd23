"""A set of positions in a queue that stays small with millions of them."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator


class Positions:
    """A frozen set of positions: eight bytes for each number, in ascending order.

    Services without sequence numbers have texts as positions, which need more. Iteration gives
    numbers first. Ascending numbers are the fastest input.
    """

    __slots__ = ("_numbers", "_texts")

    def __init__(self, positions: Iterable[int | str] = ()) -> None:
        """Numbers must be from -2^63 to 2^63 - 1."""
        numbers, texts, last, ascending = array("q"), set(), None, True
        for position in positions:
            if isinstance(position, str):
                texts.add(position)
            else:
                ascending = ascending and (last is None or position > last)
                numbers.append(position)
                last = position
        self._numbers = numbers if ascending else array("q", sorted(set(numbers)))
        self._texts = frozenset(texts)

    def __len__(self) -> int:
        return len(self._numbers) + len(self._texts)

    def __iter__(self) -> Iterator[int | str]:
        yield from self._numbers
        yield from sorted(self._texts)

    def __contains__(self, position: object) -> bool:
        if isinstance(position, int):
            place = bisect_left(self._numbers, position)
            return place < len(self._numbers) and self._numbers[place] == position
        return position in self._texts
