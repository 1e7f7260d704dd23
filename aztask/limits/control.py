"""What operators paused, scaled or limited: one small document that every worker reads.

Rules
1. A pause holds for all workers, and over their restarts, until it is resumed. So does a changed
   concurrency (`Scale`), until it is reset, and so do changed numbers of a limit. A reset of these
   stays for as long as the numbers before it might count.
2. A change is a compare-and-set of the whole document, so no change is lost.
3. Paused tenants have documents of their own, one for each sixteenth of them: the main document
   only says which of these have changed, so that workers read those, and none if no tenant is
   paused. The tenants' document is written first. If a program dies in between, workers do not
   know of its change until it is made again, or the next tenant of that document is changed.
4. A worker that cannot read the document keeps its last known state; see
   `aztask.worker.upkeep.controlwatch`.
5. The document belongs to the broker. What a release before 0.2 paused or scaled has no owner and
   holds for all brokers of the store, until it is changed: `Controls` writes the broker's document
   first, and then removes the same name from the one without an owner. If the program dies in
   between, both say the same, or resuming it again ends the rest.
"""

from __future__ import annotations

import getpass
import json
import math
import socket
import string
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from typing import Any, Final, TypeAlias, TypeVar

from aztask.address.owner import NO_OWNER
from aztask.errors import AztaskError, ConfigurationError
from aztask.limits.declaration import Limit, LimitChange, read_change
from aztask.limits.rates import LIVES_SECONDS
from aztask.stores.records.controls import ENTRY_LIMIT, ControlStore, Entry, EntryCell
from aztask.stores.rows import Kept, New, change
from aztask.support import chance
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.display import mask

# -- How many tasks workers run at the same time ---------------------------------------------------
#
# If an operator changed that while they run.
#
# Rules
# 1. What is said of a worker comes before what is said of one of its queues, and that before what
#    is said of all workers. Of several queues, the latest counts.
# 2. Without such an entry a worker has the concurrency of its command line.

MOST: Final = 10_000


class Reach(StrEnum):
    """The workers that an entry applies to: all, those of a queue, or one."""

    ALL = "all"
    QUEUE = "queue"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Scale:
    """A changed concurrency.

    * `name`: the queue's or the worker's; "" for all workers.
    * `size`: how many tasks each of the workers runs at the same time.
    * `at`: since when, UTC epoch seconds. `by`: the user and machine that set it.
    """

    reach: Reach
    name: str
    size: int
    at: float
    by: str = ""

    def __str__(self) -> str:
        return f"{self.reach.value} {self.name}" if self.name else "all workers"

    def packed(self) -> list[Any]:
        """The values that `read_scale` takes."""
        return [self.reach.value, self.name, self.size, self.at, self.by]


def read_scale(record: Any) -> Scale:
    """The entry in a document. Raises TypeError and ValueError if it is damaged."""
    reach, name, size, at, by = record
    if not isinstance(name, str) or not isinstance(by, str) or isinstance(at, bool):
        raise TypeError
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError
    if not math.isfinite(at) or not 1 <= size <= MOST:
        raise ValueError
    return Scale(Reach(reach), name, size, float(at), by)


def scale_of(scales: Iterable[Scale], worker: str, queues: Iterable[str]) -> Scale | None:
    """The entry that a worker obeys; None for the concurrency of its command line."""
    names = {Reach.WORKER: {worker}, Reach.QUEUE: set(queues), Reach.ALL: {""}}
    order = (Reach.ALL, Reach.QUEUE, Reach.WORKER)
    found = [each for each in scales if each.name in names[each.reach]]
    return max(found, key=lambda each: (order.index(each.reach), each.at), default=None)


# -- The document ----------------------------------------------------------------------------------

NAME: Final = "control"
TENANTS: Final = "control-tenants-"
"""The documents of tenants: a hexadecimal digit of the name's hash follows."""

VERSION: Final = 1
TEXT_LIMIT: Final = 512
UNOWNED_SECONDS: Final = 60.0
"""Seconds between two looks at the document without an owner in a remote store, if it is empty."""


class Scope(StrEnum):
    """What a pause applies to."""

    QUEUE = "queue"
    TASK = "task"
    TENANT = "tenant"
    """A key of a limit, see `tenant_name`."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause. `at`: since when, UTC epoch seconds. `by`: the user and machine that set it."""

    scope: Scope
    name: str
    at: float
    by: str = ""

    def __str__(self) -> str:
        return f"{self.scope.value} {self.name}"


