"""The faults of a course, and their end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from aztask.limits.control import Controls

from .course import Decision
from .points import Death
from .releases import FORMER

if TYPE_CHECKING:
    from .actors import Worker
    from .world import World


def _one(world: World, decision: Decision) -> Worker | None:
    workers = [each for each in world.workers if each.label == decision.app]
    return workers[int(decision.what[0] * len(workers))] if workers else None


def kill(world: World, decision: Decision) -> None:
    """A worker dies between two steps, or where it stands frozen; another one takes its place."""
    worker = _one(world, decision)
    if worker is not None:
        world.faults["kill"] += 1
        world.kill(worker)
        world.start_worker(decision.app)


def start(world: World, decision: Decision) -> None:
    """Start a worker where one has died."""
    world.start_worker(decision.app)


def arm(world: World, decision: Decision) -> None:
    """An actor will die or freeze at a point."""
    world.armed[decision.what[0], len(world.armed)] = decision


def freeze(world: World, decision: Decision) -> None:
    """A worker stands still for some time, between two steps."""
    worker = _one(world, decision)
    if worker is not None:
        world.faults["freeze"] += 1
        world.book.note(worker.name, "freezes", "")
        world.book.strike(worker)
        worker.frozen_until = max(worker.frozen_until, world.time.now + decision.what[1])


def kill_process(world: World, decision: Decision) -> None:
    """A pool process dies, with what it runs."""
    worker = _one(world, decision)
    if worker is not None and worker.machine.processes:
        world.faults["death of a pool process"] += 1
        world.book.strike(worker)
        processes = worker.machine.processes
        processes[int(decision.what[0] * 997) % len(processes)].die(-9)
        worker.wake_at = 0.0


def outage(world: World, decision: Decision) -> None:
    """The broker or the result store cannot be reached by an app for some time."""
    service, seconds = decision.what
    world.faults[f"outage of the {service}"] += 1
    for worker in world.workers:
        if worker.label == decision.app:
            world.book.strike(worker)
    world.outages.append((world.time.now + seconds, decision.app, service))


def suspend(world: World, decision: Decision) -> None:
    """The whole machine sleeps, and all its workers with it."""
    world.faults["suspension of the machine"] += 1
    for worker in world.workers:
        world.book.strike(worker)
    world.time.move(decision.what[0])


def drain(world: World, decision: Decision) -> None:
    """A worker is told to stop, and another one is started."""
    worker = _one(world, decision)
    if worker is not None and worker.parked is None:
        world.faults["drain"] += 1
        world.book.note(worker.name, "drains", "")
        worker.supervisor.stop()
        worker.wake_at = 0.0
        world.start_worker(decision.app)


def deploy(world: World, decision: Decision) -> None:
    """The other version of the code is deployed: a new sender, and workers one after the other."""
    world.faults["deploy"] += 1
    sender = world.senders[decision.app]
    version = 3 - sender.version
    world.end_actor(sender)
    world.sender(decision.app).version = version
    for worker in [each for each in world.workers if each.label == decision.app][1:]:
        if worker.parked is None:
            worker.supervisor.stop()
            worker.wake_at = 0.0
    world.start_worker(decision.app, version)


def former(world: World, decision: Decision) -> None:
    """Workers of the release before are there for some time."""
    seconds, count = decision.what
    world.faults["release before"] += 1
    for _ in range(count):
        world.start_worker(decision.app, FORMER)
    world.later(seconds, Decision(0.0, "former-ends", decision.app))


def former_ends(world: World, decision: Decision) -> None:
    """They are told to stop; those that stand still are dead."""
    now = world.time.now
    for worker in [each for each in world.workers if each.version == FORMER]:
        if worker.label != decision.app:
            continue
        if worker.parked is not None or worker.frozen_until > now:
            world.kill(worker)
        else:
            worker.supervisor.stop()
            worker.wake_at = 0.0


def jump(world: World, decision: Decision) -> None:
    """The wall clock of a worker's machine is set."""
    worker = _one(world, decision)
    if worker is not None:
        world.faults["jump of a clock"] += 1
        worker.ahead += decision.what[1]


def weather(world: World, decision: Decision) -> None:
    """For some time, requests of an app are lost, refused, or slow."""
    seed, share, seconds = decision.what
    world.fate.storms.append((world.time.now + seconds, decision.app, share, random.Random(seed)))


FAULTS: Final[dict[str, Callable[[World, Decision], None]]] = {
    "kill": kill,
    "start": start,
    "die-at": arm,
    "freeze-at": arm,
    "freeze": freeze,
    "kill-process": kill_process,
    "outage": outage,
    "suspend": suspend,
    "drain": drain,
    "deploy": deploy,
    "former": former,
    "former-ends": former_ends,
    "weather": weather,
    "clock-jumps": jump,
}


def end_all(world: World) -> None:
    """The quiet time begins: nothing is out, frozen or paused, and each app has a new worker."""
    world.quiet = True
    world.outages.clear()
    world.armed.clear()
    world.fate.storms.clear()
    world.fate.calm = True
    for worker in world.workers:
        worker.frozen_until = min(worker.frozen_until, world.time.now)
    for sender in world.standing:
        sender.frozen_until = min(sender.frozen_until, world.time.now)
    for label in world.course.apps:
        sender = world.sender(label)
        Controls(sender.results.controls, world.clock).resume_all()
        former_ends(world, Decision(0.0, "former-ends", label))
        world.start_worker(label)


__all__ = ["FAULTS", "Death", "end_all"]
