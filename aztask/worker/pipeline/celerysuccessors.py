"""Celery messages in the pipeline: what they embed follows their end, after the record.

Rules
1. A message that embeds nothing costs one comparison: `may_embed` is asked before `open`.
2. What follows is sent between the record of the outcome and the settlement, under ids that follow
   from the message. A crash in between sends it again, under the same ids.
3. A success sends the callbacks and the next task of the chain, and counts for the chord. A final
   failure sends the errbacks and counts for the chord; the rest of the chain is recorded as failed.
4. A message names the tasks that follow, so any program that may send decides what this worker
   sends. Tasks that neither the app nor `celery_may_send` names are refused, see `_Permission`:
   such a task is recorded as failed, and what would follow it fails as after any failure.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from aztask.app import App
from aztask.celery.embedded.chords import ChordPart, Chords, ChordState
from aztask.celery.embedded.launch import (
    Embedded,
    Launch,
    Launched,
    Signature,
    may_embed,
    read_embedded,
    signature,
)
from aztask.errors import CodecError, EncodeError, InvalidQueueName, QueueNotFound
from aztask.message.message import TaskMessage
from aztask.settlement import DeadLetter
from aztask.stores.records.base import Outcome, RunKey, RunRecord, State
from aztask.stores.records.workflows import workflows_of
from aztask.support.clock import Clock
from aztask.support.failpoint import hit
from aztask.support.floodlog import FloodLog
from aztask.worker.pipeline.pointers import UNDECODABLE
from aztask.worker.pipeline.work import WorkItem, message_of

logger = logging.getLogger(__name__)

UNKNOWN_CHORD: Final = "unknown-chord"
CHAIN_FAILED: Final = "chain-failed"
MAY_NOT_SEND: Final = "may-not-send"
ERRBACK_ARGUMENTS: Final = 3
"""Parameters of an errback that gets the request, the error and the traceback, as in Celery."""


class _Permission:
    """Decides which tasks a message may have sent. Without keys and list: all, with a warning."""

    def __init__(self, app: App, floods: FloodLog) -> None:
        named = app.settings.celery_may_send
        self._known = app.tasks
        self._named = frozenset(named or ())
        self._strict = named is not None or app.codec.signs
        self._floods = floods

    def refusal(self, message: TaskMessage) -> str:
        """Why a task is not sent; "" if it is."""
        task = message.task
        if task in self._known or task in self._named:
            return ""
        text = f"this app has no task {task}, and celery_may_send does not name it"
        if self._strict:
            return text
        self._floods.warning(
            logger,
            MAY_NOT_SEND,
            "task %s follows task %s to queue %s: %s; the next release refuses it",
            task,
            message.parent_id,
            message.queue,
            text,
        )
        return ""


class CelerySuccessors:
    """Reads what messages embed, and sends it when they end. Any thread may call."""

    def __init__(self, app: App, clock: Clock, floods: FloodLog) -> None:
        self._app = app
        self._clock = clock
        self._floods = floods
        self._permission = _Permission(app, floods)
        store = workflows_of(app.results)
        self._chords = None if store is None else Chords(store, clock.wall)

    def open(self, item: WorkItem) -> None:
        """Note what the message of `item` embeds; refuse what cannot be read or sent."""
        try:
            item.embedded = read_embedded(self._app.codec, message_of(item))
        except CodecError as error:
            item.refusal = (UNDECODABLE, str(error))

    def prepare(self, items: Sequence[WorkItem]) -> None:
        """Refuse members of chords that this result store does not know. Raises BrokerUnavailable.

        Their body would never be sent, and Celery would wait for it without end.
        """
        for item in items:
            if item.embedded is None or item.embedded.chord is None:
                continue
            group = message_of(item).group
            if group is None or self._chords is None or not self._chords.known(group):
                item.refusal = (
                    UNKNOWN_CHORD,
                    f"{item.label} is a member of a chord that this result store does not know;"
                    " set result_backend of the Celery producer to the store of the aztask workers",
                )

    def follow(self, items: Sequence[WorkItem]) -> None:
        """Send what follows the ends of these items, before they are settled.

        Raises CodecError if that cannot be written, BrokerUnavailable and SendUnconfirmed.
        """
        for item in items:
            if item.embedded is not None:
                self._ended(item, item.embedded)

    # -- ends --------------------------------------------------------------------------------

    def _ended(self, item: WorkItem, embedded: Embedded) -> None:
        decided, message = item.decided, message_of(item)
        if decided is None:
            return
        outcome = decided.outcome
        launch = self._launch(message)
        if outcome is not None and outcome.state is State.SUCCEEDED:
            data = outcome.value if outcome.value is not None else b"\xc0"
            value = self._app.codec.decode_value(data)
            for number, each in enumerate(embedded.callbacks):
                launch.follow(each, [value], f"link:{number}")
            if embedded.chain:
                launch.follow(embedded.chain[-1], [value], "chain", embedded.chain[:-1])
            self._join(launch, embedded, ChordPart(_index(message), message.id, data))
        elif outcome is not None and outcome.state.final:
            self._failed(launch, embedded, outcome)
        elif outcome is None and isinstance(decided.settlement, DeadLetter):
            dead = decided.settlement
            failed = Outcome(State.FAILED, dead, None, dead.reason, dead.description)
            self._failed(launch, embedded, failed)
        self._send(launch, repeated=decided.repeated or item.tries > 0)

    def _failed(self, launch: Launch, embedded: Embedded, outcome: Outcome) -> None:
        message = launch.parent
        text = (
            f"{outcome.error_type}: {outcome.error}" if outcome.error_type else outcome.state.value
        )
        if outcome.state is State.FAILED:
            self._errbacks(launch, embedded.errbacks, text, outcome.traceback)
        self._bury(message, reversed(embedded.chain), text)
        self._join(launch, embedded, ChordPart(_index(message), message.id, None, text))
        for each in embedded.chain:
            options = each.get("options") or {}
            if options.get("chord") and options.get("group_id"):
                last = Embedded(chord=signature(options["chord"], "chord"))
                part = ChordPart(int(options.get("group_index") or 0), message.id, None, text)
                self._join(launch, last, part, str(options["group_id"]))

    def _errbacks(
        self, launch: Launch, errbacks: Sequence[Signature], error: str, traceback: str
    ) -> None:
        """Send the errbacks. Those with one parameter get the id of the failed task."""
        message = launch.parent
        for number, each in enumerate(errbacks):
            task = self._app.tasks.get(str(each["task"]))
            values: list[Any] = [message.id]
            if task is not None and len(task.signature.parameters) >= ERRBACK_ARGUMENTS:
                request = {"id": message.id, "task": message.task, "root_id": message.root_id}
                values = [request, error, traceback]
            launch.follow(each, values, f"link_error:{number}")

    def _bury(self, message: TaskMessage, chain: Iterable[Signature], error: str) -> None:
        """Record the tasks that will not run as failed, so that ``get()`` of the chain ends."""
        results = self._app.results
        runs = []
        for each in chain:
            task_id = (each.get("options") or {}).get("task_id")
            if task_id:
                text = f"{message.task} {message.id} before it failed: {error}"
                shown = text
                if self._app.codec.encrypts:  # the text of an error may quote an argument
                    shown = f"{message.task} {message.id} before it failed"
                dead = DeadLetter(CHAIN_FAILED, shown)
                outcome = Outcome(
                    State.FAILED, dead, None, CHAIN_FAILED, text, at=self._clock.wall()
                )
                key = RunKey(str(task_id))
                runs.append(
                    RunRecord(key, str(each["task"]), message.queue, State.FAILED, outcome=outcome)
                )
        if runs and results is not None:
            results.bury(runs)

    # -- chords ------------------------------------------------------------------------------

    def _join(
        self, launch: Launch, embedded: Embedded, part: ChordPart, group: str | None = None
    ) -> None:
        """Count a member's end, and launch the body if it is the last one."""
        group = group or launch.parent.group
        if embedded.chord is None or self._chords is None or group is None:
            return
        state = self._chords.ended(group, part)
        if state is None:
            logger.warning(
                "chord %s is not known here any longer: its body is not sent, because its result"
                " store differs or the chord is older than result_retention",
                group,
            )
        elif state.full and not state.sent:
            self._full(launch, embedded.chord, state)
            launch.full.append(group)

    def _full(self, launch: Launch, body: Signature, state: ChordState) -> None:
        failures = [part for part in state.parts if part.value is None]
        if not failures:
            values = [self._app.codec.decode_value(part.value or b"\xc0") for part in state.parts]
            launch.follow(body, [values], "body")
            return
        error = f"ChordError: {failures[0].task_id} failed: {failures[0].error}"
        options: Mapping[str, Any] = body.get("options") or {}
        self._bury(launch.parent, [body], error)
        errbacks = options.get("link_error") or []
        self._errbacks(launch, errbacks if isinstance(errbacks, list) else [errbacks], error, "")

    # -- sending -----------------------------------------------------------------------------

    def _launch(self, message: TaskMessage) -> Launch:
        return Launch(self._app.codec, message, self._queue_of, self._clock.wall())

    def _queue_of(self, task: str) -> str | None:
        known = self._app.tasks.get(task)
        return None if known is None else self._app.queue_for(known, {})

    def _send(self, launch: Launch, *, repeated: bool) -> None:
        """Send what was launched, chords first. Of a repeated end, only what is not known yet."""
        for chord in launch.chords:
            if self._chords is not None:
                self._chords.start(chord.group, chord.size)
        queues: dict[str, list[Launched]] = {}
        for each in launch.messages:
            if repeated and self._known(each.message.id):
                continue
            if refusal := self._permission.refusal(each.message):
                self._refuse(each.message, refusal, repeated=repeated)
            else:
                queues.setdefault(each.message.queue, []).append(each)
        for queue, launched in queues.items():
            codec = self._app.codec
            envelopes = [codec.to_envelope(each.message, delay=each.delay) for each in launched]
            try:
                self._app.broker.send(queue, envelopes)
            except (InvalidQueueName, QueueNotFound) as error:
                # No outage: trying again would repeat it without end, so the message is refused.
                raise EncodeError(f"what follows cannot be sent to {queue!r}: {error}") from None
            hit("followed", len(envelopes))
        for group in launch.full:
            if self._chords is not None:
                self._chords.note_sent(group)

    def _refuse(self, message: TaskMessage, text: str, *, repeated: bool) -> None:
        """Record a task that may not be sent as failed, and act on that as on any failure.

        It is recorded last: if the process dies before that, the redelivery of the message before
        does all of this again, under the same ids.
        """
        line = "task %s %s is not sent after task %s: %s"
        self._floods.warning(
            logger, MAY_NOT_SEND, line, message.task, message.id, message.parent_id, text
        )
        dead = DeadLetter(MAY_NOT_SEND, text)
        outcome = Outcome(State.FAILED, dead, None, MAY_NOT_SEND, text, at=self._clock.wall())
        launch = self._launch(message)
        embedded = read_embedded(self._app.codec, message) if may_embed(message) else None
        if embedded is not None:
            self._failed(launch, embedded, outcome)
            self._send(launch, repeated=repeated)
        if self._app.results is not None:
            key, state = RunKey(*message.key), State.FAILED
            record = RunRecord(key, message.task, message.queue, state, outcome=outcome)
            self._app.results.bury([record])

    def _known(self, task_id: str) -> bool:
        return self._app.results is not None and self._app.results.get(task_id) is not None


def _index(message: TaskMessage) -> int:
    """The member's place in the header of its chord."""
    index = message.extra.get("group_index")
    return index if isinstance(index, int) else 0