@dataclass(frozen=True, slots=True)
class ControlState:
    """The state of the document. Empty: nothing is paused, and nothing is scaled.

    * `versions`: by the name of each document of tenants that is not empty.
    * `limits`: by the names of apps and limits, the changed numbers; a reset has none.
    """

    pauses: Mapping[tuple[Scope, str], Pause] = field(default_factory=dict)
    scales: Mapping[tuple[Reach, str], Scale] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[tuple[str, str], LimitChange] = field(default_factory=dict)

    def limit(self, app: str, declared: Limit) -> Limit:
        """The limit of the app with the numbers that hold now."""
        change = self.limits.get((app, declared.name))
        return declared if change is None else change.applied(declared)

    def queue_paused(self, name: str) -> bool:
        """Whether no worker may receive from the queue."""
        return (Scope.QUEUE, name) in self.pauses

    def task_paused(self, name: str) -> bool:
        """Whether no worker may start the task."""
        return (Scope.TASK, name) in self.pauses

    def tenant(self, limit: str, key: str) -> Pause | None:
        """The pause of this key of a limit; None if it is not paused."""
        return self.pauses.get((Scope.TENANT, tenant_name(limit, key))) if self.versions else None

    @property
    def tasks(self) -> frozenset[str]:
        """The names of the paused tasks."""
        return frozenset(name for scope, name in self.pauses if scope is Scope.TASK)

    @property
    def queues(self) -> frozenset[str]:
        """The names of the paused queues."""
        return frozenset(name for scope, name in self.pauses if scope is Scope.QUEUE)

    def listed(self) -> list[Pause]:
        """All pauses, the oldest first."""
        return sorted(self.pauses.values(), key=lambda pause: (pause.at, str(pause)))

    def __bool__(self) -> bool:
        """False if nothing is paused or scaled."""
        return bool(self.pauses or self.scales or self.versions or self.limits)

    def over(self, other: ControlState) -> ControlState:
        """Both states together; under the same name, this one's."""
        if not other:
            return self
        return ControlState(
            {**other.pauses, **self.pauses},
            {**other.scales, **self.scales},
            {**other.versions, **self.versions},
            {**other.limits, **self.limits},
        )


Changed = TypeVar("Changed", Pause, Scale, LimitChange)
_Edited: TypeAlias = tuple[list[Pause], int]


class UnreadableControls(AztaskError):
    """The control document in the result store is damaged, or a newer release wrote it."""


