"""Filters of the table service, as far as aztask writes them.

A filter is a condition of comparisons, ``and``, ``or`` and parentheses (OData 3.0, "Filter System
Query Option"). A comparison with a property that a row does not have, or of another type, is false.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, Protocol

Values = Mapping[str, Any]


class HasProperties(Protocol):
    """A row, as far as a filter reads it."""

    def get(self, name: str) -> Any:
        """The property; None if the row has none."""


Test = Callable[[HasProperties, Values], bool]

_TOKEN: Final = re.compile(r"\(|\)|'(?:[^']|'')*'|@\w+|[\w.]+")
_COMPARISONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
}
_NUMBERS: Final = (int, float)


@dataclass(frozen=True, slots=True)
class Bound:
    """A comparison that every row of the answer must pass: `name` `how` the value."""

    name: str
    how: str
    value: Callable[[Values], Any]


@dataclass(frozen=True, slots=True)
class Filter:
    """A condition. passes: of a row's properties and the filter's parameters."""

    passes: Test
    bounds: tuple[Bound, ...] = ()

    def range_of(self, name: str, parameters: Values) -> tuple[str, str | None, bool]:
        """The least and the greatest value that a key can have, and whether it is exactly one.

        Rows outside are not looked at; `passes` decides about those inside.
        """
        least, greatest, exact = "", None, False
        for bound in self.bounds:
            if bound.name == name:
                value = bound.value(parameters)
                if bound.how == "eq":
                    return value, value, True
                if bound.how in ("ge", "gt"):
                    least = max(least, value)
                elif bound.how in ("le", "lt"):
                    greatest = value if greatest is None else min(greatest, value)
        return least, greatest, exact


@lru_cache(maxsize=1000)
def filter_of(text: str) -> Filter:
    """The filter that a text means. Raises ValueError for one that it cannot read."""
    parser = _Parser(_TOKEN.findall(text))
    found = parser.either()
    if parser.tokens:
        raise ValueError(f"this filter is not understood: {text}")
    return found


class _Parser:
    """Reads the tokens of one filter, from the first one on."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens

    def either(self) -> Filter:
        parts = [self._both()]
        while self._is_next("or"):
            parts.append(self._both())
        if len(parts) == 1:
            return parts[0]
        tests = [part.passes for part in parts]
        return Filter(lambda row, given: any(test(row, given) for test in tests))

    def _both(self) -> Filter:
        parts = [self._single()]
        while self._is_next("and"):
            parts.append(self._single())
        if len(parts) == 1:
            return parts[0]
        tests = [part.passes for part in parts]
        bounds = tuple(bound for part in parts for bound in part.bounds)
        return Filter(lambda row, given: all(test(row, given) for test in tests), bounds)

    def _single(self) -> Filter:
        if self._is_next("("):
            found = self.either()
            if not self._is_next(")"):
                raise ValueError("a parenthesis is not closed")
            return found
        name, how, value = self.tokens.pop(0), self.tokens.pop(0), _value(self.tokens.pop(0))
        compare = _COMPARISONS[how]

        def passes(row: HasProperties, given: Values) -> bool:
            mine, other = row.get(name), value(given)
            return _comparable(mine, other) and compare(mine, other)

        return Filter(passes, (Bound(name, how, value),))

    def _is_next(self, token: str) -> bool:
        if self.tokens and self.tokens[0] == token:
            del self.tokens[0]
            return True
        return False


def _value(token: str) -> Callable[[Values], Any]:
    if token.startswith("@"):
        name = token[1:]
        return lambda given: given[name]
    constant: Any
    if token.startswith("'"):
        constant = token[1:-1].replace("''", "'")
    elif token in ("true", "false"):
        constant = token == "true"
    else:
        constant = float(token)
    return lambda given: constant


def _comparable(mine: Any, other: Any) -> bool:
    if isinstance(mine, bool) or isinstance(other, bool):
        return isinstance(mine, bool) and isinstance(other, bool)
    if isinstance(mine, _NUMBERS):
        return isinstance(other, _NUMBERS)
    return any(
        isinstance(mine, kind) and isinstance(other, kind) for kind in (str, bytes, datetime)
    )
