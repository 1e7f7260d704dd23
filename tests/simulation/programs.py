"""The random apps of a course: tasks of every kind, of two versions of the code.

How a run ends is a letter of the plan that the call carries, and how long it takes follows from
its key, so it stays the same when other parts of a course are left out.

    o  it returns     f  it fails, and may be retried   x  it fails, and may not
    s  it snoozes     r  it asks for a retry by itself  e  it fails with a hostile text
"""

from __future__ import annotations

import zlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final

from aztask.app import App
from aztask.context import Context
from aztask.errors import Reject, Retry, Snooze
from aztask.message.message import TaskMessage
from aztask.retry import RetryPolicy
from aztask.workflows.graphs import Chain, Chord, Graph, Group, Signature, chain, chord, group

from . import flows
from .course import RETENTION
from .releases import FORMER, GRACE, FormerCodec
from .stepped import Play

if TYPE_CHECKING:
    from .actors import Actor
    from .course import Course
    from .world import World

LEASE: Final = 30.0
RETRY: Final = RetryPolicy(
    max_retries=3, delay=2.0, backoff=2.0, max_delay=60.0, give_up_on=(LookupError,), max_snoozes=5
)
FOR_EVER: Final = RetryPolicy(max_retries=10_000, delay=1.0, max_delay=30.0)
"""Of tasks of workflows: faults alone never make one of them fail."""

RATE, BURST, SPACING = "5/10s", 2, 2.0
PERMITS: Final = 2
TOKENS, MOST_TOKENS, TOKEN_SPACING = "12/60s", 6, 5.0
WEIGHTS: Final = {"cost1": (1, 1), "cost2": (2, 4), "cost3": (3, 1)}
"""Of each task of the limit with a cost: what it claims, and what its run says it has used."""
SCHEDULE: Final = "shared.tick"
"""Both apps use this name, and each has a schedule of its own under it."""

EXPIRES: Final = 60.0


class Program:
    """Builds the app of each actor of a world."""

    def __init__(self, world: World, course: Course) -> None:
        self._world = world
        self._course = course

    def build(self, actor: Actor) -> App:
        """The app as the actor's version of the code has it."""
        app = actor.new_app(
            actor.label,
            retry=RETRY,
            lease=LEASE,
            max_lease=100_000.0,
            max_deliveries=10_000,
            result_retention=RETENTION[actor.label],
            unknown_task_grace=GRACE,
        )
        if actor.version == FORMER:
            app.codec.__class__ = FormerCodec  # of all that have it
        if actor.broker.capabilities.sessions:
            app.queue("steps", sessions=True)
        app.queue("lanes", priorities={"high": 4, "normal": 2})
        app.limit("rate", rate=RATE, burst=BURST)
        app.limit("permits", concurrency=PERMITS)
        app.limit("tokens", rate=TOKENS, burst=MOST_TOKENS, cost=lambda plan, weight: weight)
        _Tasks(app, actor).register()
        if self._course.every:
            tick = app.tasks[f"{actor.label}.tick"]
            for name in (SCHEDULE, "tick"):
                app.schedule(
                    name, tick.s("o"), every=self._course.every, missed="all", max_missed=1000
                )
        return app

    def queues(self, app: App) -> tuple[str, ...]:
        """All queues of an app."""
        steps = ("steps",) if app.broker.capabilities.sessions else ()
        return ("default", *steps, *app.priority_queues("lanes"))

    def script(self, message: TaskMessage) -> Play:
        """How long a run takes, and whether its process dies in it."""
        draw = zlib.crc32(f"{message.id}:{message.hop}:{message.resubmit_count}".encode()) % 1000
        if draw < 800:
            return Play()
        if draw < 900:
            return Play(seconds=(draw - 800) / 50.0)
        if draw < 975:
            return Play(seconds=(draw - 900) / 5.0)
        if draw < 990:
            return Play(seconds=float(draw - 920))
        return Play(seconds=3.0, dies=-11 if message.workflow is None or message.hop < 2 else None)


