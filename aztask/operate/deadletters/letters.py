"""Values for dead letters: one of them, groups of them, and a selection."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from aztask.errors import ConfigurationError
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.queues.base import Position

# -- a set of positions in a queue that stays small with millions of them ------------------


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


# -- error signatures -----------------------------------------------------------------------
#
# The text of an error without the parts that differ from case to case.
#
# ``ConnectionError: no answer from 10.0.3.7:5432 after 31 s`` and the same error of another host
# have the signature ``ConnectionError: no answer from <address> after <n> s``. So a million dead
# letters become a few groups, and you select a group by a text that you can read.
#
# Rules
# 1. Equal texts have equal signatures in every process and version of Python: nothing is hashed,
#    learned or dependent on a locale.
# 2. A signature contains no digit (except in the name of the error's type), no quoted text, no
#    path, id, address or time: a word in angle brackets replaces them.
# 3. Work is bounded: only the first `READ_LIMIT` characters are read.


READ_LIMIT: Final = 1024
"""Characters of a text that are read: as many as services keep of a dead letter's description."""
SIGNATURE_LIMIT: Final = 160
"""Characters of the longest signature."""

_HEX: Final = "[0-9A-Fa-f]"
_OPENED: Final = r"(?<![\w'\"`])"
"""A quote does not begin in the middle of a word: there it is an apostrophe."""

_STEPS: Final = tuple(
    (re.compile(pattern), word)
    for pattern, word in (
        # Our own note of the number of runs, which is not part of the error.
        (r" \(failed \d+ of \d+ runs\)", ""),
        # Quoted texts, with escapes in them. The end of the last one may have been cut off.
        (rf"{_OPENED}b?(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`)(?!\w)", "<text>"),
        (rf"{_OPENED}b?['\"](?=[^\s'\"])[^'\"]*$", "<text>"),
        (r"\b[a-zA-Z][a-zA-Z0-9+.-]{1,20}://[^\s<>\"']+", "<url>"),
        (r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+", "<email>"),
        (rf"\b{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}\b", "<uuid>"),
        (
            r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?)?"
            r"(?:Z\b|[+-]\d\d:?\d\d\b)?",
            "<time>",
        ),
        (r"\b\d{1,2}:\d\d:\d\d(?:[.,]\d+)?\b", "<time>"),
        (r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b", "<address>"),
        (rf"\[?(?<![\w:])(?:{_HEX}{{0,4}}:){{2,7}}{_HEX}{{0,4}}(?![\w:])\]?(?::\d+)?", "<address>"),
        (rf"\b0[xX]{_HEX}+\b", "<hex>"),
        # Paths: absolute ones, those of Windows, and relative ones that can be nothing else.
        (r"(?<![\w<>/])(?:~|\.{1,2})?/[\w.@%+~-][^\s:;,'\"<>()\[\]{}]*", "<path>"),
        (r"\b[A-Za-z]:\\[^\s;,'\"<>()]*", "<path>"),
        (r"(?<![\w/<])[\w.-]+(?:/[\w.-]+)+\.\w{1,8}\b", "<path>"),
        (r"(?<![\w/<])[\w.-]+(?:/[\w.-]+){2,}", "<path>"),
        (rf"\b(?=[A-Fa-f]*\d)(?=\d*[A-Fa-f]){_HEX}{{8,}}\b", "<hex>"),
        (r"\b(?=[A-Za-z_-]{0,60}\d)[A-Za-z0-9_-]{20,}={0,2}", "<id>"),
        (r"(?<![\w.])[-+]?(?=\d)|(?<=\d)[eE][-+]?(?=\d)", ""),
        (r"\d+(?:[.,_]\d+)*", "<n>"),
        (r"<n>(?:%?[,;:]? ?<n>){2,}", "<n> …"),
        (r"\s+", " "),
    )
)
_TYPE: Final = re.compile(r"[A-Za-z_][\w.]{0,100}(?=: |$)")


@lru_cache(maxsize=4096)
def error_signature(text: str) -> str:
    """The signature of an error's text, at most `SIGNATURE_LIMIT` characters; "" for an empty text.

    * `text`: ``Type: message``, as in an event or a dead letter's description. The name of the type
      stays as it is.
    """
    text = " ".join(text[:READ_LIMIT].split())
    kind = _TYPE.match(text)
    head = kind.group() if kind else ""
    rest = text[len(head) :]
    for pattern, word in _STEPS:
        rest = pattern.sub(word, rest)
    signature = (head + rest).strip()
    if len(signature) > SIGNATURE_LIMIT:
        signature = signature[: SIGNATURE_LIMIT - 1].rstrip() + "…"
    return signature


@dataclass(frozen=True, slots=True)
class DeadLetterView:
    """One dead letter, as far as it can be read.

    * `at`: when it was enqueued, UTC epoch seconds.
    * `message`: None if the envelope is not a task message; `problem` then says why.
    """

    queue: str
    position: Position
    envelope: Envelope
    reason: str
    description: str
    at: float
    delivery_count: int
    message: TaskMessage | None
    problem: str = ""

    @property
    def id(self) -> str:
        """The task id; without one the message id; without either ``@POSITION``."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All ids by which a selection may name it."""
        names = (self.message.id if self.message else "", self.envelope.message_id)
        return (*(name for name in names if name), f"@{self.position}")

    @property
    def task(self) -> str | None:
        """The task's name; None if it cannot be read."""
        return self.message.task if self.message else None

    @property
    def signature(self) -> str:
        """The error without its variable parts; see `aztask.operate.deadletters.letters`."""
        return error_signature(self.description or self.problem)

    @property
    def resubmit_count(self) -> int | None:
        """How often it failed before; None if that cannot be read."""
        return self.message.resubmit_count if self.message else None


@dataclass(frozen=True, slots=True)
class Group:
    """Dead letters of one task, one reason and one error signature."""

    task: str | None
    reason: str
    signature: str
    count: int
    first_at: float
    last_at: float


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of dead letters: those that meet every given condition.

    * `ids`: task ids; message ids and ``@POSITION`` for those without a task id.
    * `task`: the task's name.
    * `reason`: the dead-letter reason.
    * `signature`: as in `DeadLetterView.signature`.
    * `positions`: the positions, if the selection was made elsewhere.
    * `everything`: must be True if no condition is given, so that an empty selection never means
      all.

    Raises ConfigurationError.
    """

    ids: frozenset[str] = frozenset()
    task: str | None = None
    reason: str | None = None
    everything: bool = False
    signature: str | None = None
    positions: Positions | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", frozenset(self.ids))
        texts = (self.task, self.reason, self.signature, self.positions)
        narrowed = bool(self.ids) or any(text is not None for text in texts)
        if self.everything == narrowed:
            raise ConfigurationError(
                "select dead letters by id, task, reason or signature, or else all of them"
                if not narrowed
                else "everything and a condition exclude each other; remove one of them"
            )

    def matches(self, letter: DeadLetterView) -> bool:
        """True if `letter` meets every condition."""
        return (
            (not self.ids or not self.ids.isdisjoint(letter.names))
            and (self.task is None or letter.task == self.task)
            and (self.reason is None or letter.reason == self.reason)
            and (self.signature is None or letter.signature == self.signature)
            and (self.positions is None or letter.position in self.positions)
        )

    def only_positions(self) -> Positions | None:
        """The positions, if they are the only condition, so that no search is needed; else None."""
        texts = (self.task, self.reason, self.signature)
        alone = not self.ids and all(text is None for text in texts)
        return self.positions if alone else None
