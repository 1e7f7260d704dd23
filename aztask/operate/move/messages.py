"""The messages of one queue, from the old broker to the new one.

    dead letters -> scheduled messages -> waiting ones, session by session

Rules
1. A message is sent to the new broker before it leaves the old one. A process that goes on after a
   crash sends it again, under the same message id (`MoveJournal.token`).
2. A start row names the position of the message that owns it, and a position of the old queue may
   be that of another message in the new one. So the row of a message that may have started is
   claimed and given back before it is sent, as for a message that is put off: a row without an
   owner admits one copy, whichever comes first. Rows whose copies may have been sent already are
   left alone (`MoveJournal.plan`).
3. A pointer is never moved, because its position means nothing at the new broker. The message that
   it calls for is sent in its place, for the time at which the pointer was due.
4. A dead letter is sent to its queue with its reason in its headers, and what receives it there
   dead-letters it again without running it (`aztask.settlement.moved_dead_letter`).
5. A session moves in order, one message after the other. If one of them cannot be moved, the
   session stays from there on.
6. What cannot be moved stays, and is counted with the reason.

Crash windows

* Sent, not removed: it is sent again under the same id. Duplicate detection drops the second one;
  without it there are two copies, and the start row admits one of them.
* The start row given back, nothing sent: the row admits the message whenever it is sent.
* A pointer's message sent, or completed, the pointer still there: the next process finds the
  message gone, and removes the pointer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Final

from aztask.app import App
from aztask.errors import (
    CapabilityError,
    CodecError,
    ConfigurationError,
    EncodeError,
    LeaseLost,
    MessageTooLarge,
    SendUnconfirmed,
)
from aztask.message.envelope import DEAD_DESCRIPTION, DEAD_REASON, Envelope, living
from aztask.message.headers import SIGNATURES, VERSION
from aztask.message.message import TaskMessage
from aztask.operate.action import results_of
from aztask.operate.move.journal import MoveJournal, RunKeyParts
from aztask.queues.base import (
    ANY_SESSION,
    AnySession,
    Inspectable,
    MessageState,
    Peeked,
    Position,
    ReadsAhead,
    Receiver,
    SessionHolder,
)
from aztask.queues.delivery import Delivery, Settled
from aztask.settlement import Complete, Release
from aztask.stores.records.base import Cancelled, Owned, RunKey, Start, owner_of
from aztask.stores.records.deadindex import index_for, key_of
from aztask.support import chance, clock
from aztask.support.failpoint import hit

logger = logging.getLogger(__name__)

BATCH: Final = 100
REMOTE_LEASE: Final = 60.0
LOCAL_LEASE: Final = 30.0
REMOTE_WAIT: Final = 3.0
LOCAL_WAIT: Final = 0.05
SEND_TRIES: Final = 5
POINTER: Final = "aztask-pointer"
NEWEST: Final = 10**9
"""A delivery count that no delivery has: this process holds the lease, so no delivery is newer."""

NAME: Final = "aztask move"


@dataclass(slots=True)
class QueueMoved:
    """What was moved of one queue.

    * `messages`, `scheduled`, `dead`: how many. `left`: how many stay, by the reason.
    * `unsure`: how many were sent and are perhaps still at the old address.
    """

    queue: str
    messages: int = 0
    scheduled: int = 0
    dead: int = 0
    left: Counter[str] = field(default_factory=Counter)
    unsure: int = 0

    @property
    def total(self) -> int:
        """All that were moved, dead letters too."""
        return self.messages + self.scheduled + self.dead


@dataclass(slots=True)
class Ready:
    """A message that is ready to be sent to the new broker.

    * `started`: its run may have a start row.
    * `leaves`: what is completed afterwards, in order: the message, then a pointer to it.
    * `cancels`: the scheduled message that is cancelled then.
    """

    envelope: Envelope
    message: TaskMessage | None
    started: bool
    position: Position
    leaves: list[tuple[Receiver, Delivery]] = field(default_factory=list)
    cancels: Peeked | None = None

    @property
    def positions(self) -> set[Position]:
        """Of all that leaves the old queue for it."""
        found = {delivery.position for _, delivery in self.leaves}
        return found if self.cancels is None else found | {self.cancels.position}


class QueueMove:
    """Moves one queue. One thread. Close it."""

    def __init__(
        self, old: App, new: App, queue: str, journal: MoveJournal, *, sessions: bool
    ) -> None:
        """
        * `old`, `new`: the app at both addresses. Its rows belong to the new owner already.
        * `sessions`: whether the queue has sessions.
        """
        self._old = old
        self._new = new
        self._queue = queue
        self._journal = journal
        self._with_sessions = sessions
        self._results = results_of(new)
        self._index = index_for(old.broker, new.results)
        self._can = old.broker.capabilities
        self._wait = REMOTE_WAIT if self._can.remote else LOCAL_WAIT
        self._limit = min(BATCH, self._can.receive_limit)
        self._open: list[Receiver] = []
        self._stuck: set[Position] = set()
        self._recalling: Receiver | None = None
        self.moved = QueueMoved(queue)

    def run(self) -> QueueMoved:
        """Move what can be moved now.

        Raises BrokerUnavailable, and MoveTaken if another process took over. Run it again then.
        """
        try:
            if self._can.defer and not self._with_sessions:
                self._recalling = self._receiver()
            self._dead_letters()
            if self._can.paged_peek:
                self._scheduled()
            if self._with_sessions:
                self._sessions()
            else:
                receiver = self._receiver()
                for batch in self._received(receiver):
                    self.moved.messages += len(self._deliver(self._living(receiver, batch)))
        finally:
            for each in self._open:
                each.close()
        return self.moved

    # -- dead letters ------------------------------------------------------------------------

    def _dead_letters(self) -> None:
        receiver = self._receiver(dead_letter=True)
        for batch in self._received(receiver):
            ready = []
            for found in batch:
                marks = {DEAD_REASON: found.dead_letter_reason or "unknown"}
                if found.dead_letter_description:
                    marks[DEAD_DESCRIPTION] = found.dead_letter_description
                made = self._ready(found, receiver, marks=marks, any_age=True)
                ready += [] if made is None else [made]
            gone = self._deliver(ready)
            self.moved.dead += len(gone)
            if self._index is not None and gone:
                keys = {key_of(each.leaves[0][1].envelope) for each in gone}
                self._index.drop(self._queue, keys)

    # -- scheduled messages ------------------------------------------------------------------

    def _scheduled(self) -> None:
        """By peeking: a scheduled message is at both brokers until it is cancelled at the old one.

        If it becomes active in between, it is received as a waiting one, and sent under its id.
        """
        page = self._old.broker.peek(self._queue, limit=BATCH)
        while page:
            self._journal.noted()
            due = [each for each in page if each.state is MessageState.SCHEDULED]
            ready = [self._timed(each) for each in due if self._cancels(each)]
            gone = self._deliver([each for each in ready if each is not None])
            self.moved.scheduled += len(gone)
            page = self._old.broker.peek(self._queue, after=page[-1].position, limit=BATCH)

    def _cancels(self, found: Peeked) -> bool:
        """Whether it can be cancelled: by its number, or by an id. Else it moves when it is due."""
        return self._can.timer_numbers or bool(found.envelope.message_id)

    def _timed(self, found: Peeked) -> Ready | None:
        delay = _left(found.due)
        made = self._ready(found, None, delay=delay, any_age=True)
        if made is not None:
            made.cancels = found
        return made

    def _cancel(self, found: Peeked) -> bool:
        if self._can.timer_numbers:
            return self._old.broker.cancel_timer(self._queue, int(found.position))
        return self._old.broker.cancel_scheduled(self._queue, [found.envelope.message_id]) > 0

    # -- waiting messages --------------------------------------------------------------------

    def _living(self, receiver: Receiver, batch: Sequence[Delivery]) -> list[Ready]:
        """A service without pages hides delayed messages: these are received before their time.

        In a session, those up to the first one that stays.
        """
        ahead = not self._can.paged_peek
        made: list[Ready] = []
        for each in batch:
            ready = self._ready(each, receiver, delay=_left(each.enqueued_at) if ahead else 0.0)
            if ready is not None:
                made.append(ready)
            elif each.session is not None:
                break
        return made

    def _sessions(self) -> None:
        """One session after the other; one that cannot move is held until all others have."""
        receiver = self._receiver(session=ANY_SESSION)
        while batch := receiver.receive(self._limit, self._wait):
            self._journal.noted()
            if not self._session_moves(receiver, batch):
                receiver = self._receiver(session=ANY_SESSION)

    def _session_moves(self, receiver: Receiver, batch: Sequence[Delivery]) -> bool:
        """Move messages of one session, in order, up to the first one that stays (rule 5)."""
        session = batch[0].session
        if session is not None and not self._state_moves(receiver, session):
            receiver.settle([(each, Release()) for each in batch])
            return False
        before = self.moved.left.total()
        ready = self._living(receiver, batch)
        gone = len(self._deliver(ready))
        self.moved.messages += gone
        return self.moved.left.total() == before

    def _state_moves(self, receiver: Receiver, session: str) -> bool:
        """Move what is stored with a session, before its first message.

        Crash window: written at the new broker, not removed at the old one: the next process keeps
        what the new one has, if it has something.
        """
        if not isinstance(receiver, SessionHolder):
            return True
        state = receiver.session_state(session)
        if state is None:
            return True
        lease = lease_of(self._new, self._queue)
        there = self._new.broker.receiver(self._queue, lease=lease, session=session)
        try:
            met = there.receive(1, self._wait)
            if not isinstance(there, SessionHolder):
                raise CapabilityError("the new broker keeps no states of sessions")
            if there.session_state(session) is None:
                there.set_session_state(session, state)
            there.settle([(each, Release()) for each in met])
        except LeaseLost:
            self.moved.left["their session is in use at the new address"] += 1
            return False
        finally:
            there.close()
        receiver.set_session_state(session, None)
        return True

    # -- one message -------------------------------------------------------------------------

    def _ready(
        self,
        found: Delivery | Peeked,
        receiver: Receiver | None,
        *,
        delay: float = 0.0,
        marks: Mapping[str, str] | None = None,
        any_age: bool = False,
    ) -> Ready | None:
        """What is sent for a message; None if it stays, or if nothing has to be sent for it.

        receiver: has its lease; None for a scheduled message, which has none.
        """
        leaves = [(receiver, found)] if receiver is not None and isinstance(found, Delivery) else []
        if found.envelope.problem:
            self._stays(found, "the client library cannot read them")
            return None
        message = self._read(found, any_age=any_age)
        started = found.delivery_count - (message.delivery_base if message else 0) > bool(leaves)
        if POINTER in found.envelope.headers and self._can.defer and message is not None:
            called = self._recalled(found, message, leaves)
            if called is None:
                return None
            found, message = called
            started = True
        envelope = self._envelope(found.envelope, message, marks or {}, delay)
        made_id = self._message_id(found, dead=bool(marks))
        envelope = replace(envelope, message_id=made_id)
        return Ready(envelope, message, started, found.position, leaves)

    def _read(self, found: Delivery | Peeked, *, any_age: bool) -> TaskMessage | None:
        """The message, if it is one of a task. One that no worker accepts moves as it is."""
        try:
            return self._old.message_in(
                found.envelope, self._queue, found.position, any_age=any_age
            )
        except CodecError:
            return None

    def _envelope(
        self, old: Envelope, message: TaskMessage | None, marks: Mapping[str, str], delay: float
    ) -> Envelope:
        """As it is, or signed anew: for its new time of sending, and for what changes in it.

        The delivery count of the new broker starts at 0, and with it the base.
        """
        signed = bool(SIGNATURES & old.headers.keys())
        if signed and not self._old.codec.signs:
            raise ConfigurationError(
                "the messages are signed, and no signing key is configured here: name the app with "
                "-A, so that what is moved is signed anew"
            )
        if message is not None and VERSION in old.headers and (signed or message.delivery_base):
            extra = {**living(message.extra), **marks}
            message = replace(message, delivery_base=0, extra=extra)
            return self._old.codec.to_envelope(message, delay=delay)
        return replace(old, delay=delay, headers={**living(old.headers), **marks})

    def _message_id(self, found: Delivery | Peeked, *, dead: bool) -> str:
        """The same one whenever this move sends it, and no other move has it (`MoveJournal`)."""
        name = found.envelope.message_id or f"position {found.position}"
        text = "\0".join((self._journal.token, self._queue, "dead" if dead else "", name))
        return f"moved-{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"

    def _recalled(
        self,
        found: Delivery | Peeked,
        pointing: TaskMessage,
        leaves: list[tuple[Receiver, Delivery]],
    ) -> tuple[Delivery, TaskMessage | None] | None:
        """The deferred message that a pointer calls for, in the pointer's place (rule 3)."""
        position, receiver = pointing.pointer or 0, self._recalling
        deferred = [] if receiver is None else receiver.receive_deferred([position])
        if receiver is None or not deferred:
            there = self._old.broker.peek(self._queue, after=position - 1, limit=1)
            held = there and there[0].position == position
            if held and there[0].state is MessageState.DEFERRED:
                self._stays(found, "another process holds what they point to")
            elif leaves:
                leaves[0][0].settle([(leaves[0][1], Complete())])
            elif isinstance(found, Peeked):
                self._cancel(found)
            return None
        leaves.insert(0, (receiver, deferred[0]))
        message = self._read(deferred[0], any_age=True)
        if message is not None and pointing.generation > message.generation:
            # The pointer was replayed from the dead letters, so its message starts over, too.
            message = replace(
                message,
                generation=pointing.generation,
                hop=pointing.hop,
                resubmit_count=0,
                snooze_count=0,
                delivery_base=1,  # so that it is written anew
            )
        return deferred[0], message

    def _stays(self, found: Delivery | Peeked, why: str) -> None:
        """Count a message that cannot move, once."""
        if found.position not in self._stuck:
            self._stuck.add(found.position)
            self.moved.left[why] += 1

    # -- sending -----------------------------------------------------------------------------

    def _deliver(self, ready: Sequence[Ready]) -> list[Ready]:
        """Send these, and remove them at the old broker; returns what was sent.

        Crash windows: see above.
        """
        if not ready:
            return []
        self._give_back(ready)
        sent = self._sent(ready)
        hit("move-sent", len(sent))
        by_receiver: dict[int, tuple[Receiver, list[Delivery]]] = {}
        for each in sent:
            for receiver, delivery in each.leaves:
                by_receiver.setdefault(id(receiver), (receiver, []))[1].append(delivery)
        # The receiver of deferred messages comes first: a pointer ends after its message.
        order = sorted(by_receiver.values(), key=lambda pair: pair[0] is not self._recalling)
        unsure: set[Position] = set()
        for receiver, deliveries in order:
            answers = receiver.settle([(each, Complete()) for each in deliveries])
            there = zip(deliveries, answers, strict=True)
            unsure.update(each.position for each, how in there if not isinstance(how, Settled))
        for each in sent:
            if each.cancels is not None and not self._cancel(each.cancels):
                unsure.add(each.cancels.position)
        hit("move-removed", len(sent))
        self.moved.unsure += len(unsure)
        if unsure:
            self._journal.doubt(
                {each.message.key for each in sent if each.message and unsure & each.positions}
            )
        self._journal.noted()
        return sent

    def _give_back(self, ready: Sequence[Ready]) -> None:
        """Give back the start rows of runs that may have one (rule 2)."""
        planned = self._journal.planned
        found: dict[RunKeyParts, tuple[Ready, TaskMessage]] = {
            each.message.key: (each, each.message)
            for each in ready
            if each.started and each.message is not None and each.message.key not in planned
        }
        if not found:
            return
        name = owner_of(f"{NAME} {chance.token()}", NEWEST)
        now = clock.wall()
        starts = [
            Start(RunKey(*key), message.task, self._queue, each.position, name, NAME, now)
            for key, (each, message) in found.items()
        ]
        answers = self._results.start(starts)
        ours = [
            (start.key, name)
            for start, answer in zip(starts, answers, strict=True)
            if isinstance(answer, Owned | Cancelled)
        ]
        self._results.disown(ours)
        self._journal.plan(found)
        hit("move-planned")

    def _sent(self, ready: Sequence[Ready]) -> list[Ready]:
        """Send all; if the new broker refuses one, each alone, and in a session none behind it."""
        try:
            self._send(ready)
            return list(ready)
        except (MessageTooLarge, EncodeError, CapabilityError) as error:
            if len(ready) == 1:
                self.moved.left[f"the new broker refuses them: {type(error).__name__}"] += 1
                logger.warning("a message of queue %s stays: %s", self._queue, error)
                self._stuck.add(ready[0].position)
                return []
        sent: list[Ready] = []
        for each in ready:
            one = self._sent([each])
            sent += one
            if not one and each.envelope.session is not None:
                break
        return sent

    def _send(self, ready: Sequence[Ready]) -> None:
        envelopes = [each.envelope for each in ready]
        for attempt in range(SEND_TRIES):
            try:
                self._new.broker.send(self._queue, envelopes)
                return
            except SendUnconfirmed:
                if attempt == SEND_TRIES - 1:
                    raise

    # -- receiving ---------------------------------------------------------------------------

    def _receiver(
        self, *, dead_letter: bool = False, session: AnySession | None = None
    ) -> Receiver:
        lease = lease_of(self._old, self._queue)
        receiver = self._old.broker.receiver(
            self._queue, lease=lease, session=session, dead_letter=dead_letter
        )
        if isinstance(receiver, ReadsAhead):
            receiver.read_ahead()
        self._open.append(receiver)
        return receiver

    def _received(self, receiver: Receiver) -> Iterator[Sequence[Delivery]]:
        """Batches until nothing comes, or only what stays. What stays is released at the end."""
        held: dict[Position, Delivery] = {}
        while batch := receiver.receive(self._limit, self._wait):
            self._journal.noted()
            yield batch
            stuck = {each.position: each for each in batch if each.position in self._stuck}
            if len(stuck) == len(batch) and stuck.keys() <= held.keys():
                break
            held |= stuck
        receiver.settle([(each, Release()) for each in held.values()])


def lease_of(app: App, queue: str) -> float:
    """The lease of a receiver: where the queue decides it, what that says."""
    can = app.broker.capabilities
    if not can.fixed_lease:
        return REMOTE_LEASE if can.remote else LOCAL_LEASE
    known = None
    if isinstance(app.broker, Inspectable):
        known = app.broker.inspector().facts(queue).lease_seconds
    return app.lease_now(queue) if known is None else known


def _left(due: float | None) -> float:
    """Seconds until a time; 0 if it has passed, or if there is none."""
    return 0.0 if due is None else max(0.0, due - clock.wall())
