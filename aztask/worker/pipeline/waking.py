"""Tasks that wait inside their code, in the pipeline: after the record, before the settlement.

Rules
1. A run that has parked gets its row, which holds the message of its next hop. Then the signals are
   read: if one that it waits for is there, its child has ended, or it was cancelled, then its next
   hop is due at once. Who sends a signal writes first and reads then, so one of both sees the other
   (`aztask.steps.signals`). Where the timer's number is needed to cancel it, the timer is sent
   before the row that holds this number, and the settlement only completes the message.
2. A task that has ended loses its rows, and wakes the task that called it.
3. The next hop of a task that continues with other arguments gets these from its new history.
4. A repeated settlement repeats all of this.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from aztask.app import App
from aztask.errors import AztaskError, BrokerUnavailable, StepError
from aztask.message.message import CALLER
from aztask.settlement import DeadLetter, Resubmit
from aztask.steps.history import waits_in
from aztask.steps.home import StepHome
from aztask.steps.records import (
    FIRST_HISTORY,
    WAITING,
    history_of,
    next_history,
)
from aztask.steps.waits import ParkedRun
from aztask.worker.pipeline.redelivery import Redelivery
from aztask.worker.pipeline.work import Waits, WorkItem, message_of

logger = logging.getLogger(__name__)


class Waking:
    """Parks runs, and wakes those that others wait for. Any thread may call."""

    def __init__(self, app: App, redelivery: Redelivery) -> None:
        self._app = app
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
            if outcome is None or not (outcome.parked or outcome.renewed or outcome.state.final):
                continue
            message = message_of(item)
            caller = message.extra.get(CALLER)
            try:
                if outcome.parked:
                    self._park(item)
                    continue
                if outcome.renewed:
                    self._renew(item)
                    continue
                if message.continued or history_of(message) != FIRST_HISTORY:
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
        if self._app.broker.capabilities.timer_numbers and not item.timer:
            timer = self._redelivery.clone_envelope(item, settlement)
            item.timer = self._signals.set_timer(run, timer, repeated=repeated)
        if not self._signals.park(replace(run, timer=item.timer), clone):
            return
        if item.timer:
            self._signals.wake(run.id)
        else:
            item.hurry()

    def _renew(self, item: WorkItem) -> None:
        """Let the next hop have the arguments with which the task continues.

        They are in its new history. Where they are gone, a later hop has ended: it would find that
        its message comes too late.
        """
        message = message_of(item)
        history = next_history(history_of(message))
        found = self._steps.store().arguments(message, history)
        if found is not None and item.decided is not None:
            base = self._redelivery.delivery_base(item)
            clone = replace(message.renewed(found, history), delivery_base=base)
            item.decided = replace(item.decided, clone=clone)

    def _recorded(self, item: WorkItem) -> Waits:
        """What the run waits for, from its recorded waits: it ended in another delivery."""
        message = message_of(item)
        try:
            found = self._steps.store().read(message.id, history_of(message))
        except StepError:
            return Waits(0.0, ())
        waiting = [each for _, each in found if each.state == WAITING]
        waits = [wait for each in waiting for wait in waits_in(each)]
        return Waits(min((each.at for each in waiting), default=0.0), tuple(waits))