class Controls:
    """Reads and changes what is paused and scaled for the store's broker. Any thread may call.

    All methods raise BrokerUnavailable if the store is unreachable, and UnreadableControls.
    """

    def __init__(self, store: ControlStore, clock: Clock = SYSTEM_CLOCK) -> None:
        """clock: measures the last look at the document without an owner."""
        self._own = ControlDocument(store)
        self._unowned = ControlDocument(store.of(NO_OWNER)) if store.owner.known else None
        self._kept_seconds = UNOWNED_SECONDS if store.remote else 0.0
        self._clock = clock
        self._empty_until: float | None = None

    def read(self) -> ControlState:
        """What is paused now, read from the store.

        In a remote store a pause without an owner is noticed within a minute if there was none.
        """
        state, now = self._own.read(), self._clock.monotonic()
        if self._unowned is None or (self._empty_until is not None and now < self._empty_until):
            return state
        unowned = self._unowned.read()
        self._empty_until = None if unowned else now + self._kept_seconds
        return state.over(unowned)

    def read_both(self) -> tuple[ControlState, ControlState]:
        """What is paused now, and what of it is without an owner: for all brokers of the store."""
        unowned = ControlState() if self._unowned is None else self._unowned.read()
        return self._own.read().over(unowned), unowned

    def pause(self, scope: Scope, names: Iterable[str], at: float, *, by: str = "") -> list[Pause]:
        """Pause these; returns the new pauses. Those that are paused already stay as they are.

        by: who does; this process's user and machine by default.
        """
        wanted, by = list(names), by or operator_name()
        if self._unowned is None:
            return self._own.pause(scope, wanted, at, by)
        former = self._unowned.read().pauses
        kept = [former[scope, name] for name in wanted if (scope, name) in former]
        paused = {each.name for each in kept}
        new = [Pause(scope, _checked(name), at, by) for name in wanted if name not in paused]
        made = self._own.add(scope, [*kept, *new])
        if kept:
            self._unowned.resume(scope, paused)
        return [each for each in made if each.name not in paused]

    def resume(self, scope: Scope, names: Iterable[str]) -> list[Pause]:
        """Resume these; returns the pauses that ended."""
        wanted = list(names)
        ended = self._own.resume(scope, wanted)
        return _joined(ended, () if self._unowned is None else self._unowned.resume(scope, wanted))

    def scale(
        self,
        reach: Reach,
        names: Iterable[str],
        size: int,
        at: float,
        *,
        forget: Set[str],
        by: str = "",
    ) -> list[Scale]:
        """Set the concurrency of these workers; returns the new entries.

        forget: workers that have ended, whose entries are removed. by: as in `pause`.
        """
        wanted = list(names)
        new = [
            Scale(reach, name and _checked(name), size, at, by or operator_name())
            for name in wanted
        ]
        made = self._own.scale(new, forget=forget)
        if self._unowned is not None:
            self._unowned.unscale(reach, wanted)
        return made

    def unscale(self, reach: Reach | None, names: Iterable[str]) -> list[Scale]:
        """Remove these entries, with None all; returns them."""
        wanted = list(names)
        ended = self._own.unscale(reach, wanted)
        return _joined(ended, () if self._unowned is None else self._unowned.unscale(reach, wanted))

    def change_limit(self, change: LimitChange) -> list[LimitChange]:
        """Give a limit these numbers; returns the change, or nothing if there is none to reset.

        A release before this one that pauses or scales drops it.
        """
        by = change.by or operator_name()
        return self._own.change_limit(replace(change, limit=_checked(change.limit), by=by))

    def resume_all(self) -> list[Pause]:
        """Resume everything. This also replaces documents that cannot be read."""
        ended = self._own.resume_all()
        return _joined(ended, () if self._unowned is None else self._unowned.resume_all())


