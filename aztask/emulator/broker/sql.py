"""The SQL dialect of subscription filters: one expression, parsed once into nested functions.

Supported: ``AND OR NOT``, comparisons, ``+ - * / %``, ``[NOT] LIKE ... ESCAPE``, ``[NOT] IN``,
``IS [NOT] NULL``, ``EXISTS(name)``, literals, ``sys.Name``, ``user.Name``, ``[Name]``,
``@parameter``.

Rules
1. Logic has three values: a missing property is NULL, and a comparison with NULL or of different
   types gives NULL.
2. Depth and length are limited. Anything unsupported is refused with its position, never guessed.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from aztask.errors import ConfigurationError

MAX_LENGTH = 1024
MAX_NESTING = 32


@dataclass(frozen=True, slots=True)
class NameLookup:
    """The values of system properties, application properties and parameters, by name."""

    system: Callable[[str], Any]
    user: Callable[[str], Any]
    parameters: Mapping[str, Any]


Expression = Callable[[NameLookup], Any]

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)
    | (?P<text>'(?:[^']|'')*')
    | (?P<quoted>\[(?:[^\]]|\]\])+\]|"(?:[^"]|"")+")
    | (?P<name>[A-Za-z_][\w]*)
    | (?P<parameter>@[A-Za-z_]\w*)
    | (?P<operator><>|!=|<=|>=|[=<>+\-*/%(),.])
    )""",
    re.VERBOSE,
)
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Token(NamedTuple):
    """One token. kind: a group of the pattern, or "end". position: of the first character."""

    kind: str
    text: str
    position: int

    def word(self) -> str:
        """Return the keyword or operator in upper case, "" for other tokens."""
        return self.text.upper() if self.kind in ("name", "operator") else ""


def _tokens(text: str) -> list[Token]:
    if len(text) > MAX_LENGTH:
        raise ConfigurationError(f"a filter of {len(text)} characters; {MAX_LENGTH} are allowed")
    tokens, position = [], 0
    while text[position:].strip():
        found = _TOKEN.match(text, position)
        if found is None:
            raise ConfigurationError(
                f"filter: {text[position : position + 20].strip()!r} is not understood"
            )
        kind = str(found.lastgroup)
        tokens.append(Token(kind, found[kind], found.start(kind)))
        position = found.end()
    return [*tokens, Token("end", "", len(text))]


def parse_expression(text: str) -> Expression:
    """Return the expression of a filter. Raises ConfigurationError with the bad part's position."""
    parser = _Parser(_tokens(text))
    expression = parser.either()
    parser.expect_end()
    return expression


