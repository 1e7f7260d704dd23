"""Signatures of calls, and graphs of them: chains, groups and chords, nested to any depth.

Rules
1. A graph is frozen. Combining or changing one makes a new graph.
2. The value of a signature is its task's return value, that of a chain the value of its last
   element, that of a group the list of its members' values in order, and that of a chord the value
   of its body.
3. In a chain each element gets the value of the element before it. `Signature.immutable` ones
   (``task.si()``) do not take it. A group passes it to each of its members.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias, Unpack

from aztask.errors import ConfigurationError
from aztask.support import chance
from aztask.support.display import one_line, short_repr
from aztask.support.elsewhere import say_ours
from aztask.taskoptions import NodeOptions, checked_node_options
from aztask.workflows.result import EmptyWorkflow, WorkflowResult

# -- draws a tree of text, one line for each node; long lists of members are abbreviated ---


SHOWN: Final = 4
"""Members of a group that are drawn; of more, the first ones and the last one."""


class Drawable(Protocol):
    """A node of a tree."""

    def drawn(self) -> Drawing:
        """The node's title, and its parts, each with a label."""
        ...


Part: TypeAlias = tuple[str, Drawable | None]
Drawing: TypeAlias = tuple[str, Sequence[Part]]


def draw(root: Drawable) -> str:
    """The tree below `root`, without a line break at the end."""
    title, parts = root.drawn()
    return "\n".join([title, *_branches(parts)])


def abbreviated(members: Sequence[Drawable]) -> list[Part]:
    """The members as parts; of many, only some."""
    parts: list[Part] = [("", each) for each in members]
    if len(parts) > SHOWN:
        hidden = len(parts) - SHOWN
        parts = [*parts[: SHOWN - 1], (f"... {hidden:,} more", None), parts[-1]]
    return parts


def _branches(parts: Sequence[Part]) -> Iterator[str]:
    for number, (label, node) in enumerate(parts, 1):
        last = number == len(parts)
        title, inner = node.drawn() if node is not None else ("", ())
        yield f"{'└ ' if last else '├ '}{label}{title}"
        for line in _branches(inner):
            yield f"{'  ' if last else '│ '}{line}"


ARGUMENT_CHARACTERS: Final = 40


class GraphStarter(Protocol):
    """The part of an app that starts workflows."""

    def start(self, graph: Graph, workflow_id: str | None = None) -> WorkflowResult:
        """Start a workflow; one whose id is known is not started again."""
        ...


class GraphOwner(Protocol):
    """An app, as far as a graph needs it."""

    @property
    def workflows(self) -> GraphStarter:
        """The part of the app that starts workflows."""
        ...

    def check_queue_name(self, queue: object, where: str) -> None:
        """Raise InvalidQueueName unless the broker, if it is known, allows the name."""
        ...


class Callee(Protocol):
    """The part of a `Task` that a signature needs."""

    @property
    def sender(self) -> GraphOwner:
        """The app that the task belongs to."""
        ...

    @property
    def name(self) -> str:
        """The name under which the task is registered."""
        ...

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise TypeError if the arguments do not match the function's signature."""
        ...

    def plain_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], given: int = 0
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as a message holds them, behind `given` ones. Raises EncodeError."""
        ...

    def shown_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they may be shown."""
        ...


class Graph(ABC):
    """A signature, a chain, a group or a chord. ``a | b`` is a chain of both.

    ``print(graph)`` draws its tree.
    """

    __slots__ = ()

    def __or__(self, other: Graph) -> Chain:
        if not isinstance(other, Graph):
            return NotImplemented
        return Chain((*_links(self), *_links(other)))

    def __str__(self) -> str:
        return draw(self)

    def delay(self, *, workflow_id: str | None = None) -> WorkflowResult:
        """Start this graph as a workflow; when this returns, its first tasks are sent.

        ::

            chain(charge.s(42), ship.s()).delay(workflow_id="order-42").get(timeout=60)

        * `workflow_id`: an id of your own; a new UUID by default. A known id is not started again:
          you get the existing workflow. Give one if you start a workflow in a task: the task may
          run twice, and would otherwise start two.

        Raises

        * ConfigurationError without a result store,
        * TypeError if arguments do not match a function's signature,
        * EncodeError and MessageTooLarge before anything is sent,
        * BrokerUnavailable and SendUnconfirmed: start it again with the same id.
        """
        first = next(calls_of(self), None)
        if first is None:  # no app is known, and there is nothing to send or to record
            return EmptyWorkflow(workflow_id or chance.token(), self.empty_value())
        return first.task.sender.workflows.start(self, workflow_id)

    async def adelay(self, *, workflow_id: str | None = None) -> WorkflowResult:
        """`delay` for use in a coroutine: it sends in a thread and never blocks the event loop."""
        return await asyncio.to_thread(self.delay, workflow_id=workflow_id)

    def parts(self) -> tuple[Graph, ...]:
        """The graphs that it is made of; a signature has none."""
        return ()

    def empty_value(self) -> list[Any]:
        """The value of a graph without tasks: that of its last part."""
        return self.parts()[-1].empty_value()

    @abstractmethod
    def drawn(self) -> Drawing:
        """The title and the parts of its tree, see `Drawable`."""


