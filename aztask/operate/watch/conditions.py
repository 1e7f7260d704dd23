"""What holds now, for each kind of rule: asked of the operations layer, once in each look.

Rules
1. A condition has a subject, which stays the same as long as it holds: the same queue, group of
   dead letters, schedule, worker or breaker.
2. What cannot be read is neither begun nor ended: its scope is unknown in this look.
3. Dead letters are read again when their count has changed, and at most every `LETTERS_SECONDS`
   otherwise: a queue may have a hundred thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlencode

from aztask.app import App
from aztask.errors import AztaskError, QueueNotFound
from aztask.operate.attention import bad_schedules, silent_workers
from aztask.operate.controls import controls
from aztask.operate.deadletters import DeadLetters, LetterGroup
from aztask.operate.deadletters.letters import ReadLetters
from aztask.operate.deadletters.mutes import mutes
from aztask.operate.queues import LeftOut, all_queues, oldest_waiting
from aztask.operate.watch.rules import WatchRule
from aztask.queues.base import QueueStats
from aztask.support import clock
from aztask.support.display import mask, one_line, plural, safe_str
from aztask.support.durations import span

LETTERS_SECONDS: Final = 300.0
LONGEST_TEXT: Final = 500
EVERYTHING: Final = ""
"""The scope of what is read at once, such as all workers."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Something that a rule is about, and that holds now.

    * `subject`: tells it from the others of its rule. `scope`: what was read to find it.
    * `text`: what holds, in words. `path`: the page of the dashboard that shows it.
    """

    subject: str
    scope: str
    text: str
    path: str


@dataclass(slots=True)
class Holding:
    """What holds for one rule. unknown: scopes that could not be read, and why."""

    holds: dict[str, Condition] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def add(self, condition: Condition) -> None:
        """Note something that holds, on one line and without secrets."""
        text = one_line(mask(condition.text), LONGEST_TEXT)
        self.holds[condition.subject] = Condition(
            condition.subject, condition.scope, text, condition.path
        )

    @contextmanager
    def reading(self, scope: str) -> Iterator[None]:
        """Read one scope: if that fails, it is unknown."""
        try:
            yield
        except AztaskError as error:
            self.unknown[scope] = safe_str(error)

    def is_known(self, scope: str) -> bool:
        """Whether this scope was read: so what does not hold in it has ended."""
        return not ({scope, EVERYTHING} & self.unknown.keys())


@dataclass(slots=True)
class _Letters:
    """The groups of one queue: how many dead letters it had then, and when they were read."""

    dead: int | None
    at: float
    groups: Sequence[LetterGroup]


class Looks:
    """Looks at what the rules are about, again and again. One thread."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._letters: dict[str, _Letters] = {}
        self._read_letters = ReadLetters()

    def look(self, rules: Sequence[WatchRule]) -> dict[str, Holding]:
        """What holds for each rule, by its name."""
        look = _Look(self._app, self._letters, self._read_letters)
        return {each.name: look.at(each) for each in rules}


def _path(page: str, **query: str | None) -> str:
    given = {name: value for name, value in query.items() if value}
    return f"{page}?{urlencode(given, errors='replace')}" if given else page


