"""What a worker does for schedules all the time: one `turn` after another, each of them short."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from aztask.errors import AztaskError
from aztask.results.damage import Damaged
from aztask.schedules.engine import ScheduleEngine, View
from aztask.schedules.stored import DUE, Made, Schedule
from aztask.schedules.template import Definition

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
"""When a claim is this old, the worker that makes the occurrences renews it; others later."""

WAITING_SECONDS: Final = 1.0
REMOTE_WAITING_SECONDS: Final = 5.0
TROUBLE_SECONDS: Final = 5.0
LONGEST_PAUSE: Final = 1.0


@dataclass(frozen=True, slots=True)
class Declared:
    """A schedule of the code. `define`: makes its definition, at the first use."""

    name: str
    release: int
    define: Callable[[], Definition]


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
    waits_at: float = 0.0
    retry_at: float = 0.0


class Runner:
    """Takes part in making occurrences. One thread calls it.

    * `by`: the worker's name.
    * `dice`: for the staggers.
    """

    def __init__(
        self,
        engine: ScheduleEngine,
        declared: Sequence[Declared],
        by: str,
        dice: random.Random | None = None,
    ) -> None:
        self._engine = engine
        self._declared = {each.name: each for each in declared}
        self._definitions: dict[str, Definition] = {}
        self._by = by
        self._dice = dice or random.Random()  # noqa: S311  # no secret
        self._remote = engine.results.remote
        self._look_seconds = REMOTE_LOOK_SECONDS if self._remote else LOOK_SECONDS
        self._stagger = REMOTE_STAGGER if self._remote else STAGGER
        self._start = REMOTE_START_SECONDS if self._remote else START_SECONDS
        self._watched: dict[str, _Watched] = {}
        self._look_at = 0.0
        self._started_at: float | None = None
        self._claim_age = CLAIM_SECONDS * self._dice.uniform(1.5, 2.5)
        self._reported: dict[str, str] = {}

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
            self._look(now)
        names = list(self._watched)
        self._dice.shuffle(names)  # so that workers that catch up begin at different ones
        for name in names:
            watched = self._watched[name]
            if now >= watched.retry_at:
                try:
                    self._one(name, now)
                    self._reported.pop(name, None)
                except (AztaskError, Damaged, LookupError, ValueError) as error:
                    if name in self._watched:
                        self._watched[name].retry_at = now + TROUBLE_SECONDS
                    self._report(name, error)
        return self._pause()

    def _pause(self) -> float:
        now = self._engine.store.now()
        soon = now + LONGEST_PAUSE
        for watched in self._watched.values():
            if watched.due is not None and watched.view.schedule.state_at(now) == "active":
                wait = 0.0 if self._is_ours(watched) else watched.stagger
                soon = min(soon, max(watched.due + wait, watched.retry_at))
        return max(0.01, min(soon, self._look_at) - now)

    # -- looking -----------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        before, self._watched = self._watched, {}
        for name, view in self._engine.views():
            if isinstance(view, Damaged):
                self._report(name, view)
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
            except (AztaskError, Damaged, ValueError) as error:
                self._report(declared.name, error)

    def _watch(self, view: View) -> None:
        """Go on with this view of a schedule."""
        stagger = self._dice.uniform(*self._stagger)
        known = self._watched.pop(view.name, None)
        waits_at, retry_at = (known.waits_at, known.retry_at) if known else (0.0, 0.0)
        try:
            due = self._engine.next_due(view)
        except (AztaskError, Damaged) as error:
            self._report(view.name, error)
            return
        self._watched[view.name] = _Watched(view, due, stagger, waits_at, retry_at)

    def _claim(self, declared: Declared, now: float) -> None:
        """Make a schedule of the code, replace an older definition, or say that it is in use."""
        definition = self._definitions.get(declared.name)
        if definition is None:
            definition = self._definitions[declared.name] = declared.define()
            if declared.name not in self._watched:
                # Workers that start together do not all make it: the others find it.
                self._look_at = now + self._dice.uniform(0.0, self._start)
                return
        watched = self._watched.get(declared.name)
        if watched is None:
            view = self._engine.view(declared.name)
            if view is not None:
                self._watch(view)
            elif self._define(definition, declared.release, None):
                logger.info("schedule %s is new", declared.name)
            return
        schedule = watched.view.schedule
        if schedule.digest != definition.digest and self._is_newer(declared, watched.view):
            if self._define(definition, declared.release, watched.view):
                logger.info("schedule %s has a new definition", declared.name)
        elif schedule.claimed_at is not None:
            age = CLAIM_SECONDS if self._is_ours(watched) else self._claim_age
            if now - schedule.claimed_at > age:
                self._renew(declared.name, now)

    def _is_newer(self, declared: Declared, view: View) -> bool:
        """The higher release wins; of equal ones that of the worker that started last."""
        mine = (declared.release, self._started_at or 0.0)
        return mine > (view.schedule.release, view.schedule.deployed_at)

    def _define(self, definition: Definition, release: int, view: View | None) -> bool:
        done = self._engine.define(
            definition, release, self._started_at or 0.0, self._by, view, claimed=True
        )
        self._refresh(definition.name)
        return done

    def _renew(self, name: str, now: float) -> None:
        def claimed(view: View) -> Schedule | None:
            schedule = view.schedule
            fresh = schedule.claimed_at is None or schedule.claimed_at > now - CLAIM_SECONDS
            return None if fresh else replace(schedule, claimed_at=now)

        view = self._engine.change(name, claimed)
        if view is not None:
            self._watch(view)

    # -- one schedule ------------------------------------------------------------------------

    def _one(self, name: str, now: float) -> None:
        """Complete, admit and make what is due."""
        self._repair(name, now)
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
        self._took(name, self._engine.fire(view, self._by, claimed=name in self._declared))

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
        """Log an error once, until it changes."""
        text = str(error)
        if self._reported.get(name) != text:
            self._reported[name] = text
            logger.error("schedule %s: %s; it is tried again", name, text)


def _is_active(watched: _Watched, now: float) -> bool:
    return watched.view.schedule.state_at(now) == "active"
