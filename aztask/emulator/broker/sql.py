"""The SQL dialect of a subscription's rules, parsed once into nested functions.

A filter is one expression: ``AND OR NOT``, comparisons, ``+ - * / %``, ``[NOT] LIKE ... ESCAPE``,
``[NOT] IN``, ``IS [NOT] NULL``, ``EXISTS(name)``, literals, ``sys.Name``, ``user.Name``,
``[Name]``, ``@parameter``, ``newid()``, ``property(name)`` or ``p(name)``. An action is a list of
``SET name = expression`` and ``REMOVE name``. Semicolons at the end of each are optional.
(learn.microsoft.com, "Subscription rule SQL filter syntax" and "... SQL action syntax")

Rules
1. Logic has three values: a missing property is NULL, and a comparison with NULL or of different
   types gives NULL.
2. Depth and length are limited, those of texts and patterns that a message brings as well.
   Anything unsupported is refused with its position, never guessed.
3. Numbers calculate as in C#, as documented: the quotient of two integers is an integer. What C#
   could not calculate is a `SqlFault`, which the service calls a filter exception.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import uuid4

from aztask.emulator.amqp.encode import Described
from aztask.errors import ConfigurationError, did_you_mean

MAX_LENGTH = 1024
MAX_TEXT = 64 * 1024  # a message has no room for a longer property
MAX_NESTING = 32
MAX_STATEMENTS = 32

SETTABLE = (
    *("ContentType", "CorrelationId", "Label", "MessageId", "ReplyTo", "ReplyToSessionId"),
    *("SessionId", "Subject", "To"),
)
"""The system properties that an action may set, by the service's names."""
OF_THE_BROKER = (
    *("DeadLetterSource", "DeliveryCount", "EnqueuedSequenceNumber", "EnqueuedTimeUtc"),
    *("ExpiresAtUtc", "LockToken", "LockedUntilUtc", "PartitionKey", "ScheduledEnqueueTimeUtc"),
    *("SequenceNumber", "State", "TimeToLive", "ViaPartitionKey"),
)
"""The other system properties, which an action may only read."""
_SYSTEM = {name.lower(): name for name in (*SETTABLE, *OF_THE_BROKER)}
_RESERVED = frozenset(
    ("AND", "ESCAPE", "EXISTS", "FALSE", "IN", "IS", "LIKE", "NOT", "NULL", "OR", "REMOVE", "SET")
) | {"TRUE"}


class SqlFault(Exception):
    """An expression that has no value for this message, such as a division by zero."""


@dataclass(frozen=True, slots=True)
class NameLookup:
    """The values of system properties, application properties and parameters, by name.

    system: gets one of the service's names.
    """

    system: Callable[[str], Any]
    user: Callable[[str], Any]
    parameters: Mapping[str, Any]


Expression = Callable[[NameLookup], Any]

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)
    | (?P<text>'(?:[^']|'')*')
    | (?P<quoted>\[(?:[^\]]|\]\])+\]|"(?:[^"]|"")+")
    | (?P<name>[^\W\d]\w*)
    | (?P<parameter>@[^\W\d]\w*)
    | (?P<operator><>|!=|<=|>=|[=<>+\-*/%(),.;])
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


def _tokens(text: str, what: str) -> list[Token]:
    if len(text) > MAX_LENGTH:
        raise ConfigurationError(f"{what}: {len(text)} characters; {MAX_LENGTH} are allowed")
    tokens, position = [], 0
    while text[position:].strip():
        found = _TOKEN.match(text, position)
        if found is None:
            raise ConfigurationError(
                f"{what}: {text[position : position + 20].strip()!r} is not understood"
            )
        kind = str(found.lastgroup)
        tokens.append(Token(kind, found[kind], found.start(kind)))
        position = found.end()
    return [*tokens, Token("end", "", len(text))]


def parse_expression(text: str) -> Expression:
    """Return the expression of a filter. Raises ConfigurationError with the bad part's position."""
    parser = _Parser(text, "filter")
    expression = parser.either()
    parser.expect_end()
    return expression


