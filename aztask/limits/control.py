"""What operators paused or scaled: one small document in the store, which every worker reads.

Rules
1. A pause holds for all workers, and over their restarts, until it is resumed. So does a changed
   concurrency (`aztask.limits.scale`), until it is reset.
2. A change is a compare-and-set of the whole document, so no change is lost.
3. A worker that cannot read the document keeps its last known state; see
   `aztask.worker.upkeep.controlwatch`.
"""

from __future__ import annotations

import getpass
import json
import math
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, TypeVar

from aztask.errors import AztaskError, BrokerUnavailable, ConfigurationError
from aztask.limits.scale import Reach, Scale, read_scale
from aztask.results.controls import ENTRY_LIMIT, ControlStore, Entry, EntryChange
from aztask.support.masking import mask

NAME: Final = "control"
VERSION: Final = 1
TRIES: Final = 20
TEXT_LIMIT: Final = 512


class Scope(StrEnum):
    """What a pause applies to."""

    QUEUE = "queue"
    TASK = "task"


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
    """The state of the document. Empty: nothing is paused, and nothing is scaled."""

    pauses: Mapping[tuple[Scope, str], Pause] = field(default_factory=dict)
    scales: Mapping[tuple[Reach, str], Scale] = field(default_factory=dict)

    def queue_paused(self, name: str) -> bool:
        """Whether no worker may receive from the queue."""
        return (Scope.QUEUE, name) in self.pauses

    def task_paused(self, name: str) -> bool:
        """Whether no worker may start the task."""
        return (Scope.TASK, name) in self.pauses

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


Changed = TypeVar("Changed", Pause, Scale)


class UnreadableControls(AztaskError):
    """The control document in the result store is damaged, or a newer release wrote it."""


class Controls:
    """Reads and changes the document. Any thread may call.

    All methods raise BrokerUnavailable if the store is unreachable, and UnreadableControls.
    """

    def __init__(self, store: ControlStore) -> None:
        self._store = store

    def read(self) -> ControlState:
        """What is paused now, read from the store."""
        return _state_of(self._entry())

    def pause(self, scope: Scope, names: Iterable[str], at: float) -> list[Pause]:
        """Pause these; returns the new pauses. Those that are paused already stay as they are."""
        by = mask(f"{_user()}@{socket.gethostname()}")
        wanted = [Pause(scope, _checked(name), at, by) for name in names]

        def change(state: ControlState) -> tuple[ControlState, list[Pause]]:
            new = [each for each in wanted if (each.scope, each.name) not in state.pauses]
            pauses = {**state.pauses, **{(each.scope, each.name): each for each in new}}
            return replace(state, pauses=pauses), new

        return self._change(change)

    def resume(self, scope: Scope, names: Iterable[str]) -> list[Pause]:
        """Resume these; returns the pauses that ended."""
        wanted = {(scope, name) for name in names}
        return self._change(lambda state: _without(state, wanted))

    def scale(
        self, reach: Reach, names: Iterable[str], size: int, at: float, *, forget: Set[str]
    ) -> list[Scale]:
        """Set the concurrency of these workers; returns the new entries.

        forget: workers that have ended, whose entries are removed.
        """
        by = mask(f"{_user()}@{socket.gethostname()}")
        made = [Scale(reach, name and _checked(name), size, at, by) for name in names]

        def change(state: ControlState) -> tuple[ControlState, list[Scale]]:
            kept = {
                key: each
                for key, each in state.scales.items()
                if key[0] is not Reach.WORKER or key[1] not in forget
            }
            new = {(each.reach, each.name): each for each in made}
            return replace(state, scales={**kept, **new}), made

        return self._change(change)

    def unscale(self, reach: Reach | None, names: Iterable[str]) -> list[Scale]:
        """Remove these entries, with None all; returns them."""
        wanted = {(reach, name) for name in names}

        def change(state: ControlState) -> tuple[ControlState, list[Scale]]:
            ended = [key for key in state.scales if reach is None or key in wanted]
            kept = {key: each for key, each in state.scales.items() if key not in ended}
            return replace(state, scales=kept), [state.scales[key] for key in ended]

        return self._change(change)

    def resume_all(self) -> list[Pause]:
        """Resume everything. This also replaces a document that cannot be read."""
        return self._change(lambda state: _without(state, set(state.pauses)), repair=True)

    def _entry(self) -> Entry | None:
        (entry,) = self._store.read([NAME])
        return entry

    def _change(
        self,
        change: Callable[[ControlState], tuple[ControlState, list[Changed]]],
        *,
        repair: bool = False,
    ) -> list[Changed]:
        """Change the document, again if another program changed it; returns the difference."""
        for _ in range(TRIES):
            entry = self._entry()
            try:
                state = _state_of(entry)
            except UnreadableControls:
                if not repair:
                    raise
                state = ControlState()
            changed, difference = change(state)
            if not difference and not repair:
                return []
            data = _data_of(changed)
            tag = None if entry is None else entry.tag
            if self._store.write([EntryChange(NAME, data, tag)]) != [None]:
                return difference
        raise BrokerUnavailable("other programs keep changing what is paused; try again")


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


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "unknown"


def _data_of(state: ControlState) -> bytes:
    """The document's bytes. Raises ConfigurationError if it became too long."""
    record: dict[str, Any] = {
        "v": VERSION,
        "write": uuid.uuid4().hex,  # no two writers write the same bytes
        "pauses": [[p.scope.value, p.name, p.at, p.by] for p in state.listed()],
    }
    if state.scales:
        record["scales"] = [each.packed() for each in state.scales.values()]
    data = json.dumps(record, separators=(",", ":")).encode()
    if len(data) > ENTRY_LIMIT:
        raise ConfigurationError("too much is paused: pause whole queues instead of single tasks")
    return data


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
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UnreadableControls(
            "the entry in the result store that says what is paused is damaged; run "
            "aztask control resume --all to replace it"
        ) from None
    return ControlState(
        {_key(each): each for each in pauses}, {(each.reach, each.name): each for each in scales}
    )


def _pause_of(record: Any) -> Pause:
    scope, name, at, by = record
    if not isinstance(name, str) or not isinstance(by, str) or isinstance(at, bool):
        raise TypeError
    if not math.isfinite(at):
        raise ValueError
    return Pause(Scope(scope), name, float(at), by)
