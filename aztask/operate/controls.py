"""What operators paused and scaled, and limits: show them, pause, resume, scale, change limits."""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

from aztask.app import App
from aztask.errors import (
    AztaskError,
    BrokerUnavailable,
    ConfigurationError,
    NotFound,
    did_you_mean,
)
from aztask.limits.breakers import Breakers, OpenBreaker, breakers_of_apps
from aztask.limits.control import (
    MOST,
    Controls,
    ControlState,
    Pause,
    Reach,
    Scale,
    Scope,
    UnreadableControls,
)
from aztask.limits.declaration import Limit, LimitChange, change_of
from aztask.limits.holders import LimitUsage, usage_of
from aztask.message.encryption import HIDDEN
from aztask.operate.action import Action, Progress, Subject, control_store, results_of
from aztask.operate.draining import keyed_limit
from aztask.operate.queues import existing
from aztask.stores.records.base import WorkerRecord
from aztask.support.display import printable, visible

__all__ = [
    "MOST",
    "ChangeLimit",
    "ControlList",
    "ControlState",
    "LimitChange",
    "LimitShown",
    "Names",
    "OpenBreaker",
    "Pause",
    "PauseNames",
    "ResumeNames",
    "Resumed",
    "Scale",
    "ScaleWorkers",
    "Scope",
    "change_limit",
    "controls",
    "limits",
    "pause",
    "resume",
    "resume_all",
    "scale",
]


@dataclass(frozen=True, slots=True)
class Names:
    """Queues, tasks and tenants (``LIMIT=KEY``) by name."""

    queues: Sequence[str] = ()
    tasks: Sequence[str] = ()
    tenants: Sequence[str] = ()

    def by_scope(self) -> list[tuple[Scope, Sequence[str]]]:
        """The names of each scope that has some."""
        scopes = (
            (Scope.QUEUE, self.queues),
            (Scope.TASK, self.tasks),
            (Scope.TENANT, self.tenants),
        )
        return [(scope, names) for scope, names in scopes if names]

    def each(self) -> list[tuple[Scope, str]]:
        """Every name with its scope."""
        return [(scope, name) for scope, names in self.by_scope() for name in names]


def subject_of(names: Names) -> Subject:
    """What an event about these names is about: the one queue or task, if it is one."""
    if len(names.each()) != 1:
        return Subject()
    return Subject(task="".join(names.tasks), queue="".join(names.queues))


# -- what holds now --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ControlList:
    """What is paused, scaled and limited, the oldest first.

    * `breakers`: that are open, with the names of their apps.
    * `unowned`: what a release before 0.2 set, for every broker of the result store.
    """

    pauses: Sequence[Pause]
    scales: Sequence[Scale]
    limits: Sequence[LimitChange]
    breakers: Sequence[tuple[str, OpenBreaker]]
    unowned: ControlState


def controls(app: App) -> ControlList:
    """What is paused and scaled now. Raises BrokerUnavailable, UnreadableControls."""
    store = control_store(app)
    reader = Controls(store)
    state, unowned = reader.read_both()
    scales = sorted(state.scales.values(), key=lambda each: each.at)
    changes = sorted((each for each in state.limits.values() if each.numbers), key=_since)
    return ControlList(
        state.listed(), scales, changes, _open_breakers(breakers_of_apps(store)), unowned
    )


def _since(change: LimitChange) -> float:
    return change.at


def _open_breakers(apps: Sequence[Breakers]) -> list[tuple[str, OpenBreaker]]:
    return [(breakers.app, row) for breakers in apps for row in breakers.read().values()]


@dataclass(frozen=True, slots=True)
class LimitShown:
    """A limit, and how far it is used; None for a limit with a key, if none was asked for.

    * `limit`: with the numbers that hold now. `change`: that an operator made; None: as declared.
    """

    limit: Limit
    usage: LimitUsage | None
    change: LimitChange | None = None


def limits(app: App, name: str | None = None, key: str | None = None) -> list[LimitShown]:
    """The limits of the app, and how far each one is used. Raises NotFound, ConfigurationError.

    name: only this one. key: one of its keys.
    """
    if name is not None and name not in app.limits:
        hint = did_you_mean(name, tuple(app.limits))
        raise NotFound(f"the app declares no limit {name!r}.{hint}")
    store = control_store(app, "limits")
    state = Controls(store).read()
    found = [
        state.limit(app.name, each) for each in app.limits.values() if name in (None, each.name)
    ]
    changes = {each.limit: each for each in state.limits.values() if each.app == app.name}
    return [
        LimitShown(
            each,
            usage_of(store, each, key or "") if each.key is None or key is not None else None,
            change if (change := changes.get(each.name)) and change.numbers else None,
        )
        for each in found
    ]


# -- pausing ---------------------------------------------------------------------------------


