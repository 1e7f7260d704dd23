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


Test = Callable[[HasProperties], bool]

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
    """A condition. test: what a row must pass, for the filter's parameters."""

    test: Callable[[Values], Test]
    bounds: tuple[Bound, ...] = ()

    def range_of(self, name: str, parameters: Values) -> tuple[str, str | None]:
        """The least and the greatest value that a key can have.

        Rows outside are not looked at; `test` decides about those inside.
        """
        least, greatest = "", None
        for bound in self.bounds:
            if bound.name == name:
                value, how = bound.value(parameters), bound.how
                if how == "eq":
                    return value, value
                if how in ("ge", "gt"):
                    least = max(least, value)
                elif how in ("le", "lt"):
                    greatest = value if greatest is None else min(greatest, value)
        return least, greatest


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
        tests = [part.test for part in parts]

        def either(given: Values) -> Test:
            bound = [test(given) for test in tests]

            def passes(row: HasProperties) -> bool:
                for each in bound:  # noqa: SIM110  # `any` of a generator takes three times as long
                    if each(row):
                        return True
                return False

            return passes

        return Filter(either)

    def _both(self) -> Filter:
        parts = [self._single()]
        while self._is_next("and"):
            parts.append(self._single())
        if len(parts) == 1:
            return parts[0]
        tests = [part.test for part in parts]
        bounds = tuple(bound for part in parts for bound in part.bounds)

        def both(given: Values) -> Test:
            bound = [test(given) for test in tests]

            def passes(row: HasProperties) -> bool:
                for each in bound:  # noqa: SIM110  # `all` of a generator takes three times as long
                    if not each(row):
                        return False
                return True

            return passes

        return Filter(both, bounds)

    def _single(self) -> Filter:
        if self._is_next("("):
            found = self.either()
            if not self._is_next(")"):
                raise ValueError("a parenthesis is not closed")
            return found
        name, how, value = self.tokens.pop(0), self.tokens.pop(0), _value(self.tokens.pop(0))
        compare = _COMPARISONS[how]

        def single(given: Values) -> Test:
            other = value(given)
            kinds = _kinds_of(other)

            def passes(row: HasProperties) -> bool:
                mine = row.get(name)
                return type(mine) in kinds and compare(mine, other)

            return passes

        return Filter(single, (Bound(name, how, value),))

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


def _kinds_of(other: Any) -> tuple[type, ...]:
    """The types of the properties that can be compared with this value."""
    kind = type(other)
    if kind in _NUMBERS:
        return _NUMBERS
    return (kind,) if kind in (bool, str, bytes, datetime) else ()