say_ours(
    Graph, dict.fromkeys(("apply_async", "kiq", "send", "run", "enqueue"), ".delay() to start it")
)


def calls_of(graph: Graph) -> Iterator[Signature]:
    """The calls of a graph in their order, without its handlers of errors."""
    if isinstance(graph, Signature):
        yield graph
    for part in graph.parts():
        yield from calls_of(part)


def _links(graph: Graph) -> tuple[Graph, ...]:
    """The elements that a graph contributes to a chain: a plain chain is not nested."""
    if isinstance(graph, Chain) and graph.on_error is None:
        return graph.elements
    return (graph,)


@dataclass(frozen=True, slots=True)
class Signature(Graph):
    """One call of a task, made by ``task.s(...)`` or ``task.si(...)``.

    * `args`, `kwargs`: its own arguments. Unless it is `immutable`, the value of the element before
      it in a chain comes first.
    * `options`: how its message is sent, see `NodeOptions`; durations are seconds.
    * `plain`: its arguments come from a message, so they are plain data already. Only aztask sets
      it, for a schedule's workflow.

    Raises ConfigurationError for a wrong option.
    """

    task: Callee
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    immutable: bool = False
    plain: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        options = dict(self.options)
        if options:
            options = checked_node_options(options, "a signature")
            if "queue" in options:
                self.task.sender.check_queue_name(options["queue"], "a signature: queue")
        object.__setattr__(self, "kwargs", MappingProxyType(dict(self.kwargs)))
        object.__setattr__(self, "options", MappingProxyType(options))

    def with_options(self, **options: Unpack[NodeOptions]) -> Signature:
        """The same call, sent with these options, for example ``task.s(1).with_options(delay=5)``.

        Raises ConfigurationError for an unknown option or a wrong value.
        """
        return replace(self, options={**self.options, **options})

    def plain_arguments(self, given: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Its arguments as a message holds them, behind `given` ones. Raises EncodeError."""
        args, kwargs = self.args, dict(self.kwargs)
        # A strict task refuses plain data in the place of a value: it must not be converted twice.
        return (args, kwargs) if self.plain else self.task.plain_arguments(args, kwargs, given)

    def drawn(self) -> Drawing:
        """The call as it is written, with its options in brackets."""
        args, kwargs = self.task.shown_arguments(self.args, dict(self.kwargs))
        given = [_shown(value) for value in args]
        given += [f"{name}={_shown(value)}" for name, value in kwargs.items()]
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.task.name}({', '.join(given)}){f' [{options}]' if options else ''}", ()


@dataclass(frozen=True, slots=True)
class Chain(Graph):
    """Elements that run one after the other. `on_error` is called if one of them fails."""

    elements: tuple[Graph, ...]
    on_error: Signature | None = None

    def parts(self) -> tuple[Graph, ...]:
        """Its elements, without the handler of errors."""
        return self.elements

    def drawn(self) -> Drawing:
        """A title, and every element in order."""
        return "chain", [*(("", each) for each in self.elements), *_branch(self.on_error)]


@dataclass(frozen=True, slots=True)
class Group(Graph):
    """Members that run side by side. `on_error` is called if one of them fails."""

    members: tuple[Graph, ...]
    on_error: Signature | None = None

    def parts(self) -> tuple[Graph, ...]:
        """Its members, without the handler of errors."""
        return self.members

    def empty_value(self) -> list[Any]:
        """The values of its members."""
        return [member.empty_value() for member in self.members]

    def drawn(self) -> Drawing:
        """The number of members, and the first ones and the last one."""
        parts = [*abbreviated(self.members), *_branch(self.on_error)]
        return f"group of {len(self.members)}", parts


@dataclass(frozen=True, slots=True)
class Chord(Graph):
    """A group, and a body that gets the list of its values.

    * `return_errors`: the body runs even if members fail, and finds their errors in the list.
    * `on_error`: called if the body cannot run, or fails.
    """

    header: Group
    body: Graph
    return_errors: bool = False
    on_error: Signature | None = None

    def parts(self) -> tuple[Graph, ...]:
        """Its header and its body, without the handler of errors."""
        return (self.header, self.body)

    def drawn(self) -> Drawing:
        """The number of members, some of them, and the body."""
        title = f"chord of {len(self.header.members)}"
        if self.return_errors:
            title += ", errors are passed on"
        parts: list[Part] = [*abbreviated(self.header.members), *_branch(self.header.on_error)]
        return title, [*parts, ("then ", self.body), *_branch(self.on_error)]


def chain(*elements: Graph, on_error: Signature | None = None) -> Chain:
    """Run `elements` one after the other; each gets the value of the one before it.

    ::

        chain(charge.s(42), reserve.s(), ship.s())
        charge.s(42) | reserve.s() | ship.s()           # the same

    * `on_error`: called with the list of failures if an element fails.

    Raises ConfigurationError without elements, or for something that is not part of a graph.
    """
    parts = _graphs(elements, "chain")
    if not parts:
        raise ConfigurationError("chain() needs at least one signature, such as chain(task.s(1))")
    return Chain(tuple(link for part in parts for link in _links(part)), _handler(on_error))


def group(*members: Graph | Iterable[Graph], on_error: Signature | None = None) -> Group:
    """Run `members` side by side; the value is the list of theirs, in order.

    ::

        group(thumbnail.s(path) for path in paths)
        group(charge.s(42), reserve.s(42))

    An empty group ends at once, with the value ``[]``. `on_error` is that of `chain`.
    """
    return Group(_graphs(_unpacked(members), "group"), _handler(on_error))


def chord(
    header: Group | Iterable[Graph],
    body: Graph,
    *,
    return_errors: bool = False,
    on_error: Signature | None = None,
) -> Chord:
    """Run the members of `header` side by side, then `body` with the list of their values.

    ::

        chord([page.s(number) for number in range(100)], book.s())

    * `return_errors`: False by default: if a member fails, the body does not run. True runs it,
      with a `ResultError` in the place of each failed member's value.
    * `on_error`: called with the list of failures if the body cannot run, or fails.
    """
    members = header if isinstance(header, Group) else group(header)
    (last,) = _graphs((body,), "chord")
    if not isinstance(return_errors, bool):
        raise ConfigurationError(f"return_errors is True or False, not {return_errors!r}")
    return Chord(members, last, return_errors, _handler(on_error))


def _unpacked(members: Sequence[Graph | Iterable[Graph]]) -> Iterable[Any]:
    if len(members) == 1 and not isinstance(members[0], Graph):
        if not isinstance(members[0], Iterable):
            raise _not_a_graph(members[0], "group")
        return members[0]
    return members


def _graphs(found: Iterable[Any], where: str) -> tuple[Graph, ...]:
    graphs = tuple(found)
    for each in graphs:
        if not isinstance(each, Graph):
            raise _not_a_graph(each, where)
    return graphs


def _handler(found: object) -> Signature | None:
    if found is not None and not isinstance(found, Signature):
        raise ConfigurationError(f"on_error takes a signature, such as alarm.s(), not {found!r}")
    return found


def _not_a_graph(found: object, where: str) -> ConfigurationError:
    hint = "write task.s(...)" if callable(found) else "call .s(...) on a task"
    return ConfigurationError(f"{where} takes signatures and graphs, not {found!r}; {hint}")


def _branch(on_error: Signature | None) -> list[Part]:
    return [] if on_error is None else [("on error ", on_error)]


def _shown(value: object) -> str:
    return one_line(short_repr(value), ARGUMENT_CHARACTERS)