class ActionStatement(NamedTuple):
    """One statement of an action.

    system: the property is a system property. expression: its new value; None removes it.
    """

    system: bool
    name: str
    expression: Expression | None


def parse_action(text: str) -> list[ActionStatement]:
    """Return the statements of an action. Raises ConfigurationError with the bad part's position.

    The grammar of the documentation separates them by commas, its examples by semicolons.
    """
    return _Parser(text, "action").statements()


def system_name(name: str, where: str = "filter") -> str:
    """Return the service's spelling of a system property. Raises ConfigurationError."""
    found = _SYSTEM.get(name.lower())
    if found is None:
        hint = did_you_mean(name, list(_SYSTEM.values()))
        raise ConfigurationError(f"{where}: there is no system property {name[:60]!r}.{hint}")
    return found


class _Parser:
    """A recursive descent parser: one method per level of precedence, loosest first."""

    def __init__(self, text: str, what: str) -> None:
        """`what`: filter or action, for the errors."""
        self._what = what
        self._tokens = _tokens(text, what)
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
        return ConfigurationError(
            f"{self._what}: {what} at character {token.position}, not {found}"
        )

    def expect_end(self) -> None:
        """Raise ConfigurationError unless all tokens were parsed."""
        while self._take(";"):
            pass
        if self._tokens[self._next].kind != "end":
            raise self._error("an operator is expected")

    def statements(self) -> list[ActionStatement]:
        """Parse the rest of the text, all of which is one action."""
        found: list[ActionStatement] = []
        while not found or self._tokens[self._next].kind != "end":
            word = self._take("SET", "REMOVE")
            if not word:
                raise self._error("SET or REMOVE is expected")
            system, name = self._property()
            if system and name not in SETTABLE:
                raise self._error(f"an action cannot change sys.{name},")
            expression = None
            if word == "SET":
                self._demand("=")
                expression = self._sum()
            found.append(ActionStatement(system, name, expression))
            while self._take(";", ","):
                pass
        if len(found) > MAX_STATEMENTS:
            raise ConfigurationError(
                f"action: {len(found)} statements; {MAX_STATEMENTS} are allowed"
            )
        return found

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
            mark = escape(names) if escape else None
            if escape and not (isinstance(mark, str) and len(mark) == 1):
                raise SqlFault(f"ESCAPE must be followed by one character, not {mark!r}")
            if len(text) > MAX_LENGTH:
                raise SqlFault(f"a pattern of {len(text)} characters; {MAX_LENGTH} are allowed")
            return _like(value, _pattern(text, mark))

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
            left = _calculate(word, left, self._product())
        return left

    def _product(self) -> Expression:
        left = self._signed()
        while word := self._take("*", "/", "%"):
            left = _calculate(word, left, self._signed())
        return left

    def _signed(self) -> Expression:
        sign = 1
        while word := self._take("-", "+"):
            sign = -sign if word == "-" else sign
        inner = self._atom()
        if sign > 0:
            return inner
        return _calculate("*", inner, lambda _names: -1)

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
        if word in ("EXISTS", "NEWID", "PROPERTY", "P") and self._take("("):
            return self._call(word)
        self._next -= 1
        system, name = self._property()
        return lambda names: (names.system if system else names.user)(name)

    def _call(self, word: str) -> Expression:
        """Parse the rest of a function's call, whose bracket was taken."""
        if word == "NEWID":
            self._demand(")")
            return lambda _names: uuid4()
        if word == "EXISTS":
            system, name = self._property()
            self._demand(")")
            return lambda names: (names.system if system else names.user)(name) is not None
        named = self._sum()
        self._demand(")")
        return lambda names: _property_called(named(names), names)

    def _property(self) -> tuple[bool, str]:
        """Parse the name of a property; return whether it is a system property, and the name."""
        scope = self._take("SYS", "USER")
        if scope and not self._take("."):
            return False, self._tokens[self._next - 1].text  # a property that is called so
        token = self._tokens[self._next]
        if token.kind == "quoted":
            close = "]" if token.text[0] == "[" else '"'
            name = token.text[1:-1].replace(close * 2, close)
        elif token.kind == "name" and token.word() not in _RESERVED:
            name = token.text
        else:
            raise self._error("a name is expected")
        self._next += 1
        if scope != "SYS":
            return False, name
        return True, system_name(name, self._what)


