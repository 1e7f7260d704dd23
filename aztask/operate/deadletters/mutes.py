"""Muted groups of dead letters: known, and of no interest until they change.

A mute is a row in the result store for one queue, task, reason and error. It holds while the group
has no more dead letters than when it was muted, and none that was enqueued later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar, Final

from aztask.app import App
from aztask.errors import ConfigurationError, NotFound
from aztask.operate.action import Action, Progress, Subject, results_of
from aztask.operate.deadletters.letters import LetterGroup
from aztask.operate.deadletters.view import DeadLetters
from aztask.operate.ledger import MUTES, Ledger, ledger_of, packed, unpacked
from aztask.stores.rows import Row
from aztask.support.display import visible

MOST_READ: Final = 2_000


@dataclass(frozen=True, slots=True)
class Mute:
    """A mute. `count`, `last_at`: of the group then. `by`: who muted it, at `at` of the store."""

    queue: str
    task: str
    reason: str
    signature: str
    count: int
    last_at: float
    by: str
    at: float

    def hides(self, group: LetterGroup) -> bool:
        """Whether the group has not changed since."""
        return group.count <= self.count and group.last_at <= self.last_at


@dataclass(frozen=True, slots=True)
class Mutes:
    """The mutes of a broker, by the keys of their groups."""

    by_key: Mapping[str, Mute]

    def of(self, queue: str, group: LetterGroup) -> Mute | None:
        """The mute that hides a group; None if none does."""
        found = self.by_key.get(_key(queue, group.task or "", group.reason, group.signature))
        return found if found is not None and found.hides(group) else None


def mutes(app: App) -> Mutes:
    """All mutes; none without a result store. Raises BrokerUnavailable."""
    ledger = ledger_of(app.results)
    rows = ledger.page(MUTES, MOST_READ) if ledger is not None else []
    found = {str(row.place.key): _mute(row) for row in rows}
    return Mutes({key: each for key, each in found.items() if each is not None})


def mute(app: App, queue: str, task: str, reason: str, signature: str) -> MuteGroup:
    """Mute a group until it changes. Raises NotFound, QueueNotFound, BrokerUnavailable."""
    _ledger(app)
    for group in DeadLetters(app, queue).groups():
        if (group.task or "", group.reason, group.signature) == (task, reason, signature):
            return MuteGroup(app, 1, queue, group)
    raise NotFound(f"queue {queue} has no such group of dead letters; look at the list again")


def unmute(app: App, queue: str, task: str, reason: str, signature: str) -> UnmuteGroup:
    """End a mute. Raises BrokerUnavailable."""
    key = _key(queue, task, reason, signature)
    (row,) = _ledger(app).get(MUTES, [key])
    return UnmuteGroup(app, int(row is not None), key, queue, task, signature or reason)


@dataclass(slots=True)
class MuteGroup(Action[None]):
    """Mutes a group of dead letters."""

    name: ClassVar[str] = "mute"

    queue: str
    group: LetterGroup

    def __str__(self) -> str:
        what = visible(self.group.signature or self.group.reason)
        return f"mute {what} of {visible(self.group.task or 'unknown')} in {visible(self.queue)}"

    def subject(self) -> Subject:
        """The queue and the task's name."""
        return Subject(task=self.group.task or "", queue=self.queue)

    def _act(self, progress: Progress) -> None:
        ledger, group = _ledger(self.app), self.group
        made = Mute(
            self.queue,
            group.task or "",
            group.reason,
            group.signature,
            group.count,
            group.last_at,
            self.by,
            ledger.now(),
        )
        ledger.put(
            MUTES, _key(self.queue, made.task, made.reason, made.signature), packed(asdict(made))
        )
        self.done = 1


@dataclass(slots=True)
class UnmuteGroup(Action[None]):
    """Ends the mute of a group."""

    name: ClassVar[str] = "unmute"

    key: str
    queue: str
    task: str
    what: str

    def __str__(self) -> str:
        return f"unmute {visible(self.what)} of {visible(self.task)} in {visible(self.queue)}"

    def subject(self) -> Subject:
        """The queue and the task's name."""
        return Subject(task=self.task, queue=self.queue)

    def _act(self, progress: Progress) -> None:
        _ledger(self.app).remove(MUTES, [self.key])
        self.done = self.count


def _ledger(app: App) -> Ledger:
    found = ledger_of(results_of(app))
    if found is None:
        raise ConfigurationError("this result store cannot keep mutes; use local:// or tables://")
    return found


def _key(queue: str, task: str, reason: str, signature: str) -> str:
    text = "\0".join((queue, task, reason, signature))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def _mute(row: Row) -> Mute | None:
    """The mute in a row; None if it is damaged: then the group is shown."""
    record = unpacked(row) or {}
    texts = [record.get(name) for name in ("queue", "task", "reason", "signature", "by")]
    count, last_at, at = (record.get(name) for name in ("count", "last_at", "at"))
    if not all(isinstance(each, str) for each in texts) or type(count) is not int:
        return None
    if not isinstance(last_at, int | float) or not isinstance(at, int | float):
        return None
    queue, task, reason, signature, by = map(str, texts)
    return Mute(queue, task, reason, signature, count, last_at, by, at)
