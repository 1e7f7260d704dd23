"""What becomes of each request to a modelled service."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from .services import FINE, Fault, Outcome, Request

if TYPE_CHECKING:
    from .actors import Actor
    from .world import World

SLOW: Final = 2.0
"""Seconds after which a request counts as a fault that strikes what its sender holds."""


class Weather:
    """The fate of the requests of a world: mostly quick, and in a storm lost, refused or slow.

    * `storms`: until when, of which app, for which share of its requests, and their dice.
    * `calm`: everything at once, from the quiet time on.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.storms: list[tuple[float, str, float, random.Random]] = []
        self.calm = False

    def of(self, request: Request) -> Outcome:
        """The outcome of this request."""
        world = self._world
        actor = world.actor
        if self.calm or actor is None:
            return FINE
        now = world.time.now
        for storm in self.storms:
            until, label, share, dice = storm
            if now < until and label == actor.label and dice.random() < share:
                outcome = self._struck(request, dice)
                world.faults[outcome.fault.name.lower() if outcome.fault else "slow request"] += 1
                world.book.note(actor.name, f"{request.operation}: {outcome}", "")
                world.book.strike(actor)
                return outcome
        if world.dice.random() < 0.03:
            return Outcome(None, world.dice.random() * 0.05, world.dice.random() * 0.05)
        return FINE

    def is_busy(self, actor: Actor) -> bool:
        """Whether this actor's request to a file fails, because others write to it for too long."""
        if self.calm or actor is not self._world.actor or actor.site.locked():
            return False
        now = self._world.time.now
        for until, label, share, dice in self.storms:
            if now < until and label == actor.label and dice.random() < share:
                self._world.faults["busy file"] += 1
                self._world.book.note(actor.name, "the file is busy", "")
                self._world.book.strike(actor)
                return True
        return False

    def _struck(self, request: Request, dice: random.Random) -> Outcome:
        there, back = dice.random() * 0.5, dice.random() * 0.5
        if dice.random() < 0.2:
            return Outcome(None, dice.random() * 10.0, dice.random() * 10.0)
        faults = [each for each in request.faults if each is not Fault.FORBIDDEN]
        return Outcome(dice.choice(faults), there, back)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Everything at once inside the ``with`` block."""
        calm, self.calm = self.calm, True
        try:
            yield
        finally:
            self.calm = calm
