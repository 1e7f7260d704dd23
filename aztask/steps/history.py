"""The history of one run: the recorded steps, those that the code has asked for, and open ones.

Rules
1. The history is read with the first step of a run, and not at all by a task without steps.
2. Before a step that is not recorded runs, every step recorded earlier in its branch was asked for.
   Steps with a key of their own are not compared: they may run in any order.
3. An error that a step raised is recorded before the next step of its branch, or when the function
   returns: then the function went on after it, and must go on the same way in every later run. If
   the function ends with an error, the step stays open, and the retry runs it again.
4. Nothing here runs a step; see `aztask.steps.engine`. Branches may run in threads.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol

from aztask.errors import CodecError, StepError
from aztask.message.message import TaskMessage
from aztask.message.payload import names_in
from aztask.steps.keepers import Outside, Place, StepKeeper
from aztask.steps.records import (
    ANY,
    ARGUMENTS,
    CALL,
    DONE,
    FAILED,
    ORDER,
    PATCH,
    RETRYING,
    SIGNAL,
    STEP,
    WAIT,
    WAITING,
    StepRecord,
    arguments_record,
    digest_of,
    history_of,
    taken_signals,
)
from aztask.steps.stepoptions import NAMES
from aztask.steps.suspension import OrderChanged, Parked, Renewal, StepDelayed
from aztask.steps.waits import CHILD, SIGNALS, SLEEPS, Signal, Wait, may_come_again, sent_at
from aztask.stores.records.base import RunRecord

SLEEP: Final = "sleep"
EARLY_SECONDS: Final = 0.02
"""A service may deliver a message so much before its time: another hop would gain nothing."""

CONTINUE_WITH: Final = "continue_with"
MOST_TAKEN: Final = 200
"""Keys of signals that a history passes on to the next one: about 20 KB."""

IN_ORDER: Final = (STEP, WAIT, SIGNAL, CALL, ANY)
"""The kinds of what a task's code asks for in the same order in every run."""


@dataclass(slots=True)
class Branch:
    """The main line of a function, or one branch of a `gather`.

    * `line`: the thread, and the asyncio task if there is one, that takes its steps.
    * `pending`: the step that raised last, with its record, until the function has gone on.
    * `running`: the name of the step without a key that runs now.
    """

    name: str
    line: object = None
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    recorded: list[StepRecord] = field(default_factory=list)
    pending: StepRecord | None = None
    running: str = ""
    gathers: int = 0


@dataclass(slots=True)
class OpenStep:
    """A step that is not recorded yet. `record`: what is known of it; `sends`: see `next_id`.

    `calls`: the task waits for the end of what the step sends.
    """

    branch: Branch
    record: StepRecord
    step_key: str
    sends: int = 0
    calls: bool = False

    def next_id(self) -> str:
        """The id of the next task that the step's function starts: the same in every run of it."""
        self.sends += 1
        return f"{self.step_key}-{self.sends}"


class WaitEnd(NamedTuple):
    """How a wait ends. `source`: see `StepRecord`. `signal`: the one that it takes."""

    state: str
    data: bytes
    source: str = ""
    signal: Signal | None = None


@dataclass(frozen=True, slots=True)
class WantedEnd:
    """What a wait waits for.

    * `kind`, `name`: of its record.
    * `names`: of signals. `children`: the ids of tasks.
    * `ends`: gives the end of a child.
    * `seconds`: for how long. `late`: the encoded error if nothing comes.
    """

    kind: str
    name: str
    names: tuple[str, ...]
    children: tuple[str, ...]
    ends: ChildEnds
    seconds: float = 0.0
    late: bytes = b""

    @property
    def source(self) -> str:
        """What its record says of it while it waits; see `waits_in`."""
        if self.kind == ANY:
            return json.dumps([self.names, self.children])
        return NAMES.join(self.names or self.children)

    def end(self, keeper: StepKeeper, outside: Outside, taken: Collection[str]) -> WaitEnd | None:
        """Its end, if what it waits for is there: a signal, else the first child that has ended.

        * `taken`: sources of the waits that have ended.
        """
        if self.names and (found := outside.signals(self.names, taken)):
            first = found[0]
            data = keeper.encode([first.name, keeper.decode(first.value)])
            return WaitEnd(DONE, data, first.key, first)
        for child in self.children:
            record = outside.child(child)
            if record is None or not record.state.final:
                continue
            end = self.ends.end_of(keeper, record)
            if self.kind == ANY and end.state == DONE:
                end = end._replace(data=keeper.encode([child, keeper.decode(end.data)]))
            return end
        return None


def waits_in(record: StepRecord) -> tuple[Wait, ...]:
    """What a recorded wait waits for."""
    if record.kind == WAIT:
        return (Wait(SLEEPS, (), record.due),)
    if record.kind != ANY:
        kind = CHILD if record.kind == CALL else SIGNALS
        return (Wait(kind, tuple(record.source.split(NAMES)), record.due),)
    signals, children = json.loads(record.source)
    both = ((SIGNALS, signals), (CHILD, children))
    return tuple(Wait(kind, tuple(names), record.due) for kind, names in both if names)


