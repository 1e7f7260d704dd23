"""Takes, confirms and frees the keys of unique tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from dataclasses import dataclass, fields, replace
from typing import Final

import msgpack

from aztask.errors import AztaskError, BrokerUnavailable, CodecError, ForeignId
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.queues.base import EnvelopeSender
from aztask.queues.local.payload import envelope_of, payload_of
from aztask.stores.payloads.holders import replaced_names
from aztask.stores.records.base import ResultStore, RunRecord, State
from aztask.stores.records.damage import Columns, Damaged
from aztask.stores.records.uniques import Held, Holder, HolderCell, UniqueStore
from aztask.stores.rows import Kept, New, change
from aztask.support.failpoint import hit
from aztask.uniqueness.rules import FINISHED, QUIET, STARTED, UniqueRules, task_of

logger = logging.getLogger(__name__)

# -- What is stored of the holder of a key ---------------------------------------------------------
#
# In the result store, packed by msgpack.

VERSION = 1


@dataclass(frozen=True, slots=True)
class KeyClaim:
    """The holder of a key. Times are UTC epoch seconds.

    * `task_id`, `generation`: the task.
    * `until`: "started", "finished", "quiet", or "" for a time.
    * `taken_at`: when it took the key; `ends_at`: when the key is free, whatever happened.
    * `queue`, `payload`: its signed message until it is sent, then "" and b"".
    * `due_at`: when the message may be received.
    * `closing`: a debounced message is being sent; the next call is another task.
    """

    task_id: str
    generation: int
    until: str
    taken_at: float
    ends_at: float
    queue: str = ""
    payload: bytes = b""
    due_at: float = 0.0
    closing: bool = False

    @property
    def sent(self) -> bool:
        """True once the broker has accepted the message."""
        return not self.payload

    def pack(self) -> bytes:
        """The claim as bytes; `read_claim` reads them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        packed: bytes = msgpack.packb({"v": VERSION, **values})
        return packed


def read_claim(data: bytes) -> KeyClaim:
    """The claim that `KeyClaim.pack` wrote. Raises Damaged."""
    found = Columns({"holder": data}).unpacked("holder")
    if not isinstance(found, dict) or found.get("v") != VERSION:
        raise Damaged("the holder of a unique task is wrong; a newer aztask may know it")
    columns = Columns(found)
    return KeyClaim(
        columns.text("task_id"),
        columns.count("generation"),
        columns.text("until"),
        columns.time("taken_at"),
        columns.time("ends_at"),
        columns.text("queue"),
        columns.data("payload") or b"",
        columns.time("due_at"),
        columns.flag("closing"),
    )


# -- Keys that are taken, confirmed and freed ------------------------------------------------------

UNIQUE: Final = "aztask-unique"
"""The header of a task that holds a key: until when, a colon, and the key."""

UNSENT_SECONDS: Final = 10.0
"""After this time, another process sends the message of a holder."""

REPLAYED_SECONDS: Final = 60.0
TRIES: Final = 64
REPLACED: Final = 100
"""How many holders one call replaces before it gives up."""

PAGE: Final = 100
FAILED_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Taken:
    """The answer to `UniqueEngine.take`: the key is ours. Publish, then `confirm`."""

    holder: Holder
    claim: KeyClaim


@dataclass(frozen=True, slots=True)
class Blocked:
    """The answer to `UniqueEngine.take`: another task holds the key."""

    holder: Holder
    claim: KeyClaim


@dataclass(frozen=True, slots=True)
class Postponed:
    """The answer to `UniqueEngine.postpone`.

    * `task_id`: the same for all calls of one quiet time.
    * `left`: names of the payloads that no call needs any longer.
    """

    task_id: str
    left: tuple[str, ...] = ()


class TakingCell(HolderCell):
    """A key that is taken: the holder that is expected is not asked for at first.

    * `asked`: whether the holder that was read last is the store's.
    """

    def __init__(self, store: UniqueStore, key: str, expected: Holder | None) -> None:
        super().__init__(store, key)
        self._expected = expected
        self._tried = self.asked = False
        self._written: Holder | None = None

    def read(self) -> Holder | None:
        """The expected holder; afterwards that of the store."""
        if not self._tried:
            self._tried = True
            return self._expected
        self.asked = True
        return super().read()

    def write(self, held: Held | None, before: Holder | None) -> bool:
        """Make a holder of this store's owner, also in the place of one without an owner."""
        assert held is not None  # noqa: S101  # a key that is taken is not released
        store = self.store
        replaces = before is None or before.owner == store.owner
        put = store.write if replaces else store.move
        self._written = put(self.key, *held, before)  # type: ignore[arg-type]
        return self._written is not None

    @property
    def written(self) -> Holder:
        """The holder that was made."""
        assert self._written is not None  # noqa: S101  # `change` returned because it was
        return self._written