class ControlDocument:
    """The document of one owner, and those of its tenants."""

    def __init__(self, store: ControlStore) -> None:
        self._store = store
        self._tenants: dict[str, tuple[str, list[Pause]]] = {}

    def read(self) -> ControlState:
        """What is paused now, read from the store."""
        state = _state_of(EntryCell(self._store, NAME).read())
        return self._with_tenants(state) if state.versions else state

    def _with_tenants(self, state: ControlState) -> ControlState:
        """The state with the paused tenants; only documents that have changed are read."""
        known = {
            name: at for name, at in self._tenants.items() if state.versions.get(name) == at[0]
        }
        missing = [name for name in state.versions if name not in known]
        found = self._store.read(missing) if missing else []
        for name, entry in zip(missing, found, strict=True):
            known[name] = state.versions[name], _tenants_of(entry)
        self._tenants = known
        tenants = {_key(each): each for _, pauses in known.values() for each in pauses}
        return replace(state, pauses={**state.pauses, **tenants})

    def pause(self, scope: Scope, names: Iterable[str], at: float, by: str = "") -> list[Pause]:
        """Pause these; returns the new pauses. Those that are paused already stay as they are."""
        return self.add(scope, [Pause(scope, _checked(name), at, by) for name in names])

    def add(self, scope: Scope, wanted: Sequence[Pause]) -> list[Pause]:
        """Add pauses; returns the new ones."""
        if scope is Scope.TENANT:
            return self._change_tenants(wanted, paused=True)

        def edited(state: ControlState) -> tuple[ControlState, list[Pause]]:
            new = [each for each in wanted if (each.scope, each.name) not in state.pauses]
            pauses = {**state.pauses, **{(each.scope, each.name): each for each in new}}
            return replace(state, pauses=pauses), new

        return self._change(edited)

    def resume(self, scope: Scope, names: Iterable[str]) -> list[Pause]:
        """Resume these; returns the pauses that ended."""
        if scope is Scope.TENANT:
            return self._change_tenants([Pause(scope, name, 0.0) for name in names], paused=False)
        wanted: set[tuple[Scope, str]] = {(scope, name) for name in names}
        return self._change(lambda state: _without(state, wanted))

    def scale(self, made: list[Scale], *, forget: Set[str]) -> list[Scale]:
        """Set the concurrency of workers by these entries, and return them.

        forget: workers that have ended, whose entries are removed.
        """

        def edited(state: ControlState) -> tuple[ControlState, list[Scale]]:
            kept = {
                key: each
                for key, each in state.scales.items()
                if key[0] is not Reach.WORKER or key[1] not in forget
            }
            new = {(each.reach, each.name): each for each in made}
            return replace(state, scales={**kept, **new}), made

        return self._change(edited)

    def unscale(self, reach: Reach | None, names: Iterable[str]) -> list[Scale]:
        """Remove these entries, with None all; returns them."""
        wanted = {(reach, name) for name in names}

        def edited(state: ControlState) -> tuple[ControlState, list[Scale]]:
            ended = [key for key in state.scales if reach is None or key in wanted]
            kept = {key: each for key, each in state.scales.items() if key not in ended}
            return replace(state, scales=kept), [state.scales[key] for key in ended]

        return self._change(edited)

    def change_limit(self, change: LimitChange) -> list[LimitChange]:
        """Give a limit these numbers; returns the change, or nothing if there is none to reset."""

        def edited(state: ControlState) -> tuple[ControlState, list[LimitChange]]:
            key = change.app, change.limit
            former = state.limits.get(key)
            if not change.numbers and (former is None or not former.numbers):
                return state, []
            kept = {
                name: each
                for name, each in state.limits.items()
                if each.numbers or change.at - each.at <= LIVES_SECONDS
            }
            return replace(state, limits={**kept, key: change}), [change]

        return self._change(edited)

    def resume_all(self) -> list[Pause]:
        """Resume everything. This also replaces documents that cannot be read."""
        tenants: list[Pause] = []
        documents = [f"{TENANTS}{digit}" for digit in string.hexdigits[:16]]
        for name, entry in zip(documents, self._store.read(documents), strict=True):
            if entry is not None:
                with suppress(UnreadableControls):
                    tenants += _tenants_of(entry)
                self._store.remove(name, entry.tag)

        def edited(state: ControlState) -> tuple[ControlState, list[Pause]]:
            return _without(replace(state, versions={}), set(state.pauses))

        return [*self._change(edited, repair=True), *tenants]

    def _change_tenants(self, wanted: Sequence[Pause], *, paused: bool) -> list[Pause]:
        """Pause or resume these tenants; returns those that changed."""
        groups: dict[str, list[Pause]] = {}
        for each in wanted:
            groups.setdefault(_document_of(each), []).append(each)
        changed: list[Pause] = []
        for name, group in groups.items():
            difference, left = self._change_document(name, group, paused=paused)
            changed += difference
            self._mark(name, empty=not left)
        return changed

    def _change_document(
        self, name: str, group: Sequence[Pause], *, paused: bool
    ) -> tuple[list[Pause], int]:
        """Change one document of tenants; returns (what changed, how many are paused now)."""

        def edited(entry: Entry | None) -> New[bytes | None, _Edited] | Kept[_Edited]:
            pauses = {_key(each): each for each in _tenants_of(entry)}
            if paused:
                difference = [each for each in group if _key(each) not in pauses]
                pauses |= {_key(each): each for each in difference}
            else:
                difference = [pauses.pop(_key(each)) for each in group if _key(each) in pauses]
            if not difference:
                return Kept(([], len(pauses)))
            data = _tenants_data(pauses.values()) if pauses else None
            return New(data, (difference, len(pauses)))

        return change(EntryCell(self._store, name), edited, "which tenants are paused")

    def _mark(self, name: str, *, empty: bool) -> None:
        """Let workers read this document of tenants, or forget it if it is empty."""

        def edited(state: ControlState) -> tuple[ControlState, list[Pause]]:
            versions = {key: each for key, each in state.versions.items() if key != name}
            if not empty:
                versions[name] = chance.token()
            return replace(state, versions=versions), []

        self._change(edited, always=True)

    def _change(
        self,
        edit: Callable[[ControlState], tuple[ControlState, list[Changed]]],
        *,
        repair: bool = False,
        always: bool = False,
    ) -> list[Changed]:
        """Change the document, again if another program changed it; returns the difference.

        repair: replace a damaged one. always: write it even if nothing was paused or resumed.
        """

        def edited(entry: Entry | None) -> New[bytes | None, list[Changed]] | Kept[list[Changed]]:
            try:
                state = _state_of(entry)
            except UnreadableControls:
                if not repair:
                    raise
                state = ControlState()
            changed, difference = edit(state)
            if not difference and not repair and not always:
                return Kept([])
            # Without an entry, an owner has nothing paused.
            return New(_data_of(changed) if changed else None, difference)

        return change(EntryCell(self._store, NAME), edited, "what is paused")


