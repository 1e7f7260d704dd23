"""The watcher: looks, decides what is new, sends it once, and once more at its end.

Rules
1. What was sent is a row in the result store, one for each rule, webhook and subject. Every change
   of it is compare-and-set. So of several watchers one sends, and a restart sends nothing again.
2. A watcher claims a row before it sends, for `CLAIM_SECONDS`, and notes afterwards that it was
   sent. Crash window: if it dies in between, another one sends after that time, and a message that
   had left already is sent twice. No message is lost.
3. A look that began before a row was changed last decides nothing about it: what it saw may have
   ended since, and its end may have been sent.
4. A webhook that does not take a message is tried again, at most every `LONGEST_PAUSE` seconds.
   What ends before it was sent is not sent at all.
5. Times are the store's: the clocks of watchers may differ.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from threading import Event
from typing import Any, Final

from aztask.app import App
from aztask.errors import AztaskError, ConfigurationError
from aztask.operate.action import results_of
from aztask.operate.ledger import WATCH, Ledger, ledger_of, packed, unpacked
from aztask.operate.watch.conditions import Condition, Holding, Looks
from aztask.operate.watch.rules import RuleFile, WatchRule
from aztask.operate.watch.webhooks import TIMEOUT, NoticeLine, beat, body_of, post, title_of
from aztask.stores.rows import Row
from aztask.support.display import plural, safe_str

logger = logging.getLogger("aztask.watch")

CLAIM_SECONDS: Final = 120.0
FIRST_PAUSE: Final = 15.0
LONGEST_PAUSE: Final = 600.0
ENDED_SECONDS: Final = 3600.0
"""For how long the row of what ended is kept: longer than any look takes (rule 3)."""
CONFIRMED_SECONDS: Final = 86400.0
"""A row whose condition lasts is written again this often, so that it is not taken for old."""
OLD_SECONDS: Final = 30 * 86400.0
"""A row of a rule that this file does not have is removed when it is this old."""
MOST_AT_ONCE: Final = 100
PAGE: Final = 1000


class Phase(Enum):
    """What became of a condition."""

    WAITS = "waits"  # it holds, and was not sent yet
    BEGINS = "begins"  # a watcher sends that it began
    SENT = "sent"  # it was sent that it began
    ENDS = "ends"  # a watcher sends that it ended
    ENDED = "ended"  # it was sent that it ended


@dataclass(frozen=True, slots=True)
class Record:
    """The row of one rule, webhook and subject. Times are UTC epoch seconds.

    * `since`: when it was first seen. `changed`: when the row was written.
    * `after`: no watcher acts before: the end of a claim, or of a pause after a failure.
    * `gone`: since when it no longer holds; 0 while it does. `tries`: failures in a row.
    """

    rule: str
    webhook: str
    subject: str
    scope: str
    text: str
    path: str
    phase: Phase
    since: float
    changed: float
    after: float = 0.0
    gone: float = 0.0
    tries: int = 0

    def claimed(self, phase: Phase, now: float) -> Record:
        """The row of a watcher that is about to send."""
        return replace(self, phase=phase, changed=now, after=now + CLAIM_SECONDS)

    def settled(self, now: float) -> Record:
        """The row after the webhook has taken the message."""
        phase = Phase.SENT if self.phase is Phase.BEGINS else Phase.ENDED
        return replace(self, phase=phase, changed=now, after=0.0, tries=0)

    def refused(self, now: float) -> Record:
        """The row after the webhook did not take it: it is tried again after a pause."""
        phase = Phase.WAITS if self.phase is Phase.BEGINS else Phase.SENT
        pause = min(FIRST_PAUSE * 2.0 ** min(self.tries, 10), LONGEST_PAUSE)
        return replace(self, phase=phase, changed=now, after=now + pause, tries=self.tries + 1)


@dataclass(frozen=True, slots=True)
class NextRow:
    """What becomes of a row. after: None deletes it. sends: whether it claims a message."""

    after: Record | None
    sends: bool = False


def step_of(
    seen: Record | None, fresh: Record | None, hold: float, now: float, looked: float
) -> NextRow | None:
    """The next step of a row; None leaves it as it is.

    * `seen`: the row; None without one. `fresh`: a row for what holds now, None if it does not.
    * `hold`: see `WatchRule.hold`. `looked`: when the look began.
    """
    if seen is None:
        return None if fresh is None else _first(fresh, hold, now)
    if looked < seen.changed or now < seen.after:
        return None
    return _AFTER[seen.phase](seen, fresh, hold, now)


def _first(fresh: Record, hold: float, now: float) -> NextRow:
    return NextRow(fresh) if hold > 0 else _claim(fresh, now)


def _claim(record: Record, now: float) -> NextRow:
    return NextRow(record.claimed(Phase.BEGINS, now), sends=True)


def _waits(seen: Record, fresh: Record | None, hold: float, now: float) -> NextRow | None:
    if fresh is None:
        return NextRow(None)
    if now < seen.since + hold:
        return None
    return _claim(replace(fresh, since=seen.since, tries=seen.tries), now)


def _begins(seen: Record, fresh: Record | None, hold: float, now: float) -> NextRow | None:
    """The watcher that claimed it died before it noted what it did."""
    if fresh is None:
        return _ends(seen, fresh, hold, now)
    return _claim(replace(fresh, since=seen.since), now)


def _ends(seen: Record, fresh: Record | None, hold: float, now: float) -> NextRow | None:
    return NextRow(seen.claimed(Phase.ENDS, now), sends=True)


def _ended(seen: Record, fresh: Record | None, hold: float, now: float) -> NextRow | None:
    if fresh is not None:
        return _first(fresh, hold, now)
    return NextRow(None) if now >= seen.changed + ENDED_SECONDS else None


def _sent(seen: Record, fresh: Record | None, hold: float, now: float) -> NextRow | None:
    if fresh is not None:
        old = now >= seen.changed + CONFIRMED_SECONDS
        return NextRow(replace(seen, changed=now, gone=0.0)) if seen.gone or old else None
    gone = seen.gone or now
    if now >= gone + hold:
        return NextRow(replace(seen, gone=gone).claimed(Phase.ENDS, now), sends=True)
    return None if seen.gone else NextRow(replace(seen, changed=now, gone=now))


_AFTER: Final = {
    Phase.WAITS: _waits,
    Phase.BEGINS: _begins,
    Phase.SENT: _sent,
    Phase.ENDS: _ends,
    Phase.ENDED: _ended,
}


# -- looking, deciding, sending ----------------------------------------------------------------


@dataclass(slots=True)
class Turn:
    """One turn. sent: messages' lines that webhooks took. problems: what failed."""

    sent: int = 0
    problems: list[str] = field(default_factory=list)


