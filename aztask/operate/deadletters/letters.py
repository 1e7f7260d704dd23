"""Dead letters: one of them, groups of them, a selection, and all those of a queue."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, TypeAlias

from aztask.app import App
from aztask.errors import ConfigurationError
from aztask.message.envelope import Envelope
from aztask.message.headers import SAVED
from aztask.message.message import TaskMessage
from aztask.queues.base import Delivery, MessageState, Peeked, Position
from aztask.stores.records.deadindex import UNDER_WAY, IndexedDeadLetter, index_for, key_of
from aztask.support.clock import Clock

HOLD_VALUES: Final = frozenset({"argsrepr", "kwargsrepr", SAVED})
"""Headers with arguments or a checkpoint."""

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
class LetterGroup:
    """Dead letters of one task, one reason and one error signature."""

    task: str | None
    reason: str
    signature: str
    count: int
    first_at: float
    last_at: float


GroupName: TypeAlias = tuple[str | None, str, str]
"""Task, reason and signature of a group."""

ReadLetter: TypeAlias = tuple[float, GroupName]
"""When a dead letter was enqueued, UTC epoch seconds, and its group."""

MOST_READ: Final = 500_000
"""Dead letters whose groups are kept: of each some 150 bytes."""


class ReadLetters:
    """The groups of the dead letters that were read before. Any thread may call.

    To decode a message and find its signature takes five times as long as to list it, and neither
    changes: a dead letter stays what it is until it is gone, and its position is not used again.
    """

    def __init__(self) -> None:
        self._queues: dict[str, Mapping[Position, ReadLetter]] = {}

    def of(self, queue: str) -> Mapping[Position, ReadLetter]:
        """Those of a queue, by position."""
        return self._queues.get(queue, {})

    def keep(self, queue: str, found: Mapping[Position, ReadLetter]) -> None:
        """Keep those that a queue has now; none if there are too many with those of others."""
        others = sum(len(each) for name, each in [*self._queues.items()] if name != queue)
        self._queues[queue] = found if others + len(found) <= MOST_READ else {}


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of dead letters: those that meet every given condition.

    * `ids`: task ids; message ids and ``@POSITION`` for those without a task id.
    * `task`: the task's name.
    * `reason`: the dead-letter reason.
    * `signature`: as in `DeadLetterView.signature`.
    * `positions`: the positions, if the selection was made elsewhere.
    * `before`: only those that were dead-lettered before this time, UTC epoch seconds. It narrows
      another condition, and is none by itself.
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
    before: float | None = None

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
            and (self.before is None or letter.at < self.before)
        )

    def only_positions(self) -> Positions | None:
        """The positions, if they are the only condition, so that no search is needed; else None."""
        texts = (self.task, self.reason, self.signature)
        alone = not self.ids and self.before is None and all(text is None for text in texts)
        return self.positions if alone else None


# -- browse ----------------------------------------------------------------------------------
#
# All dead letters of a queue, as the service shows them or from the index beside them.
#
# If the service can list all dead letters page by page, its list is used. If it shows only the
# first few, the others come from the result store's index, if there is one.
#
# A service that has no dead letters of its own stores a copy and then deletes the original. If the
# process dies in between, the next delivery stores a second copy: both are one dead letter, and are
# listed and counted as one. Acting on a dead letter takes all of its copies, and counts one.


PAGE: Final = 100


class DeadLetterBrowser:
    """Lists the dead letters of one queue without taking them, and keeps the index up to date."""

    def __init__(
        self, app: App, queue: str, clock: Clock, damaged: dict[str, str] | None = None
    ) -> None:
        """`damaged`: receives the key and the reason of each damaged note."""
        self._damaged = {} if damaged is None else damaged
        self._app = app
        self._queue = queue
        self._clock = clock
        self._index = index_for(app.broker, app.results)
        self._met: set[str] = set()
        self._held = 0
        self._began = clock.wall()

    @property
    def whole(self) -> bool:
        """True if the list has no pages: the service shows its first ones, an index the others."""
        return self._index is not None or not self._app.broker.capabilities.paged_peek

    def all(self) -> Iterator[Peeked]:
        """Every known dead letter, from the service or from the index; its copies count as one."""
        if self._index is None:
            paged = self._app.broker.capabilities.paged_peek
            yield from self._shown() if paged else _distinct(self._peek())
            return
        shown = self._peek()
        yield from self._with_reasons(_distinct(shown))
        shown_keys = {key_of(each.envelope) for each in shown}
        if len(shown) >= (self._app.broker.stats(self._queue).dead or 0):
            # the service's count is never too low, so these were all
            self._index.keep_only(self._queue, shown_keys, self._clock.wall() - UNDER_WAY)
            return
        for each in self._index.notes(self._queue):
            if each.key in shown_keys:
                continue
            if each.damage:
                self._damaged[each.key] = each.damage
            else:
                yield _as_peeked(each)

    def copies(self) -> int:
        """How many of the messages that the service shows are further copies of dead letters."""
        if self._app.broker.capabilities.paged_peek:
            return 0
        shown = self._peek()
        return len(shown) - len(_distinct(shown))

    def _with_reasons(self, shown: Sequence[Peeked]) -> Sequence[Peeked]:
        """The same dead letters, with the reasons that did not fit into their messages.

        Another program's message may fill a Storage queue's message to the last byte. Its dead
        letter is the same text, and only the index has the reason.
        """
        bare = {key_of(each.envelope) for each in shown if not each.dead_letter_reason}
        found: dict[str, IndexedDeadLetter] = {}
        for note in self._index.notes(self._queue) if self._index and bare else ():
            if note.key in bare and not note.damage:
                found[note.key] = note
                if len(found) == len(bare):
                    break
        return [_explained(each, found.get(key_of(each.envelope))) for each in shown]

    def _shown(self) -> Iterator[Peeked]:
        page = self._peek()
        while page:
            yield from page
            position = page[-1].position
            page = self._app.broker.peek(self._queue, dead_letter=True, after=position, limit=PAGE)

    def _peek(self) -> list[Peeked]:
        return self._app.broker.peek(self._queue, dead_letter=True, limit=PAGE)

    # -- during a replay or a purge of all ---------------------------------------------------

    def met(self, deliveries: Sequence[Delivery]) -> None:
        """Add notes for dead letters that were received and have none."""
        if self._index is None:
            return
        self._met.update(key_of(each.envelope) for each in deliveries)
        self._held += len(deliveries)
        self._index.note([_as_noted(each, self._clock.wall()) for each in deliveries])

    def gone(self, letters: Sequence[DeadLetterView]) -> None:
        """Delete the notes of dead letters that were replayed or removed."""
        self._held -= len(letters)
        if self._index is not None and letters:
            self._index.drop(self._queue, {key_of(each.envelope) for each in letters})

    def met_all(self) -> None:
        """Delete the notes of dead letters that were not met, if no other ones exist.

        The service's count is never too low: if it is not above the number that we hold, these are
        all.
        """
        if self._index is None:
            return
        if (self._app.broker.stats(self._queue).dead or 0) <= self._held:
            self._index.keep_only(self._queue, self._met, self._began - UNDER_WAY)

    def emptied(self) -> None:
        """Delete all notes: every dead letter was deleted."""
        if self._index is not None:
            self._index.keep_only(self._queue, (), self._clock.wall())


def _distinct(shown: Sequence[Peeked]) -> list[Peeked]:
    """The first copy of each dead letter."""
    found: dict[str, Peeked] = {}
    for each in shown:
        found.setdefault(key_of(each.envelope), each)
    return list(found.values())


def _explained(peeked: Peeked, note: IndexedDeadLetter | None) -> Peeked:
    if note is None or peeked.dead_letter_reason:
        return peeked
    return replace(peeked, dead_letter_reason=note.reason, dead_letter_description=note.description)


def _as_noted(delivery: Delivery, now: float) -> IndexedDeadLetter:
    return IndexedDeadLetter(
        delivery.queue,
        delivery.envelope,
        delivery.dead_letter_reason or "",
        delivery.dead_letter_description or "",
        delivery.enqueued_at or now,
        delivery.delivery_count,
    )


def _as_peeked(noted: IndexedDeadLetter) -> Peeked:
    return Peeked(
        noted.envelope,
        noted.key,
        MessageState.ACTIVE,
        noted.delivery_count,
        noted.at,
        None,
        noted.reason,
        noted.description,
    )