def _joined(own: Sequence[Changed], unowned: Sequence[Changed]) -> list[Changed]:
    """What ended in both documents, each name once."""
    known = {str(each) for each in own}
    joined: list[Changed] = list(own)
    joined += [each for each in unowned if str(each) not in known]
    return joined


def tenant_name(limit: str, key: str) -> str:
    """The name under which a key of a limit is paused."""
    return f"{limit}={key}"


def _without(
    state: ControlState, ended: set[tuple[Scope, str]]
) -> tuple[ControlState, list[Pause]]:
    kept = {key: pause for key, pause in state.pauses.items() if key not in ended}
    return replace(state, pauses=kept), [each for each in state.listed() if _key(each) in ended]


def _key(pause: Pause) -> tuple[Scope, str]:
    return pause.scope, pause.name


def _checked(name: str) -> str:
    if not name or len(name) > TEXT_LIMIT or not name.isprintable():
        raise ConfigurationError(f"a name has 1 to {TEXT_LIMIT} printable characters")
    return name


def operator_name() -> str:
    """Who acts: this process's user and machine, without secrets."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):
        # A container's user may have no name; Windows without USERNAME has no module `pwd`.
        user = "unknown"
    return mask(f"{user}@{socket.gethostname()}")


def _data_of(state: ControlState) -> bytes:
    """The document's bytes. Raises ConfigurationError if it became too long."""
    record: dict[str, Any] = {
        "v": VERSION,
        "write": chance.token(),  # no two writers write the same bytes
        "pauses": [[p.scope.value, p.name, p.at, p.by] for p in state.listed()],
    }
    if state.scales:
        record["scales"] = [each.packed() for each in state.scales.values()]
    if state.versions:
        record["tenants"] = dict(state.versions)
    if state.limits:
        record["limits"] = [each.packed() for each in state.limits.values()]
    return _encoded(record)


def _encoded(record: dict[str, Any]) -> bytes:
    data = json.dumps(record, separators=(",", ":")).encode()
    if len(data) > ENTRY_LIMIT:
        raise ConfigurationError(
            "too much is paused: pause whole queues or tasks instead of single tasks or tenants"
        )
    return data


def _document_of(pause: Pause) -> str:
    return f"{TENANTS}{sha256(pause.name.encode('utf-8', 'surrogatepass')).hexdigest()[0]}"


def _tenants_data(pauses: Iterable[Pause]) -> bytes:
    """The bytes of a document of tenants. Raises ConfigurationError if it became too long."""
    rows = [[each.scope.value, each.name, each.at, each.by] for each in pauses]
    return _encoded({"v": VERSION, "write": chance.token(), "pauses": rows})


def _tenants_of(entry: Entry | None) -> list[Pause]:
    """The pauses in a document of tenants. Raises UnreadableControls."""
    return list(_state_of(entry).pauses.values())


def _state_of(entry: Entry | None) -> ControlState:
    if entry is None:
        return ControlState()
    try:
        record = json.loads(entry.data)
        if record["v"] != VERSION:
            raise UnreadableControls(
                "a newer release of aztask wrote what is paused; update aztask here"
            )
        pauses = [_pause_of(each) for each in record["pauses"]]
        scales = [read_scale(each) for each in record.get("scales", ())]
        versions = {str(name): str(each) for name, each in dict(record.get("tenants", {})).items()}
        limits = [read_change(each) for each in record.get("limits", ())]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UnreadableControls(
            "the entry in the result store that says what is paused is damaged; run "
            "aztask control resume --all to replace it"
        ) from None
    return ControlState(
        {_key(each): each for each in pauses},
        {(each.reach, each.name): each for each in scales},
        versions,
        {(each.app, each.limit): each for each in limits},
    )


def _pause_of(record: Any) -> Pause:
    scope, name, at, by = record
    if not isinstance(name, str) or not isinstance(by, str) or isinstance(at, bool):
        raise TypeError
    if not math.isfinite(at):
        raise ValueError
    return Pause(Scope(scope), name, float(at), by)