class Watcher:
    """Watches what a file of rules names. One thread; any number of processes."""

    def __init__(self, app: App, file: RuleFile, ledger: Ledger) -> None:
        """ledger: where it is kept what was sent."""
        self._app = app
        self._file = file
        self._looks = Looks(app)
        self._ledger = ledger
        self._said: set[str] = set()

    def holds(self) -> dict[str, Holding]:
        """What holds now, by the names of the rules. Sends and writes nothing."""
        return self._looks.look(self._file.rules)

    def run(self, stopping: Event) -> None:
        """Take turns until `stopping` is set. A store that does not answer is asked again."""
        while not stopping.is_set():
            try:
                turn = self.turn()
            except AztaskError as error:
                turn = Turn(problems=[f"nothing was sent: {safe_str(error)}"])
            self._say(turn)
            stopping.wait(self._file.every)

    def turn(self) -> Turn:
        """Look once, and send what is new. Raises BrokerUnavailable.

        The heartbeat is sent if every rule was read and every message was taken.
        """
        turn, looked = Turn(), self._ledger.now()
        found = self._looks.look(self._file.rules)
        for rule in self._file.rules:
            turn.problems += [
                f"rule {rule.name}: {why}" for why in found[rule.name].unknown.values()
            ]
        rows = dict(self._rows())
        records = {key: record_of(row) for key, row in rows.items()}
        claimed: dict[str, list[tuple[Row, Record]]] = defaultdict(list)
        for rule in self._file.rules:
            for hook in rule.to:
                known = {
                    key: (rows[key], each)
                    for key, each in records.items()
                    if each is None or (each.rule, each.webhook) == (rule.name, hook)
                }
                claimed[hook] += self._decide(rule, hook, found[rule.name], known, looked)
        for hook, some in claimed.items():
            if some:
                self._send(hook, some, turn)
        self._remove_old(rows, records)
        if self._file.heartbeat is not None and not turn.problems:
            problem = beat(self._file.heartbeat)
            turn.problems += [problem] if problem else []
        return turn

    def _rows(self) -> Iterator[tuple[str, Row]]:
        after = ""
        while True:
            page = self._ledger.page(WATCH, PAGE, after)
            yield from ((row.place.key, row) for row in page)
            if len(page) < PAGE:
                return
            after = page[-1].place.key

    def _decide(
        self,
        rule: WatchRule,
        hook: str,
        found: Holding,
        known: Mapping[str, tuple[Row, Record | None]],
        looked: float,
    ) -> list[tuple[Row, Record]]:
        """Write the next step of each row of a rule and a webhook; returns what it claimed.

        * `known`: the rows of both by their keys, and damaged ones of any.
        """
        holds = {_key(rule.name, hook, name): each for name, each in found.holds.items()}
        claimed: list[tuple[Row, Record]] = []
        for key in dict.fromkeys([*holds, *(key for key, (_, each) in known.items() if each)]):
            row, seen = known.get(key, (None, None))
            if key not in holds and seen is not None and not found.is_known(seen.scope):
                continue
            now = self._ledger.now()
            fresh = _fresh(rule, hook, holds[key], now) if key in holds else None
            step = step_of(seen, fresh, rule.hold, now, looked)
            if step is None or (step.sends and len(claimed) >= MOST_AT_ONCE):
                continue
            data = None if step.after is None else _packed(step.after)
            made = self._ledger.write(WATCH, key, data, row)
            if made is not None and step.sends and step.after is not None:
                claimed.append((made, step.after))
        return claimed

    def _send(self, hook: str, claimed: Sequence[tuple[Row, Record]], turn: Turn) -> None:
        """Send what was claimed as one message, and note it. Crash window: see rule 2."""
        if self._ledger.now() + TIMEOUT > min(record.after for _, record in claimed):
            turn.problems.append(f"webhook {hook}: the message came too late, and is claimed again")
            return
        kinds = {each.name: each.when for each in self._file.rules}
        lines = [
            NoticeLine(
                record.phase is Phase.BEGINS,
                record.rule,
                kinds[record.rule],
                record.text,
                record.since,
                f"{self._file.page}{record.path}" if self._file.page else "",
            )
            for _, record in claimed
        ]
        webhook = self._file.webhooks[hook]
        problem = post(webhook, body_of(webhook.form, self._app.name, lines))
        if problem:
            turn.problems.append(problem)
        else:
            turn.sent += len(lines)
            logger.info("sent to webhook %s: %s", hook, title_of(self._app.name, lines))
        now = self._ledger.now()
        for row, record in claimed:
            after = record.refused(now) if problem else record.settled(now)
            if self._ledger.write(WATCH, row.place.key, _packed(after), row) is None:
                logger.warning(
                    "rule %s: another watcher took over while webhook %s was asked; the message "
                    "may be sent twice",
                    record.rule,
                    hook,
                )

    def _remove_old(self, rows: Mapping[str, Row], records: Mapping[str, Record | None]) -> None:
        """Remove rows of rules that no file had for a long time. Damaged ones may be of others."""
        names = {each.name for each in self._file.rules}
        now = self._ledger.now()
        for key, record in records.items():
            unused = record is not None and record.rule not in names
            if unused and record is not None and now >= record.changed + OLD_SECONDS:
                self._ledger.write(WATCH, key, None, rows[key])

    def _say(self, turn: Turn) -> None:
        """Log each problem when it is new, and once more when all of them are gone."""
        for problem in turn.problems:
            if problem not in self._said:
                logger.warning("%s; trying again in %g s", problem, self._file.every)
        if self._said and not turn.problems:
            logger.info("%s no longer fail", plural(len(self._said), "part"))
        self._said = set(turn.problems)