class _Look:
    """One look. What several rules need is read once."""

    def __init__(self, app: App, letters: dict[str, _Letters], read_letters: ReadLetters) -> None:
        self._app = app
        self._letters = letters
        self._read_letters = read_letters
        self._stats: dict[str, QueueStats | AztaskError] = {}
        self._listed: Sequence[str] | AztaskError | None = None
        self._read: dict[str, Any] = {}

    def at(self, rule: WatchRule) -> Holding:
        """What holds for a rule."""
        found = Holding()
        kinds: Mapping[str, Callable[[WatchRule, Holding], None]] = {
            "backlog": self._backlog,
            "oldest": self._oldest,
            "failures": self._failures,
            "schedule": self._schedules,
            "worker": self._workers,
            "breaker": self._breakers,
        }
        with found.reading(EVERYTHING):
            kinds[rule.when](rule, found)
        return found

    # -- queues ------------------------------------------------------------------------------

    def _queues(self, rule: WatchRule, found: Holding) -> Iterator[QueueStats]:
        """The counts of a rule's queues; those that cannot be read are unknown."""
        for name in rule.exact if rule.exact is not None else self._all_queues():
            if rule.covers(name):
                counted = self._counted(name)
                if isinstance(counted, QueueNotFound) and rule.exact is None:
                    continue  # deleted since it was listed
                if isinstance(counted, AztaskError):
                    found.unknown[name] = safe_str(counted)
                else:
                    yield counted

    def _all_queues(self) -> Sequence[str]:
        if self._listed is None:
            try:
                self._listed = all_queues(self._app, LeftOut())
            except AztaskError as error:
                self._listed = error
        if isinstance(self._listed, AztaskError):
            raise self._listed
        return self._listed

    def _counted(self, name: str) -> QueueStats | AztaskError:
        if name not in self._stats:
            try:
                self._stats[name] = self._app.broker.stats(name)
            except AztaskError as error:
                self._stats[name] = error
        return self._stats[name]

    def _backlog(self, rule: WatchRule, found: Holding) -> None:
        for stats in self._queues(rule, found):
            count, queue = stats.waiting, stats.queue
            if count > rule.above:
                waits = f"{plural(count, 'message')} {'waits' if count == 1 else 'wait'}"
                text = f"{waits} in queue {queue}, more than {rule.above:,.0f}"
                found.add(Condition(queue, queue, text, _path("/queue", name=queue)))

    def _oldest(self, rule: WatchRule, found: Holding) -> None:
        paged = self._app.broker.capabilities.paged_peek
        for stats in self._queues(rule, found):
            queue = stats.queue
            if not stats.waiting:
                continue
            with found.reading(queue):
                oldest = oldest_waiting(self._app, queue)
                if oldest.seconds is None:
                    if oldest.why and paged:
                        found.unknown[queue] = oldest.why
                elif oldest.seconds > rule.above:
                    age, most = span(oldest.seconds), span(rule.above)
                    text = f"a message in queue {queue} waits since {age}, longer than {most}"
                    found.add(Condition(queue, queue, text, _path("/queue", name=queue)))

    # -- failures ----------------------------------------------------------------------------

    def _failures(self, rule: WatchRule, found: Holding) -> None:
        for stats in self._queues(rule, found):
            queue = stats.queue
            with found.reading(queue):
                for group in self._groups(stats):
                    if self._once("mutes", mutes).of(queue, group) is None:
                        found.add(_failure(queue, group))

    def _groups(self, stats: QueueStats) -> Sequence[LetterGroup]:
        known, now = self._letters.get(stats.queue), clock.monotonic()
        same = known is not None and known.dead == stats.dead and stats.dead is not None
        if stats.dead == 0:
            return ()
        if known is None or not same or now - known.at > LETTERS_SECONDS:
            groups = DeadLetters(self._app, stats.queue).groups(self._read_letters)
            known = self._letters[stats.queue] = _Letters(stats.dead, now, groups)
        return known.groups

    # -- what is read at once ----------------------------------------------------------------

    def _once(self, name: str, read: Callable[[App], Any]) -> Any:
        if name not in self._read:
            try:
                self._read[name] = read(self._app)
            except AztaskError as error:
                self._read[name] = error
        if isinstance(self._read[name], AztaskError):
            raise self._read[name]
        return self._read[name]

    def _schedules(self, rule: WatchRule, found: Holding) -> None:
        for each in self._once("schedules", bad_schedules):
            if rule.covers(each.name):
                path = _path("/schedule", name=each.name)
                found.add(Condition(each.name, EVERYTHING, each.text, path))

    def _workers(self, rule: WatchRule, found: Holding) -> None:
        for each in self._once("workers", silent_workers):
            if rule.covers(each.name):
                path = _path("/workers", name=each.name)
                found.add(Condition(each.name, EVERYTHING, each.text, path))

    def _breakers(self, rule: WatchRule, found: Holding) -> None:
        for name, breaker in self._once("controls", controls).breakers:
            if rule.covers(breaker.task):
                text = f"the circuit breaker of {breaker.task} in {name} is open: {breaker.why}"
                subject = f"{name}\0{breaker.task}"
                found.add(Condition(subject, EVERYTHING, text, "/limits"))


def _failure(queue: str, group: LetterGroup) -> Condition:
    task = group.task or "an unknown task"
    why = f"{group.reason}: {group.signature}" if group.signature else group.reason
    text = f"{plural(group.count, 'dead letter')} of {task} in queue {queue}: {why}"
    path = _path(
        "/letters", queue=queue, task=group.task, reason=group.reason, error=group.signature
    )
    subject = "\0".join((queue, group.task or "", group.reason, group.signature))
    return Condition(subject, queue, text, path)
