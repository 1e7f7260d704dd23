"""What the senders of a course do: send, start workflows, cancel, pause, replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from aztask.errors import ConfigurationError, NotUnique
from aztask.limits.control import Controls, Scope
from aztask.message.envelope import Envelope
from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.operate.resharding import reshard
from aztask.taskoptions import SendOptions

from . import flows, streams
from .course import KINDS, Decision
from .programs import WEIGHTS, graph_of

if TYPE_CHECKING:
    from .actors import Sender
    from .world import World

MAPPED: Final = ("plain", "abandon", "hold", "once", "urgent", "expiring")
FEWEST_MAPPED: Final = 60
"""So many are sent with `map`."""

PAUSED: Final = ("plain", "permitted", "step", "node", "hold")


def send(world: World, sender: Sender, decision: Decision) -> None:
    """Send a task some times."""
    kind, count, plan, number, delay = decision.what
    if kind in MAPPED and count >= FEWEST_MAPPED and f"{sender.label}.{kind}" in sender.app.tasks:
        task = sender.app.tasks[f"{sender.label}.{kind}"]
        options: SendOptions = {"delay": delay} if delay else {}
        task.with_options(**options).map([(plan,)] * count)
        return
    for each in range(count):
        _send(sender, kind, plan, (number + each) % 3, delay)


def _send(sender: Sender, kind: str, plan: str, number: int, delay: float) -> str | None:
    label = sender.label
    options: SendOptions = {}
    if delay and kind != "step":
        options["delay"] = delay
    can = sender.broker.capabilities
    if (kind == "step" and not can.sessions) or (kind == "defer" and not can.defer):
        kind = "plain"
    name = f"{label}.{kind}"
    if kind == "step":
        options["session"] = f"s{number}"
    args: list[Any] = [plan]
    if kind in ("unique", "begun", "quiet"):
        args.append(number)
    if kind in WEIGHTS:
        args.append(WEIGHTS[kind][0])
    task = sender.app.tasks.get(name)
    if task is None:  # of the other version
        return sender.app.send(name, args, **options).id
    try:
        return task.with_options(**options).delay(*args).id
    except NotUnique:
        return None


def workflow(world: World, sender: Sender, decision: Decision) -> None:
    """Start a workflow."""
    shape, name = decision.what
    world.workflows.append((sender.label, name, shape))
    graph_of(sender.app, shape).delay(workflow_id=name)
    world.begun_workflows.add(name)


def cancel(world: World, sender: Sender, decision: Decision) -> None:
    """Cancel one of the tasks that have not ended, as far as anybody knows."""
    waiting = [
        task_id
        for task_id, life in world.book.lives.items()
        if life.app == sender.label
        and life.ended_at is None
        and life.kind not in ("node", "once", "kid")
        and not life.cancelled
    ]
    if waiting:
        task_id = waiting[decision.what[0] % len(waiting)]
        sender.app.sends.result(task_id).cancel(running=bool(decision.what[0] % 2))


def pause(world: World, sender: Sender, decision: Decision) -> None:
    """Pause a queue or a task, and resume it later."""
    scope, seconds = decision.what
    controls = Controls(sender.results.controls, world.clock)
    if scope == "queue":
        where, name = Scope.QUEUE, "steps"
    else:
        where, name = Scope.TASK, f"{sender.label}.{PAUSED[int(seconds) % len(PAUSED)]}"
    controls.pause(where, [name], world.clock.wall())
    world.later(seconds, Decision(0.0, "resume", decision.app, (where.value, name)))


def resume(world: World, sender: Sender, decision: Decision) -> None:
    """Resume what was paused."""
    where, name = decision.what
    Controls(sender.results.controls, world.clock).resume(Scope(where), [name])


def replay(world: World, sender: Sender, decision: Decision) -> None:
    """Send the dead letters of the default queue again."""
    letters = DeadLetters(sender.app, "default", clock=world.clock)
    for task in ("plain", "abandon", "hold", "unique", "flow"):
        letters.replay(Selection(task=f"{sender.label}.{task}"))


def move_shards(world: World, sender: Sender, decision: Decision) -> None:
    """Move a queue to another number of shards, unless it is being moved."""
    queue, count = decision.what
    with suppress(ConfigurationError):
        reshard(sender.app, queue, count).act(by="ann")


def garbage(world: World, sender: Sender, decision: Decision) -> None:
    """Send a message that no worker can read."""
    bodies = (b"\xff" * 40, b"", b"\x93\xa1", b"{}")
    envelope = Envelope(bodies[decision.what[0] % 4], {"task": 5}, f"garbage-{decision.what[0]}")
    sender.broker.send("default", [envelope])
    world.book.garbage += 1


OPERATIONS: Final[dict[str, Callable[[World, Sender, Decision], None]]] = {
    "send": send,
    "workflow": workflow,
    "cancel": cancel,
    "pause": pause,
    "resume": resume,
    "replay": replay,
    "garbage": garbage,
    "reshard": move_shards,
    "flow": flows.start,
    "signal": flows.signal,
    "stream": streams.start,
    "read": streams.read,
}


def probe(world: World) -> None:
    """Send one task of each kind, and a workflow: nothing may be stuck.

    Complains if a unique key is still held, although everything has ended.
    """
    for label in world.course.apps:
        sender = world.sender(label)

        def all_kinds(sender: Sender = sender) -> None:
            for kind in sorted({*KINDS, *WEIGHTS} - {"old"}):
                for number in range(3) if kind in ("unique", "begun", "quiet") else (0,):
                    known = set(world.book.lives)
                    task_id = _send(sender, kind, "o", number, 0.0)
                    if task_id is None or task_id in known:
                        world.book.complain(
                            "unique-is-free",
                            f"{kind} {number}: its key is held by {task_id}, which has ended",
                            task_id or "",
                        )
            shape = ("chord", (("t", "p1", "o"), ("t", "p2", "o")), ("t", "p3", "o"))
            world.workflows.append((sender.label, f"probe-{sender.label}", shape))
            graph_of(sender.app, shape).delay(workflow_id=f"probe-{sender.label}")

        world.act(sender, all_kinds)