class _Parser:
    """A recursive descent parser: one method per level of precedence, loosest first."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._next = 0
        self._depth = 0

    def _take(self, *words: str) -> str:
        word = self._tokens[self._next].word()
        if word and word in words:
            self._next += 1
            return word
        return ""

    def _demand(self, word: str) -> None:
        if not self._take(word):
            raise self._error(f"{word} is expected")

    def _error(self, what: str) -> ConfigurationError:
        token = self._tokens[self._next]
        found = repr(token.text) if token.text else "the end"
        return ConfigurationError(f"filter: {what} at character {token.position}, not {found}")

    def expect_end(self) -> None:
        """Raise ConfigurationError unless all tokens were parsed."""
        if self._tokens[self._next].kind != "end":
            raise self._error("an operator is expected")

    def either(self) -> Expression:
        """Parse a complete expression, whose loosest operator is OR."""
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._error(f"at most {MAX_NESTING} nested expressions are allowed")
        left = self._both()
        while self._take("OR"):
            left = _or(left, self._both())
        self._depth -= 1
        return left

    def _both(self) -> Expression:
        left = self._negated()
        while self._take("AND"):
            left = _and(left, self._negated())
        return left

    def _negated(self) -> Expression:
        count = 0
        while self._take("NOT"):
            count += 1
        inner = self._compared()
        return _not(inner) if count % 2 else inner

    def _compared(self) -> Expression:
        left = self._sum()
        if word := self._take(*_COMPARISONS):
            return _compare(_COMPARISONS[word], left, self._sum())
        if self._take("IS"):
            expected = not self._take("NOT")
            self._demand("NULL")
            return lambda names: (left(names) is None) is expected
        negated = bool(self._take("NOT"))
        if self._take("LIKE"):
            test = self._like(left)
        elif self._take("IN"):
            test = self._among(left)
        elif negated:
            raise self._error("LIKE or IN is expected")
        else:
            return left
        return _not(test) if negated else test

    def _like(self, left: Expression) -> Expression:
        pattern = self._sum()
        escape = self._sum() if self._take("ESCAPE") else None

        def like(names: NameLookup) -> Any:
            value, text = left(names), pattern(names)
            if not isinstance(value, str) or not isinstance(text, str):
                return None
            return _like(value, _pattern(text, escape(names) if escape else None))

        return like

    def _among(self, left: Expression) -> Expression:
        self._demand("(")
        choices = [self._sum()]
        while self._take(","):
            choices.append(self._sum())
        self._demand(")")
        tests = [_compare(operator.eq, left, choice) for choice in choices]

        def among(names: NameLookup) -> Any:
            results = [test(names) for test in tests]
            return True if True in results else None if None in results else False

        return among

    def _sum(self) -> Expression:
        left = self._product()
        while word := self._take("+", "-"):
            left = _calculate(operator.add if word == "+" else operator.sub, left, self._product())
        return left

    def _product(self) -> Expression:
        left = self._signed()
        while word := self._take("*", "/", "%"):
            operation = {"*": operator.mul, "/": operator.truediv, "%": operator.mod}[word]
            left = _calculate(operation, left, self._signed())
        return left

    def _signed(self) -> Expression:
        sign = 1
        while word := self._take("-", "+"):
            sign = -sign if word == "-" else sign
        inner = self._atom()
        if sign > 0:
            return inner
        return _calculate(operator.mul, inner, lambda _names: -1)

    def _atom(self) -> Expression:
        if self._take("("):
            inner = self.either()
            self._demand(")")
            return inner
        token = self._tokens[self._next]
        self._next += token.kind != "end"
        match token.kind:
            case "number":
                number = float(token.text) if re.search("[.eE]", token.text) else int(token.text)
                return lambda _names: number
            case "text":
                text = token.text[1:-1].replace("''", "'")
                return lambda _names: text
            case "parameter":
                return lambda names: names.parameters.get(token.text)
            case "name" | "quoted":
                return self._named(token)
        self._next -= token.kind != "end"
        raise self._error("a value is expected")

    def _named(self, token: Token) -> Expression:
        word = token.word()
        if word in ("TRUE", "FALSE"):
            return lambda _names: word == "TRUE"
        if word == "NULL":
            return lambda _names: None
        if word == "EXISTS" and self._take("("):
            found = self._atom()
            self._demand(")")
            return lambda names: found(names) is not None
        if word in ("SYS", "USER") and self._take("."):
            name = _unquoted(self._tokens[self._next])
            self._next += 1
            if word == "SYS":
                return lambda names: names.system(name)
            return lambda names: names.user(name)
        name = _unquoted(token)
        return lambda names: names.user(name)


def _unquoted(token: Token) -> str:
    if token.kind == "name":
        return token.text
    if token.kind == "quoted":
        close = "]" if token.text[0] == "[" else '"'
        return token.text[1:-1].replace(close * 2, close)
    raise ConfigurationError(f"filter: a name is expected at character {token.position}")


_ANY_RUN, _ANY_ONE = object(), object()


def _pattern(text: str, escape: Any) -> list[object]:
    """Return the characters of a LIKE pattern, with marks for its unescaped ``%`` and ``_``."""
    parts: list[object] = []
    position = 0
    while position < len(text):
        character = text[position]
        if character == escape and position + 1 < len(text):
            position += 1
            parts.append(text[position])
        else:
            parts.append({"%": _ANY_RUN, "_": _ANY_ONE}.get(character, character))
        position += 1
    return parts


def _like(value: str, pattern: list[object]) -> bool:
    """Return whether the pattern matches all of `value`.

    Takes at most len(value) * len(pattern) steps. A regular expression could take exponentially
    many, and filters are untrusted input.
    """
    at = mark = 0
    run, resume = -1, 0
    while at < len(value):
        part = pattern[mark] if mark < len(pattern) else None
        if part is _ANY_RUN:
            run, resume = mark, at
            mark += 1
        elif part is _ANY_ONE or part == value[at]:
            at, mark = at + 1, mark + 1
        elif run >= 0:
            resume += 1
            at, mark = resume, run + 1
        else:
            return False
    return all(part is _ANY_RUN for part in pattern[mark:])


def _or(left: Expression, right: Expression) -> Expression:
    def either(names: NameLookup) -> Any:
        first, second = left(names), right(names)
        if first is True or second is True:
            return True
        return False if first is False and second is False else None

    return either


def _and(left: Expression, right: Expression) -> Expression:
    def both(names: NameLookup) -> Any:
        first, second = left(names), right(names)
        if first is False or second is False:
            return False
        return True if first is True and second is True else None

    return both


def _not(inner: Expression) -> Expression:
    def negated(names: NameLookup) -> Any:
        value = inner(names)
        return not value if isinstance(value, bool) else None

    return negated


def _compare(
    operation: Callable[[Any, Any], Any], left: Expression, right: Expression
) -> Expression:
    def compare(names: NameLookup) -> Any:
        first, second = left(names), right(names)
        if first is None or second is None:
            return None
        numbers = _is_number(first) and _is_number(second)
        ordered = numbers or (isinstance(first, str) and isinstance(second, str))
        equatable = type(first) is type(second) and operation in (operator.eq, operator.ne)
        return operation(first, second) if ordered or equatable else None

    return compare


def _calculate(
    operation: Callable[[Any, Any], Any], left: Expression, right: Expression
) -> Expression:
    def calculate(names: NameLookup) -> Any:
        first, second = left(names), right(names)
        if isinstance(first, str) and isinstance(second, str) and operation is operator.add:
            return first + second
        if not _is_number(first) or not _is_number(second):
            return None
        try:
            return operation(first, second)
        except (ZeroDivisionError, OverflowError):
            return None

    return calculate


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