class _Tasks:
    """Registers the tasks of one app."""

    def __init__(self, app: App, actor: Actor) -> None:
        self._app = app
        self._actor = actor

    def register(self) -> None:
        """Register all."""
        add = self._add
        add("plain")
        for name, strategy in (
            ("abandon", "abandon"),
            ("lapse", "lease-timeout"),
            ("hold", "hold"),
            ("defer", "defer"),
        ):
            if strategy in self._actor.broker.capabilities.retry_strategies:
                add(name, retry_strategy=strategy)
        add("once", delivery="at-most-once")
        add("rated", limits=["rate"])
        add("permitted", limits=["permits"])
        add("unique", unique=_unique_key)
        add("begun", unique=_unique_key, until="started", on_conflict="drop")
        add("quiet", unique=_unique_key, debounce=3.0)
        if self._actor.broker.capabilities.sessions:
            add("step", queue="steps")
        add("urgent", queue="lanes", priority="high")
        add("expiring", expires=EXPIRES)
        add("tick")
        add("old" if self._actor.version < 2 else "new")
        for name in WEIGHTS:
            self._add_costly(name)
        self._add_node()
        self._add_stream()
        flows.register(self._app, self._actor, FOR_EVER)

    def _add(self, name: str, **options: Any) -> None:
        actor = self._actor

        def body(context: Context, plan: str, *more: Any) -> Any:
            ends = actor.world.book.ran(actor, context.message)
            return _end(plan[min(ends, len(plan) - 1)], context)

        self._app.task_with_context(name=f"{actor.label}.{name}", **options)(body)

    def _add_costly(self, name: str) -> None:
        actor, (_, spent) = self._actor, WEIGHTS[name]

        def costly(context: Context, plan: str, weight: int) -> str:
            ends = actor.world.book.ran(actor, context.message)
            context.spent("tokens", spent)
            return _end(plan[min(ends, len(plan) - 1)], context)

        self._app.task_with_context(name=f"{actor.label}.{name}", limits=["tokens"])(costly)

    def _add_node(self) -> None:
        actor = self._actor

        def node(context: Context, *args: Any, name: str, plan: str) -> Any:
            ends = actor.world.book.ran(actor, context.message)
            _end(plan[min(ends, len(plan) - 1)], context)
            return [name, *args]

        self._app.task_with_context(name=f"{actor.label}.node", retry=FOR_EVER)(node)

    def _add_stream(self) -> None:
        actor = self._actor

        def stream(context: Context, plan: str, count: int) -> Generator[int, None, str]:
            ends = actor.world.book.ran(actor, context.message)
            yield from range(count)
            return _end(plan[min(ends, len(plan) - 1)], context)

        self._app.task_with_context(name=f"{actor.label}.stream")(stream)


def _unique_key(plan: str, key: int) -> str:
    return f"k{key}"


def _end(letter: str, context: Context) -> str:
    match letter:
        case "f":
            raise ValueError("not yet")
        case "x":
            raise LookupError("never")
        case "s":
            raise Snooze(7.0)
        case "r":
            raise Retry(delay=4.0)
        case "e":
            raise Reject("\ud800 hostile", "\x00")
    return context.task_id


def graph_of(app: App, shape: tuple[Any, ...]) -> Graph:
    """The graph of a drawn shape."""
    kind, *rest = shape
    if kind == "t":
        name, plan = rest
        return app.tasks[f"{app.name}.node"].s(name=name, plan=plan)
    parts = [graph_of(app, part) for part in rest[0]]
    if kind == "chain":
        return chain(*parts)
    if kind == "group":
        return group(*parts)
    return chord(parts, _signature(graph_of(app, rest[1])))


def _signature(graph: Graph) -> Signature:
    assert isinstance(graph, Signature)
    return graph


def value_of(shape: tuple[Any, ...], *given: Any) -> Any:
    """The value that the graph of a drawn shape must have."""
    kind, *rest = shape
    if kind == "t":
        return [rest[0], *given]
    if kind == "chain":
        for part in rest[0]:
            given = (value_of(part, *given),)
        return given[0]
    values = [value_of(part, *given) for part in rest[0]]
    return values if kind == "group" else value_of(rest[1], values)


__all__ = ["Chain", "Chord", "Group", "Program", "graph_of", "value_of"]
