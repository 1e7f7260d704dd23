"""Tasks that wait inside their code, in the pipeline: after the record, before the settlement.

Rules
1. A run that has parked gets its row, which holds the message of its next hop. Then the signals are
   read: if one that it waits for is there, or its child has ended, its next hop is due at once. Who
   sends a signal writes first and reads then, so one of both sees the other
   (`aztask.steps.signals`).
2. A task that has ended loses its rows, and wakes the task that called it.
3. A repeated settlement repeats all of this.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from aztask.app import App
from aztask.errors import AztaskError, BrokerUnavailable, StepError
from aztask.message.message import CALLER
from aztask.settlement import DeadLetter, Resubmit
from aztask.steps.history import NAMES
from aztask.steps.home import StepHome
from aztask.steps.records import CALL, SIGNAL, WAITING, history_of
from aztask.steps.waits import CHILD, SIGNALS, SLEEPS, ParkedRun, Wait
from aztask.worker.pipeline.redelivery import Redelivery
from aztask.worker.pipeline.work import Waits, WorkItem, message_of

logger = logging.getLogger(__name__)


class Waking:
    """Parks runs, and wakes those that others wait for. Any thread may call."""

    def __init__(self, app: App, redelivery: Redelivery) -> None:
        self._signals = app.sends.signals
        self._steps = StepHome(app)
        self._redelivery = redelivery

    def follow(self, items: Sequence[WorkItem]) -> None:
        """Do what follows these outcomes, which are recorded.

        Raises BrokerUnavailable: nothing is settled, and it is tried again. Any other error is of
        this task alone, which then wakes at its time.
        """
        for item in items:
            outcome = item.outcome
            if outcome is None or not (outcome.parked or outcome.state.final):
                continue
            message = message_of(item)
            caller = message.extra.get(CALLER)
            try:
                if outcome.parked:
                    self._park(item)
                    continue
                if message.continued:
                    dead = isinstance(outcome.settlement, DeadLetter)
                    self._signals.ended(message.id, dead=dead)
                if isinstance(caller, str):
                    self._signals.child_ended(caller, message.id)
            except BrokerUnavailable:
                raise
            except AztaskError as error:
                logger.warning("%s waits, and wakes at its time alone: %s", item.label, error)

    def _park(self, item: WorkItem) -> None:
        settlement, message = item.settlement, message_of(item)
        if not isinstance(settlement, Resubmit):
            return
        repeated = item.decided is not None and item.decided.repeated
        if repeated and self._signals.has_gone_on(item.key):
            return
        clone = self._redelivery.clone(item, settlement)
        since, waits = item.waits_for or self._recorded(item)
        due = settlement.due or self._signals.now()
        place = (message.id, message.task, item.queue, clone.generation, clone.hop)
        run = ParkedRun(*place, since, due, waits, b"")
        if self._signals.park(run, clone):
            item.hurry()

    def _recorded(self, item: WorkItem) -> Waits:
        """What the run waits for, from its recorded waits: it ended in another delivery."""
        message = message_of(item)
        try:
            found = self._steps.store().read(message.id, history_of(message))
        except StepError:
            return Waits(0.0, ())
        waiting = [each for _, each in found if each.state == WAITING]
        kinds = {CALL: CHILD, SIGNAL: SIGNALS}
        waits = [
            Wait(kinds.get(each.kind, SLEEPS), tuple(each.source.split(NAMES)), each.due)
            for each in waiting
        ]
        return Waits(min((each.at for each in waiting), default=0.0), tuple(waits))