def watcher_of(app: App, file: RuleFile) -> Watcher:
    """A watcher that keeps in the app's result store what it sent. Raises ConfigurationError."""
    ledger = ledger_of(results_of(app))
    if ledger is None:
        raise ConfigurationError(
            "this result store cannot keep what was sent; use local:// or tables://"
        )
    return Watcher(app, file, ledger)


def _key(rule: str, hook: str, subject: str) -> str:
    """The key of a row: names may be long, and hold any character."""
    text = "\0".join((rule, hook, subject))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def _fresh(rule: WatchRule, hook: str, condition: Condition, now: float) -> Record:
    return Record(
        rule.name,
        hook,
        condition.subject,
        condition.scope,
        condition.text,
        condition.path,
        Phase.WAITS,
        since=now,
        changed=now,
    )


def _packed(record: Record) -> bytes:
    return packed({**asdict(record), "phase": record.phase.value})


_TEXTS: Final = ("rule", "webhook", "subject", "scope", "text", "path")
_TIMES: Final = ("since", "changed", "after", "gone")


def record_of(row: Row) -> Record | None:
    """The record in a row; None if it is damaged: then it is written anew."""
    data = unpacked(row) or {}
    known: dict[str, Any] = {each.name: data.get(each.name) for each in fields(Record)}
    texts = all(isinstance(known[name], str) for name in _TEXTS)
    numbers = all(type(known[name]) is float for name in _TIMES) and type(known["tries"]) is int
    phases = {each.value: each for each in Phase}
    if not texts or not numbers or known["phase"] not in phases:
        return None
    return Record(**{**known, "phase": phases[known["phase"]]})