def _property_called(name: Any, names: NameLookup) -> Any:
    """Return the value of the property that an expression names: ``sys.Label`` or ``size``."""
    if name is None:
        return None
    if not isinstance(name, str):
        raise SqlFault(f"property() needs a name, not {name!r}")
    scope, separator, rest = name.partition(".")
    if separator and scope.lower() == "sys":
        try:
            return names.system(system_name(rest))
        except ConfigurationError as error:
            raise SqlFault(str(error)) from None
    return names.user(rest if separator and scope.lower() == "user" else name)


class _Piece(NamedTuple):
    """A part of a LIKE pattern between two ``%``. pattern: matches texts of this length only."""

    length: int
    pattern: re.Pattern[str]


@lru_cache(maxsize=512)
def _pattern(text: str, escape: str | None) -> list[_Piece]:
    """Return the pieces of a LIKE pattern between its unescaped ``%``."""
    pieces: list[list[str]] = [[]]
    characters = iter(text)
    for character in characters:
        if character == escape:
            pieces[-1].append(re.escape(next(characters, character)))
        elif character == "%":
            pieces.append([])
        else:
            pieces[-1].append("." if character == "_" else re.escape(character))
    return [_Piece(len(each), re.compile("".join(each), re.DOTALL)) for each in pieces]


def _like(value: str, pieces: list[_Piece]) -> bool:
    """Return whether the pattern matches all of `value`.

    Each piece has a fixed length and is looked for once, from left to right. One regular expression
    for all could take exponentially many steps, and filters are untrusted input.
    """
    first, last = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return first.pattern.fullmatch(value) is not None
    at, end = first.length, len(value) - last.length
    if at > end or not first.pattern.match(value) or not last.pattern.fullmatch(value, end):
        return False
    for piece in pieces[1:-1]:
        found = piece.pattern.search(value, at, end)
        if found is None:
            return False
        at = found.end()
    return True


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
        ordered = ordered or (_is_duration(first) and _is_duration(second))
        equatable = type(first) is type(second) and operation in (operator.eq, operator.ne)
        return operation(first, second) if ordered or equatable else None

    return compare


MAX_INTEGER = 2**63 - 1
_EXACT: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    # C# rounds towards zero, and a remainder has the sign of the dividend
    "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) is (b < 0) else -1),
    "%": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}
_REAL: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a / b if b else math.copysign(math.inf, b) * a if a else math.nan,
    "%": lambda a, b: math.fmod(a, b) if b and math.isfinite(a) else math.nan,
}


def _calculate(word: str, left: Expression, right: Expression) -> Expression:
    def calculate(names: NameLookup) -> Any:
        first, second = left(names), right(names)
        if first is None or second is None:
            return None
        if word == "+" and (isinstance(first, str) or isinstance(second, str)):
            if all(isinstance(each, str) or _is_number(each) for each in (first, second)):
                text = f"{first}{second}"
                if len(text) > MAX_TEXT:
                    raise SqlFault(f"a text of {len(text)} characters; {MAX_TEXT} are allowed")
                return text
        elif _is_number(first) and _is_number(second):
            return _number(word, first, second)
        raise SqlFault(f"{type(first).__name__} {word} {type(second).__name__} has no value")

    return calculate


def _number(word: str, first: int | float, second: int | float) -> int | float:
    if isinstance(first, float) or isinstance(second, float):
        return _REAL[word](float(first), float(second))
    if word in "/%" and not second:
        raise SqlFault("a division by zero")
    result = _EXACT[word](first, second)
    if not -MAX_INTEGER - 1 <= result <= MAX_INTEGER:
        raise SqlFault("a number of more than 64 bits")
    return result


def _is_duration(value: Any) -> bool:
    return (
        isinstance(value, Described)
        and value.descriptor == "com.microsoft:timespan"
        and isinstance(value.value, int)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
