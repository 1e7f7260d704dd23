"""Changes of SQL: terms dropped, comparisons moved, values kept that were to be cleared."""

from __future__ import annotations

import re
from collections.abc import Iterator

_WORDS = re.compile(
    r"\b(SELECT|UPDATE|DELETE|INSERT|WHERE|AND|SET|VALUES|RETURNING|FROM|ORDER BY)\b"
)
_TERM = r"[\w.]+"

CHANGES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r" = ", " != "),
        (r" != ", " = "),
        (r" > ", " >= "),
        (r" >= ", " > "),
        (r" < ", " <= "),
        (r" <= ", " < "),
        (r" AND ", " OR "),
        (r" OR ", " AND "),
        # a term that binds a parameter is made true, one that binds none is dropped
        (rf"(?<!SET )(?<!, )\b{_TERM} (?:=|>|<|>=|<=|!=) \?", "(1 OR ?)"),
        (rf" AND {_TERM} (?:=|>|<|>=|<=|!=) {_TERM}(?![\w.(])", ""),
        (rf" AND {_TERM} IS (?:NOT )?NULL", ""),
        (rf"({_TERM}) = NULL", r"\1 = \1"),
        (r"IS NULL", "IS NOT NULL"),
        (r"IS NOT NULL", "IS NULL"),
        (r"NOT EXISTS", "EXISTS"),
        (r"NOT IN", "IN"),
        (r"\bmin\(", "max("),
        (r"\bmax\(", "min("),
        (r" \+ 1\b", " - 1"),
        (r" - 1\b", " + 1"),
        (r" DESC\b", " ASC"),
        (rf" ORDER BY {_TERM}(?: DESC)?", ""),
        (r"coalesce\(([^,()]+), ([^,()]+)\)", r"\1"),
        (r"DISTINCT ", ""),
    )
)


def is_sql(text: str) -> bool:
    """Whether a string is (part of) a statement, by its words in capitals."""
    return _WORDS.search(text) is not None


def sql_changes(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, replacement) of each change."""
    for pattern, replacement in CHANGES:
        for match in pattern.finditer(text):
            yield match.start(), match.end(), match.expand(replacement)
