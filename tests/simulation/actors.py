"""The programs of a world: workers and senders, each with an app of its own, as processes have."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from aztask.app import App
from aztask.stores.events.event import Event
from aztask.support import parts
from aztask.worker.options import WorkerOptions

from .pace import POLL
from .points import Death
from .stepped import START, Machine, Step, SteppedOutbox, SteppedRun
from .streams import SteppedReader
from .watched import unavailable, watch

if TYPE_CHECKING:
    from aztask.message.message import TaskMessage
    from aztask.queues.delivery import Delivery
    from aztask.worker.pool.attempt import RunReader
    from aztask.worker.pool.packets import Answers

    from .book import Key
    from .places import Site
    from .world import World


ALL_AT_ONCE: Final = 0.8
"""How often a pool process begins, or ends, all tasks that it can in one step."""

LONGEST_POLL: Final = 30.0
SHORTEST_POLL: Final = 0.05
"""Seconds between two receives from an empty queue, if the worker is not woken."""


class Held:
    """Deliveries, each with the key of its run, also by that key."""

    def __init__(self) -> None:
        self._keys: dict[Delivery, Key] = {}
        self._of: dict[Key, list[Delivery]] = {}

    def __iter__(self) -> Iterator[Delivery]:
        return iter(self._keys)

    def __contains__(self, delivery: Delivery) -> bool:
        return delivery in self._keys

    def add(self, delivery: Delivery, key: Key) -> None:
        """Add one."""
        self._keys[delivery] = key
        self._of.setdefault(key, []).append(delivery)

    def key(self, delivery: Delivery, missing: Key) -> Key:
        """The key of its run; `missing` if it is not held."""
        return self._keys.get(delivery, missing)

    def of(self, key: Key) -> Sequence[Delivery]:
        """Those of one run."""
        return self._of.get(key, ())

    def remove(self, delivery: Delivery) -> None:
        """Forget one, if it is held."""
        key = self._keys.pop(delivery, None)
        if key is not None:
            self._of[key].remove(delivery)
            if not self._of[key]:
                del self._of[key]


class Actor:
    """One process: it lives, freezes or is dead.

    * `held`: the deliveries that it has received and not settled, each with the key of its run.
    * `unsaid`: the tasks whose end it has recorded, and written no event of.
    * `parked`: where it stands still in the middle of a step, if it does.
    * `ahead`: by how much its machine's wall clock is ahead of the services'.
    """

    def __init__(self, world: World, name: str, site: Site, version: int) -> None:
        self.world = world
        self.name = name
        self.site = site
        self.version = version
        self.alive = True
        self.frozen_until = 0.0
        self.parked: Any = None
        skew = world.course.skew
        self.ahead = random.Random(f"{world.course.seed} {name}").uniform(-skew, skew)
        self.unsaid: set[str] = set()
        self.held = Held()
        self.broker, self.results = watch(self, *site.open(self))
        self.app = world.program.build(self)
        self.app.on_event(self._event)

    @property
    def label(self) -> str:
        """Whose program it is."""
        return self.site.label

    def ask(self, service: str) -> None:
        """A request begins. Raises Death for a dead actor, BrokerUnavailable in an outage.

        In a storm a file is busy for longer than a request waits for it.
        """
        if not self.alive:
            raise Death
        world = self.world
        if world.outages and world.is_out(self, service):
            raise unavailable(service)
        if world.fate.storms and not self.site.remote and world.fate.is_busy(self):
            raise unavailable(service)

    def can_stop_here(self) -> bool:
        """Whether it may stand still now: nothing is locked by an open transaction."""
        return not self.site.locked()

    def _event(self, event: Event) -> None:
        self.world.book.event(self, event)

    def new_app(self, name: str, **options: Any) -> App:
        """An app of this process."""
        if self.site.owner is not None:
            options["owner"] = self.site.owner
        options |= keys_of(self.world.course.keys, self.label, self.version)
        app = App(name, broker=self.broker, results=self.results, **options)
        self.world.book.learn_ids(app.codec)
        return app


def keys_of(keys: str, label: str, version: int) -> dict[str, Any]:
    """The options of an app for its keys: each version of the code begins with another one."""
    if not keys:
        return {}
    ring = [
        f"{label}: key number {number} of this app, long enough"
        for number in (version % 2, 1 - version % 2)
    ]
    if keys == "signed":
        return {"signing_keys": ring}
    id_key = f"{label}: the key of ids"
    return {"signing_keys": ring, "encryption_keys": ring, "encrypt": True, "id_key": id_key}


class Sender(Actor):
    """A program that sends, cancels, pauses and replays."""


class Worker(Actor):
    """A worker on a machine of its own.

    * `wake_at`: there is nothing to do before.
    * `over`: it has ended by itself.
    """

    def __init__(
        self, world: World, name: str, site: Site, version: int, options: WorkerOptions
    ) -> None:
        known = set(parts._parts)
        super().__init__(world, name, site, version)
        self.wake_at = 0.0
        self.over = False
        self.machine = SimulatedMachine(self)
        self.supervisor = self.machine.work(options)
        self._parts = [each for each in parts._parts if each not in known]

    def idle(self) -> bool:
        """Whether it holds nothing."""
        return not self.supervisor.core.deliveries and not any(
            map(len, self.machine.lanes.values())
        )

    def woken(self, queue: str) -> None:
        """A message is in this queue now."""
        for intake in self.machine.intakes:
            if intake.queue == queue:
                intake.wake()
                self.wake_at = 0.0

    def vanish(self) -> None:
        """It is dead: nothing of it is listed any longer."""
        for number in self._parts:
            parts._parts.pop(number, None)

    def running(self) -> list[SteppedRun]:
        """What its pool runs."""
        busy = [process for process in self.machine.processes if not process.idle]
        return [run for process in busy for run in process.runs()]


class SimulatedMachine(Machine):
    """The machine of a worker in a world."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        world = worker.world
        script = world.program.script
        super().__init__(world.time, worker.app, script, lambda: worker.ahead, poll=POLL)

    def several(self) -> bool:
        """Mostly, because tasks run side by side; else others take steps in between."""
        world = self._worker.world
        return world.course.shuffled and world.dice.random() < ALL_AT_ONCE

    def next_poll(self, queue: str, usual: float) -> float:
        """When something can be there, or a little later; a message that is sent ends the wait.

        Real workers look more often, and find nothing.
        """
        world = self._worker.world
        now = world.time.now
        at = self._worker.site.next_change(queue, now, START)
        late = usual * world.dice.random() if world.dice.random() < 0.5 else 0.0
        return max(min(at, now + LONGEST_POLL) + late, now + SHORTEST_POLL)

    def turn(self) -> None:
        """One turn of the loop; at its end the worker closes."""
        assert self.supervisor is not None
        if not self.supervisor.turn():
            self.supervisor.close()
            self._worker.over = True
            return
        # A turn begins with the wait; what it waits for is known already.
        self.box.until = self.clock.monotonic() + self.supervisor.core._patience()

    def reader(self, outbox: SteppedOutbox, answers: Answers) -> RunReader:
        """What reads the calls in a process; streams are written in its steps."""
        return SteppedReader(self._worker, outbox, answers)

    def begun(self, run: SteppedRun) -> None:
        """A run has begun."""
        self._worker.world.book.begun(self._worker, run)

    def note(self, what: str, which: str) -> None:
        """The book keeps the trace."""

    def choose(self, below: Callable[[int], int]) -> Step | None:
        """One of the steps that are possible now; None if there is none."""
        found = self.steps()
        if not found:
            return None
        return found[below(len(found))] if len(found) > 1 else found[0]


def message_key(message: TaskMessage) -> tuple[str, int, int]:
    """The key of a message's run."""
    return (message.id, message.generation, message.hop)
