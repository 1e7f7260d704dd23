"""Workers that make occurrences on an injected clock, and die at random between any two steps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aztask.message.codec import Codec
from aztask.schedules.engine import ScheduleEngine
from aztask.schedules.runner import Runner
from aztask.schedules.schedules import Schedules
from aztask.schedules.stored import read_schedule
from aztask.settlement import Complete
from aztask.stores.events import Event
from aztask.stores.records.base import Outcome, ResultStore, RunKey, RunRecord, State
from aztask.stores.records.schedules import (
    ClaimRow,
    KeptSchedule,
    Occurrence,
    ScheduleStore,
    schedules_of,
)
from aztask.workflows.graphs import Graph, Signature


class Killed(BaseException):
    """The process of this worker dies here."""


@dataclass
class World:
    """The time, the tasks that were sent, and the occurrences that were made.

    deaths: the share of writes and sends at which a worker dies, half of them before, half after.
    results: those of one owner; another owner on the same store has a world of its own.
    tasks: the names of the tasks that the app has.
    """

    results: ResultStore
    now: float
    dice: random.Random
    deaths: float = 0.0
    sent: Counter[str] = field(default_factory=Counter)
    headers: dict[str, dict[str, Any]] = field(default_factory=dict)
    delays: dict[str, float] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)
    kills: int = 0
    engines: list[ScheduleEngine] = field(default_factory=list)
    ends: bool = True
    events: list[Event] = field(default_factory=list)
    tasks: dict[str, object] = field(default_factory=lambda: {"shop.work": None})
    arguments: dict[str, Any] = field(default_factory=dict)
    started: int = 0

    def die(self) -> None:
        if self.dice.random() < self.deaths / 2:
            self.kills += 1
            raise Killed

    def worker(
        self, name: str, declare: Callable[[Schedules], None], codec: Codec | None = None
    ) -> Runner:
        """A new process: it has read nothing."""
        return self.schedules(declare, codec).runner(name)

    def schedules(
        self, declare: Callable[[Schedules], None] = lambda _: None, codec: Codec | None = None
    ) -> Schedules:
        inner = schedules_of(self.results)
        assert inner is not None
        store = DyingStore(self, inner)
        results: Any = WithSchedules(self.results, store)
        made = Schedules(
            "shop", Opened(results), Sends(self), codec or Codec(), self.tasks, workflows=Starts()
        )
        declare(made)
        self.engines.append(made.engine)
        return made

    def send(self, name: str, args: Any, kwargs: Any, options: Any, headers: Any) -> None:
        self.die()
        task_id = options["task_id"]
        self.sent[task_id] += 1
        self.headers[task_id] = dict(headers)
        self.arguments[task_id] = args
        self.delays.setdefault(task_id, options["delay"])
        if self.ends:
            self.end(task_id)
        self.die()

    def end(self, task_id: str) -> None:
        """Its task has run."""
        outcome = Outcome(State.SUCCEEDED, Complete(), at=self.now)
        record = RunRecord(
            RunKey(task_id), "shop.work", "default", State.SUCCEEDED, outcome=outcome
        )
        self.results.bury([record])

    def by(self, name: str) -> int:
        """For how many schedules this worker made the last occurrence."""
        found = schedules_of(self.results)
        assert found is not None
        return sum(read_schedule(each.head.data).by == name for each in found.overview())

    def again(self, declare: Callable[[Schedules], None]) -> Callable[[int], Runner]:
        """What replaces a dead worker: another one with this code."""

        def made(index: int) -> Runner:
            self.started += 1
            return self.worker(f"worker-{self.started}", declare)

        return made

    def run(
        self,
        workers: Sequence[Runner],
        seconds: float,
        step: tuple[float, float],
        again: Callable[[int], Runner] | None = None,
    ) -> list[Runner]:
        """Let all workers take turns, in random order. again: replaces a dead one."""
        living, until = list(workers), self.now + seconds
        while self.now < until:
            for index in self.dice.sample(range(len(living)), len(living)):
                try:
                    living[index].turn()
                except Killed:
                    assert again is not None
                    living[index] = again(index)
            self.now = min(until, self.now + self.dice.uniform(*step))
        return living


class WithSchedules:
    """A result store with other schedules."""

    def __init__(self, inner: ResultStore, schedules: ScheduleStore) -> None:
        self._inner = inner
        self.schedules = schedules

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class DyingStore:
    """The schedules of a store, at the world's time."""

    def __init__(self, world: World, inner: ScheduleStore) -> None:
        self._world = world
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def now(self) -> float:
        return self._world.now

    def overview(self, *, everyone: bool = False) -> list[KeptSchedule]:
        return self._inner.overview(everyone=everyone)

    def claim(self, schedule: str, claim: ClaimRow) -> bool:
        self._world.die()
        found = self._inner.claim(schedule, claim)
        self._world.die()
        return found

    def commit(
        self,
        schedule: str,
        data: bytes,
        tag: str | None,
        made: Sequence[Occurrence] = (),
        changed: Sequence[Occurrence] = (),
        *,
        apart: bool = False,
    ) -> str | None:
        self._world.die()
        found = self._inner.commit(schedule, data, tag, made, changed, apart=apart)
        if found is not None:
            self._world.made += [f"{schedule} {each.key}" for each in made]
        self._world.die()
        return found

    def close_occurrence(self, schedule: str, key: str, data: bytes) -> bool:
        self._world.die()
        found = self._inner.close_occurrence(schedule, key, data)
        self._world.die()
        return found


class Work:
    """A task that needs no app."""

    name = "shop.work"
    queue = None
    expires = None
    ordered = True

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs:
            raise TypeError("it takes no keywords")

    def plain_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], given: int = 0
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs


def call(*args: Any) -> Signature:
    """A call of the task, for a schedule."""
    work: Any = Work()
    return Signature(work, args)


class Sends:
    """The sends of one simulated process."""

    def __init__(self, world: World) -> None:
        self._world = world

    def route(self, task: Any, options: Any) -> str:
        return "default"

    def send_occurrence(
        self, name: str, args: Any, kwargs: Any, options: Any, headers: Any
    ) -> None:
        self._world.send(name, args, kwargs, options, headers)

    def report(self, event: Event) -> None:
        self._world.events.append(event)


class Starts:
    """The workflows of one simulated process: its schedules have none."""

    def check(self, graph: Graph) -> None:
        assert isinstance(graph, Signature)

    def start_occurrence(self, graph: Graph, workflow: str, headers: Any) -> None:
        raise AssertionError(workflow)


class Opened:
    """A result store that is open."""

    def __init__(self, results: Any) -> None:
        self._results = results

    def results(self) -> Any:
        return self._results