def pause(app: App, names: Names, *, checked: bool = True) -> PauseNames:
    """Pause queues, tasks and tenants for all workers, until they are resumed.

    checked: the app's own declarations say which tasks and limits exist. Raises NotFound for a
    tenant of a limit that the app does not declare, and QueueNotFound for a queue that neither the
    app nor its broker has.
    """
    store = Controls(control_store(app))
    for tenant in names.tenants if checked else ():
        keyed_limit(app, tenant)
    names = _hidden(app, names)
    _check_queues(app, names.queues)
    paused = store.read().pauses
    new = [each for each in names.each() if each not in paused]
    unknown = [each for each in names.tasks if checked and each not in app.tasks]
    return PauseNames(app, len(new), store, names, new, unknown)


@dataclass(slots=True)
class PauseNames(Action[list[Pause]]):
    """Pauses what is not paused yet; `act` returns the new pauses.

    unknown: tasks that the app does not register.
    """

    name: ClassVar[str] = "pause"

    controls: Controls
    names: Names
    new: Sequence[tuple[Scope, str]]
    unknown: Sequence[str]

    def __str__(self) -> str:
        return f"pause {_named(self.names.each())}"

    def subject(self) -> Subject:
        """The queue or task, if it is one alone."""
        return subject_of(self.names)

    def _act(self, progress: Progress) -> list[Pause]:
        at = time.time()
        made: list[Pause] = []
        for scope, names in self.names.by_scope():
            # All of them: what has no owner becomes ours.
            made += self.controls.pause(scope, names, at, by=self.by)
            self.done = len(made)
            progress(self.done)
        return made


def resume(app: App, names: Names) -> ResumeNames:
    """Resume queues, tasks and tenants, and close the circuit breakers of these tasks."""
    store, names = control_store(app), _hidden(app, names)
    reader, apps = Controls(store), breakers_of_apps(store)
    paused = reader.read().pauses
    ended = [each for each in names.each() if each in paused]
    rows = _open_breakers(apps) if names.tasks else []
    closing = sum(row.task in names.tasks for _, row in rows)
    return ResumeNames(app, len(ended) + closing, reader, apps, names)


def resume_all(app: App) -> ResumeNames:
    """Resume everything, and close all breakers. Documents that cannot be read are replaced."""
    store = control_store(app)
    reader, apps = Controls(store), breakers_of_apps(store)
    count = 0
    with suppress(UnreadableControls):  # what it holds is not known, and ends, too
        count += len(reader.read().pauses)
    with suppress(UnreadableControls):
        count += len(_open_breakers(apps))
    return ResumeNames(app, count, reader, apps, None)


@dataclass(frozen=True, slots=True)
class Resumed:
    """The pauses that ended, and the breakers that were closed."""

    pauses: Sequence[Pause]
    breakers: Sequence[OpenBreaker]


@dataclass(slots=True)
class ResumeNames(Action[Resumed]):
    """Resumes these names; None means everything, whatever it is by then."""

    name: ClassVar[str] = "resume"

    controls: Controls
    apps: Sequence[Breakers]
    names: Names | None

    def __str__(self) -> str:
        return f"resume {'everything' if self.names is None else _named(self.names.each())}"

    def subject(self) -> Subject:
        """The queue or task, if it is one alone."""
        return Subject() if self.names is None else subject_of(self.names)

    def _act(self, progress: Progress) -> Resumed:
        closed: list[OpenBreaker] = []
        ended: list[Pause] = []
        if self.names is None:
            ended = self.controls.resume_all()
            self.done = len(ended)
            closed = [row for breakers in self.apps for row in breakers.close_all()]
        else:
            for scope, names in self.names.by_scope():
                ended += self.controls.resume(scope, names)
                self.done = len(ended)
            closed = [row for each in self.apps for row in each.close(self.names.tasks)]
        self.done = len(ended) + len(closed)
        progress(self.done)
        return Resumed(ended, closed)


def _hidden(app: App, names: Names) -> Names:
    """The names with the keys of tenants as they are stored: with encryption as keyed hashes.

    A key that is one already, as ``aztask control list`` shows it, stays.
    """
    tenants = []
    for each in names.tenants:
        limit, _, key = each.partition("=")
        tenants.append(
            each if key.startswith(HIDDEN) else f"{limit}={app.codec.digests.hidden(key)}"
        )
    return replace(names, tenants=tenants)


def _named(names: Sequence[tuple[Scope, str]]) -> str:
    return ", ".join(f"{scope.value} {visible(name)}" for scope, name in names)


# -- scaling ---------------------------------------------------------------------------------