class ChildEnds(Protocol):
    """Turns the end of a child into that of the wait for it."""

    def end_of(self, keeper: StepKeeper, record: RunRecord) -> WaitEnd:
        """The end of the wait. record: has ended."""
        ...


class RunHistory:
    """What one run knows of its steps."""

    def __init__(
        self,
        keeper: StepKeeper,
        outside: Outside,
        message: TaskMessage,
        most: int,
        longest: float,
    ) -> None:
        """most: how many steps a history may have. longest: how long a wait may be, in seconds."""
        self.keeper = keeper
        self._outside = outside
        self.longest = longest
        self._message = message
        self._most = most
        self._lock = threading.RLock()
        self._known: dict[Place, StepRecord] | None = None
        self._asked: set[Place] = set()
        self._branches: dict[str, Branch] = {}
        self._number = 0

    def branch(self, name: str) -> Branch:
        """The branch of this name."""
        with self._lock:
            self._load()
            return self._branches.setdefault(name, Branch(name))

    def _load(self) -> dict[Place, StepRecord]:
        if self._known is None:
            records = self.keeper.read()
            self._known = {record.place: record for record in records}
            if len(records) == 1 and records[0].kind == ARGUMENTS:
                self.keeper.forget_former()
            for record in records:
                self._number = max(self._number, record.number)
                if record.kind in IN_ORDER and not record.keyed:
                    branch = self._branches.setdefault(record.branch, Branch(record.branch))
                    branch.recorded.append(record)
        return self._known

    def begin(self, branch: Branch, name: str, key: str | None) -> StepRecord | OpenStep:
        """The recorded step, or a new one to run. Raises StepError, OrderChanged, StepDelayed."""
        with self._lock:
            known = self._load()
            self.flush(branch)
            found = self._find(branch, STEP, name, key)
            if found.state in (DONE, FAILED):
                return found
            if found.place not in known:
                self._admit(branch, found)
            elif found.due > self.keeper.now():
                raise StepDelayed(found.label, found.due, self.keeper.now())
            names = (found.branch, found.name, found.key)
            step_key = digest_of(self._message.id, history_of(self._message), *names)
            return OpenStep(branch, found, step_key)

    def _admit(self, branch: Branch, wanted: StepRecord) -> None:
        """Refuse a step or a wait that is not recorded yet if it may not be."""
        self._check_order(branch, wanted)
        if len(self._load()) >= self._most:
            raise StepError(
                f"the task has {self._most} recorded steps already, as many as max_steps "
                "allows; record several actions as one step, or raise max_steps"
            )

    def sleep(self, branch: Branch, seconds: float, key: str | None) -> None:
        """Return if the time has passed; else raise Parked. Without a worker, it has passed.

        The wake time is recorded once, by the first run that comes here, and never computed again.
        Raises StepError, OrderChanged.
        """
        with self._lock:
            known = self._load()
            self.flush(branch)
            found = self._find(branch, WAIT, SLEEP, key)
            if found.place not in known:
                self._admit(branch, found)
                due = self.keeper.now() + seconds
                found = self._write(
                    replace(found, state=WAITING, due=due, value=_held_by(self._message))
                )
                early = 0.0
            else:
                early = EARLY_SECONDS
            if found.due > (now := self.keeper.now()) + early and self.keeper.parks:
                wait = Wait(SLEEPS, (), found.due)
                raise Parked("it sleeps", found.due, now, (wait,), found.at)

    def wait(self, branch: Branch, wanted: WantedEnd, key: str | None) -> StepRecord:
        """The recorded end of a wait, made now if there is one; else raise Parked.

        The end is decided by compare-and-set on the row of the wait: a signal that comes with the
        end of the time is taken by this wait, or stays for the next one. Raises StepError,
        OrderChanged.
        """
        with self._lock:
            known = self._load()
            self.flush(branch)
            found = self._find(branch, wanted.kind, wanted.name, key)
            if found.state in (DONE, FAILED):
                return found
            early = EARLY_SECONDS
            if new := found.place not in known:
                self._admit(branch, found)
                due, early = self.keeper.now() + wanted.seconds, 0.0
                value = _held_by(self._message)
                found = replace(found, state=WAITING, due=due, value=value, source=wanted.source)
            end = wanted.end(self.keeper, self._outside, taken_signals(known.values()))
            now = self.keeper.now()
            if end is None and (now + early >= found.due or not self.keeper.parks):
                end = WaitEnd(FAILED, wanted.late)
            if end is None and new:
                found = self._write(found)
                if found.state in (DONE, FAILED):  # another delivery was faster
                    return found
            if end is None:
                waits = waits_in(found)
                text = " or ".join(map(str, waits))
                raise Parked(f"it waits for {text}", found.due, now, waits, found.at)
            value = self.keeper.kept(end.data)
            made = self._write(replace(found, state=end.state, value=value, source=end.source))
            if end.signal is not None and made.source == end.source:
                self._outside.take(end.signal)
            return made

    def _find(self, branch: Branch, kind: str, name: str, key: str | None) -> StepRecord:
        """The record of a step that the code asks for now; a new one if there is none."""
        known = self._load()
        text, keyed = key or "", key is not None
        if not keyed:
            branch.calls[kind, name] += 1
            text = str(branch.calls[kind, name])
        place = (kind, branch.name, name, text)
        self._asked.add(place)
        queue = self._message.queue
        new = StepRecord(kind, RETRYING, name, branch.name, text, keyed, 0, b"", 0.0, queue=queue)
        return known.get(place, new)

    def _skipped(self, branch: Branch) -> StepRecord | None:
        """The first recorded step of the branch that the code has not asked for."""
        return next((each for each in branch.recorded if each.place not in self._asked), None)

    def _check_order(self, branch: Branch, wanted: StepRecord) -> None:
        if wanted.keyed:
            return
        skipped, since = self._skipped(branch), self._since()
        if skipped is None:
            if since is not None:  # an earlier run met other code
                self.keeper.drop(since.place)
                self._load().pop(since.place)
            return
        now = self.keeper.now()
        if since is None:
            record = StepRecord(ORDER, DONE, "", "", "", False, 0, b"", now)
            since = self.keeper.write(replace(record, queue=self._message.queue))
        raise OrderChanged(wanted.label, skipped.label, max(0.0, now - since.at))

    def _since(self) -> StepRecord | None:
        return self._load().get((ORDER, "", "", ""))

    def patched(self, branch: Branch, name: str) -> bool:
        """True if this run takes the new way of a changed flow; recorded then."""
        with self._lock:
            known = self._load()
            self.flush(branch)
            found = self._find(branch, PATCH, name, None)
            if found.place in known:
                return True
            if self._skipped(branch) is not None:
                return False  # the old way was taken past this point
            self._write(replace(found, state=DONE))
            return True

    def renew(self, branch: Branch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise Renewal, once the arguments of the next history are recorded.

        A signal that a wait has taken may still be stored, and the next history does not know of
        that wait: so it is removed before. It may also be stored once more, by a sender that got no
        answer: so the next history gets the keys of those for which that is possible, of the
        newest if they are many. Raises StepError, OrderChanged, EncodeError.
        """
        with self._lock:
            known = self._load()
            self.flush(branch)
            self._check_order(branch, replace(arguments_record(self._message), name=CONTINUE_WITH))
            kinds = (SIGNAL, ANY, ARGUMENTS)
            taken = taken_signals(each for each in known.values() if each.kind in kinds)
            if taken:
                self._outside.forget(taken)
            now = self.keeper.now()
            recent = sorted(filter(lambda each: may_come_again(each, now), taken), key=sent_at)
            self.keeper.renew(args, kwargs, recent[-MOST_TAKEN:])
            raise Renewal

    def end(self, step: OpenStep, state: str, data: bytes, **more: Any) -> StepRecord:
        """Record how a step ended; returns what is recorded, see `StepKeeper.write`."""
        value = self.keeper.kept(data)
        with self._lock:
            return self._write(replace(step.record, state=state, value=value, **more))

    def leave_open(self, step: OpenStep, data: bytes) -> None:
        """Note that a step raised; it is recorded if the function goes on (rule 3)."""
        step.branch.pending = replace(step.record, state=FAILED, value=data)

    def flush(self, branch: Branch | None = None) -> None:
        """Record the errors after which the function went on: of a branch and those within it."""
        with self._lock:
            for each in self._within(branch):
                pending, each.pending = each.pending, None
                if pending is not None:
                    self._write(replace(pending, value=self.keeper.kept(pending.value)))

    def _within(self, branch: Branch | None) -> Iterable[Branch]:
        name = "" if branch is None else branch.name
        return [each for each in self._branches.values() if each.name.startswith(name)]

    def _write(self, record: StepRecord) -> StepRecord:
        known = self._load()
        if not record.number:
            self._number += 1
            record = replace(record, number=self._number)
        made = self.keeper.write(replace(record, at=self.keeper.now()))
        known[made.place] = made
        return made

    def replayed(self, record: StepRecord) -> Any:
        """The value of a recorded step, decoded. Raises StepError if it cannot be read."""
        try:
            return self.keeper.decode(record.value)
        except CodecError as error:
            raise StepError(
                f"the recorded value of step {record.label} cannot be read: {error}"
            ) from None


def _held_by(message: TaskMessage) -> bytes:
    """References to the payloads of a message that waits, for those who look for unneeded ones.

    Where the service hides a message, only the row of the wait shows them.
    """
    found = (message.payload or "").encode(), message.saved or b""
    return b" ".join(each for each in found if next(names_in(each), None))