class UniqueEngine:
    """The unique tasks of one result store. Any thread may call; a forked child makes its own."""

    def __init__(
        self,
        results: ResultStore,
        store: UniqueStore,
        codec: Codec,
        sender: Callable[[], EnvelopeSender],
        tasks: Container[str] = (),
    ) -> None:
        """`sender`: the broker of this process, opened when it is first needed.

        * `tasks`: the names of the tasks that the code here declares. Their holders without an
          owner are repaired, too.
        """
        self.results = results
        self.store = store
        self._codec = codec
        self._sender = sender
        self._tasks = tasks

    # -- senders -----------------------------------------------------------------------------

    def take(
        self,
        rules: UniqueRules,
        key: str,
        message: TaskMessage,
        delay: float,
        over: Blocked | None = None,
    ) -> Taken | Blocked:
        """Take a key for this message.

        * `over`: take it from this holder.

        If the process dies behind this, housekeeping sends the message (`repair`).
        """
        now = self.store.now()
        stored = payload_of(self._codec.to_envelope(message, delay=delay, stored=_place(message)))
        claim = KeyClaim(
            message.id,
            message.generation,
            rules.until,
            now,
            now + delay + rules.life,
            message.queue,
            stored,
            now + delay,
        )
        return self._take(key, claim, now + UNSENT_SECONDS, over)

    def admit(
        self, rules: UniqueRules, key: str, message: TaskMessage, over: Blocked | None = None
    ) -> Taken | Blocked:
        """Take a key for a message that was received: a member of a workflow.

        A task that holds the key already, because an earlier delivery of it took it, keeps it.

        * `over`: as in `take`.
        """
        now = self.store.now()
        claim = KeyClaim(message.id, message.generation, rules.until, now, now + rules.life)
        answer = self._take(key, claim, claim.ends_at, over)
        if isinstance(answer, Blocked) and answer.claim.task_id == message.id:
            return Taken(answer.holder, answer.claim)
        return answer

    def replace(
        self, blocked: Blocked, take: Callable[[Blocked], Taken | Blocked]
    ) -> Taken | Blocked:
        """Take the key from a task that waits, which is cancelled; one that runs keeps it.

        * `take`: tries to take the key from that holder.

        The key comes first: of several callers that replace one task, one has it, and the others
        replace that one in turn. If the process dies before the old task is cancelled, both run.
        """
        for _ in range(REPLACED):
            if not self.waits(blocked.claim):
                return blocked
            answer = take(blocked)
            if isinstance(answer, Taken):
                self.results.cancel(blocked.claim.task_id, self.store.now())
                return answer
            blocked = answer
        return blocked

    def _take(self, key: str, claim: KeyClaim, due: float, over: Blocked | None) -> Taken | Blocked:
        """Write the claim, unless another task holds the key. due: for `UniqueStore.due`."""
        cell = TakingCell(self.store, key, None if over is None else over.holder)
        claimed: New[Held, Blocked | None] = New((claim.pack(), due), None)

        def taken(before: Holder | None) -> New[Held, Blocked | None] | Kept[Blocked | None]:
            found = None if before is None or not cell.asked else _readable(before)
            if before is None or found is None or self._is_free(found, claim.taken_at):
                return claimed
            return Kept(Blocked(before, found))

        blocked = change(cell, taken, f"who holds {key}")
        if blocked is not None:
            return blocked
        hit("unique-taken")
        return Taken(cell.written, claim)

    def confirm(self, taken: Taken | Blocked) -> None:
        """Note that the holder's message is sent; nothing happens if it has ended since."""
        hit("unique-sent")
        claim = replace(taken.claim, queue="", payload=b"")
        self.store.write(taken.holder.key, claim.pack(), claim.ends_at, taken.holder)

    def give_up(self, taken: Taken) -> None:
        """Free a key that was taken for a message that was certainly not sent."""
        try:
            self.store.release(taken.holder)
        except AztaskError as error:
            logger.warning("%s stays taken, housekeeping sends it: %s", taken.claim.task_id, error)

    def complete(self, blocked: Blocked) -> None:
        """Send the message of a holder whose sender seems to be dead."""
        claim = blocked.claim
        if claim.sent or self.store.now() - claim.taken_at < UNSENT_SECONDS:
            return
        self._send(blocked)

    def postpone(
        self,
        rules: UniqueRules,
        key: str,
        make: Callable[[str | None], TaskMessage],
        delay: float,
    ) -> Postponed:
        """Keep the last call of a debounced task, to be sent after a quiet time.

        * `make`: makes the message of this call with a task id; None is a new one.

        However many calls come, the last one is sent at the end of its life at the latest. If the
        process dies behind this, housekeeping sends the message as it does in any case.

        The call that was replaced is never sent: its holder was not closing, and only a holder that
        is closing is sent. So nothing needs its arguments, nor those of a try that another process
        was faster than. If this raises, they stay: the store may have any of them.
        """
        left: list[str] = []
        for _ in range(TRIES):
            now, holder = self.store.now(), self.store.read(key)
            claim = None if holder is None else _readable(holder)
            if claim is not None and claim.closing:
                self._post(claim)  # or its message would be lost if the one that sends it is dead
            mine = claim if claim is not None and not claim.closing else None
            message = make(None if mine is None else mine.task_id)
            taken_at = now if mine is None else mine.taken_at
            ends_at = taken_at + rules.life
            payload = payload_of(self._codec.to_envelope(message, stored=_place(message)))
            due_at = now + delay
            new = KeyClaim(message.id, 0, QUIET, taken_at, ends_at, message.queue, payload, due_at)
            if self.store.write(key, new.pack(), min(now + rules.seconds, ends_at), holder):
                hit("unique-taken")
                if mine is not None:
                    left += replaced_names(mine.payload, payload, message.id)
                return Postponed(message.id, tuple(left))
            left += replaced_names(payload, b"", message.id)
        raise BrokerUnavailable(f"other processes keep changing {key}; try again")

    def waits(self, claim: KeyClaim) -> bool:
        """True if the task is known or may be in its queue, and has not started."""
        try:
            record = self.results.get(claim.task_id)
        except ForeignId:  # the task of another broker, which an unowned holder may name
            return False
        return record is None or (record.state is State.PENDING and not record.starts)

    def waits_quietly(self, key: str, task_id: str) -> bool:
        """True if this call is stored until no other one came for a time. Raises BrokerUnavailable.

        The row says so before such a call is sent (`_close`).
        """
        holder = self.store.read(key)
        claim = None if holder is None else _readable(holder)
        return (
            claim is not None
            and (claim.task_id, claim.until) == (task_id, QUIET)
            and not claim.closing
        )

    def _is_free(self, claim: KeyClaim, now: float) -> bool:
        """True if the key is free although its holder is stored: see rules 3 and 4."""
        if now >= claim.ends_at:
            return not self._parked(claim, now)
        if not claim.until:
            return False
        try:
            record = self.results.get(claim.task_id)
        except ForeignId:  # as in `waits`: that broker's workers see another holder
            return True
        return record is not None and _has_freed(record, claim, now)

    def _parked(self, claim: KeyClaim, now: float) -> bool:
        """True if its task waits inside its code, and holds the key until it has ended."""
        if claim.until != FINISHED:
            return False
        try:
            record = self.results.get(claim.task_id)
        except ForeignId:  # as in `waits`
            return False
        return record is not None and record.parked_at(now)

    # -- workers -----------------------------------------------------------------------------

    def started(self, message: TaskMessage) -> None:
        """Free the key of a task that starts, if it is unique until then."""
        self._free(message, STARTED)

    def ended(self, message: TaskMessage) -> None:
        """Free the key of a task that has ended for good, whatever it is unique until."""
        self._free(message, FINISHED)

    def _free(self, message: TaskMessage, when: str) -> None:
        """Free a key by compare on (id, generation). Raises BrokerUnavailable: call it again."""
        until, key = split(message)
        if key and not (when == STARTED and until != STARTED):
            self.free(key, message)

    def free(self, key: str, message: TaskMessage) -> None:
        """Free a key if this task holds it. Raises BrokerUnavailable: call it again."""

        def freed(holder: Holder | None) -> New[None, None] | Kept[None]:
            claim = None if holder is None else _readable(holder)
            mine = claim is not None and (claim.task_id, claim.generation) == (
                message.id,
                message.generation,
            )
            return New(None, None) if mine else Kept(None)

        change(HolderCell(self.store, key), freed, f"who holds {key}")

    # -- replays -----------------------------------------------------------------------------

    def retake(self, message: TaskMessage) -> str:
        """Take the key again for a replayed message; returns the task that holds it, "" if ours.

        The task itself, or an earlier generation of it, does not stand in its own way.
        """
        until, key = split(message)
        if not key:
            return ""

        def retaken(holder: Holder | None) -> New[Held, str] | Kept[str]:
            now, claim = self.store.now(), None if holder is None else _readable(holder)
            if claim is not None and claim.task_id != message.id and not self._is_free(claim, now):
                return Kept(claim.task_id)
            life = 86400.0 if claim is None else max(60.0, claim.ends_at - claim.taken_at)
            mine = KeyClaim(message.id, message.generation, until, now, now + life)
            return New((mine.pack(), mine.ends_at), "")

        return change(HolderCell(self.store, key), retaken, f"who holds {key}")

    # -- housekeeping ------------------------------------------------------------------------

    def repair(self) -> int:
        """Send what dead senders left, and free keys whose life has ended; returns how many.

        A holder that fails is tried again a minute later, so that failing ones do not keep the
        others from their turn. Holders without an owner are left to those who declare their task.
        """
        done, now = 0, self.store.now()
        unowned = self.store.due_unowned(now, PAGE, lambda key: task_of(key) in self._tasks)
        for holder in [*self.store.due(now, PAGE), *unowned]:
            try:
                done += self._repair(holder)
            except (AztaskError, ValueError, LookupError) as error:
                logger.error("unique task %s: %s; it is tried again", holder.key, error)
                self._put_back(holder)
        return done

    def _put_back(self, holder: Holder) -> None:
        try:
            again = self.store.now() + FAILED_SECONDS
            self.store.write(holder.key, holder.data, again, holder)
        except AztaskError as error:
            logger.debug("unique task %s is due at once: %s", holder.key, error)

    def _repair(self, holder: Holder) -> bool:
        claim = _readable(holder)
        if claim is not None and claim.until == QUIET:
            return self._close(holder, claim)
        if claim is not None and not claim.sent and self.store.now() < claim.ends_at:
            logger.warning("%s was not sent, since its sender died: it is sent now", claim.task_id)
            self._send(Blocked(holder, claim))
            return True
        now = self.store.now()
        if claim is not None and self._parked(claim, now):
            longer = replace(claim, ends_at=now + max(60.0, claim.ends_at - claim.taken_at))
            self.store.write(holder.key, longer.pack(), longer.ends_at, holder)
            return False
        return self.store.release(holder)

    def _close(self, holder: Holder, claim: KeyClaim) -> bool:
        """Send a debounced message after its quiet time; False if another process does.

        The holder says so first: a call that comes now is another task. If the process dies before
        the send, housekeeping or the next call sends the message, and before the release it is sent
        twice under one id.
        """
        if not claim.closing:
            closing, due = replace(claim, closing=True), self.store.now() + UNSENT_SECONDS
            taken = self.store.write(holder.key, closing.pack(), due, holder)
            if taken is None:
                return False
            holder = taken
        hit("unique-closing")
        self._post(claim)
        self.store.release(holder)
        return True

    def _send(self, blocked: Blocked) -> None:
        """Send the stored message under its id; one that is refused frees its key."""
        if self._post(blocked.claim):
            self.confirm(blocked)
        else:
            self.store.release(blocked.holder)

    def _post(self, claim: KeyClaim) -> bool:
        """Publish the stored message, verified; False if it is refused."""
        try:
            envelope = envelope_of(claim.payload)
            place = place_of(claim.task_id, claim.generation)
            message = self._codec.from_envelope(envelope, claim.queue, stored=place)
            if (message.id, message.generation) != (claim.task_id, claim.generation):
                raise Damaged(f"its message is that of task {message.id}")
        except (CodecError, Damaged) as error:
            logger.error("unique task %s is not sent: %s", claim.task_id, error)
            return False
        delay = max(0.0, claim.due_at - self.store.now())
        self._sender().send(claim.queue, [self._codec.to_envelope(message, delay=delay)])
        return True


def place_of(task_id: str, generation: int) -> str:
    """Where the message of a unique task is stored, as its signature says."""
    return f"unique task {task_id}, generation {generation}"


def _place(message: TaskMessage) -> str:
    return place_of(message.id, message.generation)


def split(message: TaskMessage) -> tuple[str, str]:
    """Until when a message holds a key, and the key; both "" if it holds none."""
    text = message.extra.get(UNIQUE)
    until, _, key = text.partition(":") if isinstance(text, str) else ("", "", "")
    return (until, key) if until in (STARTED, FINISHED) and key else ("", "")


def _readable(holder: Holder) -> KeyClaim | None:
    """The claim; None for a damaged one, which holds nothing."""
    try:
        return read_claim(holder.data)
    except Damaged as damage:
        logger.error("unique task %s: %s; its key is free", holder.key, damage.reason)
        return None


def _has_freed(record: RunRecord, claim: KeyClaim, now: float) -> bool:
    """True if the task of the holder has come so far that its key is free."""
    if record.key.generation < claim.generation:
        # A replay took the key, and died before it sent the task again.
        return record.state.final and now - claim.taken_at > REPLAYED_SECONDS
    if claim.until == STARTED:
        return record.state is not State.PENDING
    return record.state.final