def scale(
    app: App, size: int | None, workers: Sequence[str] = (), queues: Sequence[str] = ()
) -> ScaleWorkers:
    """Let workers run `size` tasks at the same time; None ends what was said before.

    Without workers and queues it applies to all workers. Raises AztaskError for a worker that does
    not run, and QueueNotFound for a queue that neither the app nor its broker has.
    """
    store = Controls(control_store(app))
    by_reach = ((Reach.WORKER, tuple(dict.fromkeys(workers))), (Reach.QUEUE, tuple(queues)))
    chosen = [(reach, names) for reach, names in by_reach if names]
    entries = store.read().scales
    if size is None:
        wanted = {(reach, name) for reach, names in chosen for name in names}
        ends = [key for key in entries if not chosen or key in wanted]
        return ScaleWorkers(app, len(ends), store, None, chosen, frozenset())
    found = results_of(app).workers()
    _check_workers(found, workers)
    _check_queues(app, queues)
    living = {each.name for each in found if not each.stopped}
    forget = frozenset({name for reach, name in entries if reach is Reach.WORKER} - living)
    chosen = chosen or [(Reach.ALL, ("",))]
    return ScaleWorkers(app, sum(len(names) for _, names in chosen), store, size, chosen, forget)


@dataclass(slots=True)
class ScaleWorkers(Action[list[Scale]]):
    """Sets the concurrency, or with None resets it; `act` returns the entries that it set or ended.

    * `chosen`: empty for a reset of all.
    * `forget`: workers that have ended, whose entries are removed.
    """

    name: ClassVar[str] = "scale"

    controls: Controls
    size: int | None
    chosen: Sequence[tuple[Reach, Sequence[str]]]
    forget: Set[str]

    def __str__(self) -> str:
        names = [f"{reach.value} {name}".strip() for reach, each in self.chosen for name in each]
        what = "reset" if self.size is None else f"to {self.size}"
        return f"scale {visible(', '.join(names)) or 'all'} {what}"

    def subject(self) -> Subject:
        """The queue, if it is one."""
        queues = [name for reach, each in self.chosen for name in each if reach is Reach.QUEUE]
        return Subject(queue=queues[0] if len(queues) == 1 else "")

    def _act(self, progress: Progress) -> list[Scale]:
        changed: list[Scale] = []
        if self.size is None and not self.chosen:
            changed = self.controls.unscale(None, ())
        for reach, names in self.chosen:
            if self.size is None:
                changed += self.controls.unscale(reach, names)
            else:
                now = time.time()
                changed += self.controls.scale(
                    reach, names, self.size, now, forget=self.forget, by=self.by
                )
            self.done = len(changed)
        self.done = len(changed)
        progress(self.done)
        return changed


# -- limits ----------------------------------------------------------------------------------


def change_limit(
    app: App,
    name: str,
    *,
    rate: str | None = None,
    burst: int | None = None,
    concurrency: int | None = None,
) -> ChangeLimit:
    """Give a limit these numbers until they are reset; without any, reset it.

    What is not given stays as declared. Raises NotFound for a limit that the app does not declare,
    unless its change is reset, and ConfigurationError for numbers that no limit has, or that this
    one does not declare.
    """
    store = control_store(app, "limits")
    reader = Controls(store)
    former = reader.read().limits.get((app.name, name))
    changed = former is not None and bool(former.numbers)
    at, declared = store.time().at, app.limits.get(name)
    resets = rate is None and burst is None and concurrency is None
    if declared is not None:
        made = change_of(app.name, declared, at, rate=rate, burst=burst, concurrency=concurrency)
    elif changed and resets:  # the code that declared it is gone
        made = LimitChange(app.name, name, None, None, None, None, at)
    else:
        hint = did_you_mean(name, tuple(app.limits))
        raise NotFound(f"the app declares no limit {printable(name, 60)}.{hint}")
    return ChangeLimit(app, int(changed or not resets), reader, made)


@dataclass(slots=True)
class ChangeLimit(Action[list[LimitChange]]):
    """Changes the numbers of a limit; `act` returns the change, or nothing if none was reset."""

    name: ClassVar[str] = "limit"

    controls: Controls
    change: LimitChange

    def __str__(self) -> str:
        numbers = self.change.numbers
        return f"{f'set {numbers} for' if numbers else 'reset'} {visible(str(self.change))}"

    def subject(self) -> Subject:
        """No queue or task alone."""
        return Subject()

    def _act(self, progress: Progress) -> list[LimitChange]:
        made = self.controls.change_limit(replace(self.change, by=self.by))
        self.done = len(made)
        progress(self.done)
        return made


def _check_queues(app: App, names: Sequence[str]) -> None:
    """Raise QueueNotFound for a name that nothing has, such as a misspelt one.

    Where the broker does not say which queues it has, any name is accepted: an operator who has to
    pause a queue now may lack the permission to ask, or the broker may be unreachable.
    """
    named = set(app.queue_names())
    for name in names:
        if name not in named:
            with suppress(ConfigurationError, BrokerUnavailable):
                existing(app, name)


def _check_workers(found: Sequence[WorkerRecord], names: Sequence[str]) -> None:
    """Raise AztaskError for a worker that does not run."""
    living = [each.name for each in found if not each.stopped and not each.damage]
    for name in names:
        if name not in living:
            hint = did_you_mean(name, living)
            raise AztaskError(f"no worker {printable(name, 60)} runs.{hint} See: aztask workers")
