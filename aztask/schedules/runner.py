"""What a worker does for schedules all the time: one `turn` after another, each of them short."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from aztask.errors import AztaskError
from aztask.schedules.engine import ScheduleEngine
from aztask.schedules.stored import DUE, Made
from aztask.schedules.template import Definition
from aztask.schedules.view import LIVES_SECONDS, Claim, View, best
from aztask.stores.records.damage import Damaged
from aztask.support import chance
from aztask.support.parts import Part, reason_of

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 2.0
REMOTE_LOOK_SECONDS: Final = 30.0
"""Seconds between two looks at all schedules, which find new and changed ones."""

STAGGER: Final = (1.0, 5.0)
REMOTE_STAGGER: Final = (2.0, 15.0)
"""How many seconds a worker that did not make the last occurrence waits with the next one: at
random between the two, so that workers hardly ever write at once."""

START_SECONDS: Final = 0.5
REMOTE_START_SECONDS: Final = 5.0
"""Before a worker makes a new schedule, it waits up to this long, at random, and looks again."""

RESEND_SECONDS: Final = 10.0
CLAIM_SECONDS: Final = 120.0
"""When a claim is this old, the worker that makes the occurrences renews it; others 1 to 3 minutes
later, each at another time."""

WAITING_SECONDS: Final = 1.0
REMOTE_WAITING_SECONDS: Final = 5.0
TROUBLE_SECONDS: Final = 5.0
LONGEST_PAUSE: Final = 1.0
ASIDE: Final = "schedule "
"""Before the name of a schedule that is put aside, among the failing parts of a worker."""


class Declared(Protocol):
    """A schedule of the code."""

    @property
    def name(self) -> str:
        """The name that no other schedule has."""
        ...

    @property
    def release(self) -> int:
        """The release of the code that declares it."""
        ...

    def define(self) -> Definition:
        """Make its definition, at the first use."""
        ...


@dataclass(slots=True)
class _Watched:
    """A schedule as this worker knows it. Times are the store's.

    * `due`: when its next occurrence is due, or None.
    * `stagger`: how long this worker waits with it if another one made the last.
    * `waits_at`: when to check next whether a waiting occurrence may go.
    * `retry_at`: not before then, because of an error.
    """

    view: View
    due: float | None
    stagger: float
    waits_at: float
    retry_at: float


class Runner:
    """Takes part in making occurrences. One thread calls it.

    * `by`: the worker's name.
    * `part`: what health shows; a schedule that fails is put aside there, and tried again.
    """

    def __init__(
        self,
        engine: ScheduleEngine,
        declared: Sequence[Declared],
        by: str,
        part: Part | None = None,
    ) -> None:
        self._part = part or Part("schedules", listed=False)
        self._engine = engine
        self._declared = {each.name: each for each in declared}
        self._definitions: dict[str, Definition] = {}
        self._by = by
        self._remote = engine.results.remote
        self._look_seconds = REMOTE_LOOK_SECONDS if self._remote else LOOK_SECONDS
        self._stagger = REMOTE_STAGGER if self._remote else STAGGER
        self._start = REMOTE_START_SECONDS if self._remote else START_SECONDS
        self._watched: dict[str, _Watched] = {}
        self._look_at = 0.0
        self._started_at: float | None = None
        self._claim_age = CLAIM_SECONDS * chance.uniform(1.5, 2.5)
        self._reported: dict[str, str] = {}
        self._unclaimed: set[str] = set()
        self._unwatched: set[str] = set()

    def turn(self) -> float:
        """Do what is due; returns the seconds until the next turn.

        An error of one schedule is logged, and tried again. Raises BrokerUnavailable if the store
        is unreachable.
        """
        now = self._engine.store.now()
        if self._started_at is None:
            self._started_at = now
        if now >= self._look_at:
            self._look_at = now + self._look_seconds
            before = dict(self._watched)
            try:
                self._look(now)
            except BaseException:
                self._watched = {**before, **self._watched}
                raise
        names = list(self._watched)
        chance.shuffle(names)  # so that workers that catch up begin at different ones
        for name in names:
            watched = self._watched[name]
            if now >= watched.retry_at:
                try:
                    self._one(name, now)
                    if name not in self._unclaimed:
                        self._works(name)
                except Exception as error:  # noqa: BLE001  # the others run on
                    if name in self._watched:
                        self._watched[name].retry_at = now + TROUBLE_SECONDS
                    self._report(name, error)
        return self._pause()

    def _pause(self) -> float:
        now = self._engine.store.now()
        soon = now + LONGEST_PAUSE
        for watched in self._watched.values():
            if watched.due is not None and _is_active(watched, now):
                wait = 0.0 if self._is_ours(watched) else watched.stagger
                soon = min(soon, max(watched.due + wait, watched.retry_at))
        return max(0.01, min(soon, self._look_at) - now)

    # -- looking -----------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        before, self._watched = self._watched, {}
        damaged = set()
        for name, view in self._engine.views():
            if isinstance(view, Damaged):
                damaged.add(name)
                self._report(name, view)
                continue
            if self._is_free(view):
                if name not in self._declared:  # made at run time, and its task is one of ours
                    self._adopted(view)
                continue
            known = before.get(name)
            if known is not None and known.view.tag == view.tag:
                known.view = view
                self._watched[name] = known
            else:
                if known is not None:
                    self._watched[name] = known
                self._watch(view)
        for declared in self._declared.values():
            try:
                self._claim(declared, now)
            except Exception as error:  # noqa: BLE001  # the others are claimed
                self._unclaimed.add(declared.name)
                self._report(declared.name, error)
            else:
                self._unclaimed.discard(declared.name)
        bad = self._watched.keys() | self._unclaimed | self._unwatched | damaged
        for name in self._reported.keys() - bad:
            self._works(name)

    def _watch(self, view: View) -> None:
        """Go on with this view of a schedule."""
        stagger = chance.uniform(*self._stagger)
        known = self._watched.pop(view.name, None)
        waits_at, retry_at = (known.waits_at, known.retry_at) if known else (0.0, 0.0)
        try:
            due = self._engine.next_due(view)
        except Exception as error:  # noqa: BLE001  # the others are watched
            self._unwatched.add(view.name)
            self._report(view.name, error)
            return
        self._unwatched.discard(view.name)
        self._watched[view.name] = _Watched(view, due, stagger, waits_at, retry_at)

    def _claim(self, declared: Declared, now: float) -> None:
        """Say that a schedule of the code is in use, and make it, or replace its definition."""
        definition = self._definitions.get(declared.name)
        if definition is None:
            definition = self._definitions[declared.name] = declared.define()
            if declared.name not in self._watched:
                # Workers that start together do not all make it: the others find it.
                self._look_at = now + chance.uniform(0.0, self._start)
                return
        watched = self._watched.get(declared.name)
        view = self._engine.view(declared.name) if watched is None else watched.view
        if view is not None and self._is_free(view):
            view = self._adopted(view)
            if view is None:
                return  # the next look finds whose it is
        claims, claimed = self._renewed(declared, definition, view, now)
        if view is None:
            if self._define(definition, declared.release, None):
                logger.info("schedule %s is new", declared.name)
        elif self._counts(claims, definition, view, now):
            if self._define(definition, declared.release, view):
                logger.info("schedule %s has a new definition", declared.name)
        elif watched is None or claimed:
            self._refresh(declared.name)

    def _is_free(self, view: View) -> bool:
        return view.owner != self._engine.store.owner

    def _adopted(self, view: View) -> View | None:
        found = self._engine.adopt(view)
        if found is not None:
            logger.info("schedule %s had no owner; it is adopted", view.name)
            self._watch(found)
        return found

    def _renewed(
        self, declared: Declared, definition: Definition, view: View | None, now: float
    ) -> tuple[list[Claim], bool]:
        """(the living claims, with that of this worker's definition, whether it was written now).

        A claim that has ended, or is missing, is made with the start of this worker. If another
        worker was faster, the next look finds what it wrote.
        """
        mine = Claim(definition.digest, declared.release, self._started_at or now, now)
        claims = {} if view is None else {each.key: each for each in view.claims}
        known = claims.get(mine.key)
        claims = {key: each for key, each in claims.items() if each.lives_at(now)}
        written = False
        if known is None or not known.lives_at(now):
            mine = replace(mine, tag="" if known is None else known.tag)
            written = self._engine.claim(declared.name, mine)
            claims[mine.key] = mine
        elif now - known.seen_at > self._age_of_claim(declared.name):
            written = self._engine.claim(declared.name, replace(known, seen_at=now))
        return list(claims.values()), written

    def _age_of_claim(self, name: str) -> float:
        watched = self._watched.get(name)
        ours = watched is not None and self._is_ours(watched)
        return CLAIM_SECONDS if ours else self._claim_age

    def _counts(
        self, claims: Sequence[Claim], definition: Definition, view: View, now: float
    ) -> bool:
        """Whether this worker's definition belongs in the head, and is not there."""
        winner, head = best(claims), view.schedule
        if winner is None or winner.digest != definition.digest:
            return False
        if head.digest == definition.digest:
            return not head.of_code  # it was made at run time, and is one of the code now
        # A worker of a release before 0.2 makes no claim, but says when it last saw the schedule.
        older = head.of_code and now - (head.claimed_at or 0.0) <= LIVES_SECONDS
        unclaimed = all(each.digest != head.digest for each in claims)
        return not (older and unclaimed and head.release > winner.release)

    def _define(self, definition: Definition, release: int, view: View | None) -> bool:
        done = self._engine.define(definition, release, self._by, view, of_code=True)
        if view is not None and done is not None and definition.name in self._watched:
            self._took(definition.name, done)  # what was due by the old definition is sent
        self._refresh(definition.name)
        return done is not None

    # -- one schedule ------------------------------------------------------------------------

    def _one(self, name: str, now: float) -> None:
        """Complete, admit and make what is due."""
        self._repair(name, now)
        self._sign_anew(name)
        self._admit(name, now)
        watched = self._watched.get(name)
        if watched is None or watched.due is None or not _is_active(watched, now):
            return
        view, ours = watched.view, self._is_ours(watched)
        if now < watched.due + (0.0 if ours else watched.stagger):
            return
        if not ours:
            fresh = self._refresh(name)
            if fresh is None or fresh.tag != view.tag:
                return  # the next turn goes on with what is new
            view = fresh
        self._took(name, self._engine.fire(view, self._by))

    def _sign_anew(self, name: str) -> None:
        """Sign what a release before 0.2 has stored, so that no queue accepts it any longer."""
        watched = self._watched.get(name)
        if watched is not None and self._engine.is_signed_before(watched.view):
            self._took(name, self._engine.sign_anew(watched.view))

    def _admit(self, name: str, now: float) -> None:
        """Let a waiting occurrence go if the task before it has ended."""
        watched = self._watched.get(name)
        if watched is None or not watched.view.waiting or now < watched.waits_at:
            return
        watched.waits_at = now + (REMOTE_WAITING_SECONDS if self._remote else WAITING_SECONDS)
        silent = now - watched.view.schedule.last_at > self._stagger[1] + watched.stagger
        if _is_active(watched, now) and (silent or self._is_ours(watched)):
            self._took(name, self._engine.admit(watched.view, self._by))

    def _took(self, name: str, view: View | None) -> None:
        """Go on with the new view, and send what became due; without one, read it again."""
        if view is None:
            self._refresh(name)
            return
        before = {made.key for made in self._watched[name].view.open if made.state == DUE}
        self._watch(view)
        for made in view.open:
            if made.state == DUE and made.key not in before:
                self._send(name, made)

    def _send(self, name: str, made: Made) -> None:
        watched = self._watched[name]
        self._engine.send(watched.view, made)
        rest = tuple(each for each in watched.view.open if each.key != made.key)
        watched.view = replace(watched.view, open=rest)

    def _repair(self, name: str, now: float) -> None:
        """Send occurrences whose worker died before it had sent them."""
        if not self._unsent(self._watched[name], now):
            return
        self._refresh(name)  # perhaps they were only slow
        watched = self._watched.get(name)
        for made in self._unsent(watched, now) if watched is not None else ():
            logger.warning("schedule %s: %s was not sent by %s", name, made.task_id, made.by)
            self._send(name, made)

    def _unsent(self, watched: _Watched, now: float) -> list[Made]:
        return [
            made
            for made in watched.view.open
            if made.state == DUE
            and now - made.made_at
            > RESEND_SECONDS + (0.0 if made.by == self._by else watched.stagger)
        ]

    def _refresh(self, name: str) -> View | None:
        """Read a schedule again; None if it is gone."""
        view = self._engine.view(name)
        if view is None:
            self._watched.pop(name, None)
        else:
            self._watch(view)
        return view

    def _is_ours(self, watched: _Watched) -> bool:
        return watched.view.schedule.by == self._by

    def _report(self, name: str, error: Exception) -> None:
        """Put a schedule aside, and log the error once, until it changes."""
        self._part.put_aside(ASIDE + name, error)
        text = reason_of(error)
        if self._reported.get(name) != text:
            self._reported[name] = text
            known = isinstance(error, AztaskError | Damaged)
            logger.error(
                "schedule %s: %s; it is tried again", name, text, exc_info=None if known else error
            )

    def _works(self, name: str) -> None:
        if self._reported.pop(name, None) is not None:
            self._part.take_back(ASIDE + name)


def _is_active(watched: _Watched, now: float) -> bool:
    return watched.view.state_at(now) == "active"
