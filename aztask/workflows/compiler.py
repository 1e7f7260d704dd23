"""Compiles a graph to a plan, and checks the arguments of every signature on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from aztask.errors import ConfigurationError
from aztask.workflows.graphs import Chain, Chord, Graph, Group, Signature
from aztask.workflows.plan import GraphPlan, JoinSlot, Node

NODES: Final = 1_000_000
DEPTH: Final = 100
"""How deeply graphs may be nested; a chain or group of any length is one level."""


@dataclass(frozen=True)
class Compiled:
    """A plan, and the signature of each of its tasks by node number."""

    plan: GraphPlan
    signatures: dict[int, Signature]


@dataclass(slots=True)
class _Draft:
    """A node while its successors are not known yet."""

    number: int
    slot: JoinSlot | None
    takes: int | None = None
    next: tuple[int, ...] = ()
    task: str = ""
    queue: str = ""
    size: int = 0
    single: bool = False
    passes_errors: bool = False
    on_error: int | None = None

    def node(self, *, blocked: bool) -> Node:
        return Node(
            self.number,
            self.slot,
            self.takes,
            self.next,
            self.task,
            self.queue,
            self.size,
            self.single,
            self.passes_errors,
            self.on_error,
            blocked and not self.task,
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """A compiled part of a graph: the nodes that start it, and the one that has its value."""

    entries: tuple[int, ...]
    exit: int


def compile_graph(
    graph: Graph, queue_of: Callable[[Signature], str], *, blocked: bool = False
) -> Compiled:
    """The plan of `graph`. Raises TypeError for wrong arguments, ConfigurationError for its size.

    * `queue_of`: the queue that a signature is sent to.
    * `blocked`: how bits are laid out in rows, see `Layout`.
    """
    compiler = _Compiler()
    part = compiler.root(graph)
    for number, signature in compiler.signatures.items():
        compiler.drafts[number].queue = queue_of(signature)
    plan = GraphPlan(tuple(draft.node(blocked=blocked) for draft in compiler.drafts), part.entries)
    return Compiled(plan, compiler.signatures)


@dataclass(slots=True)
class _Compiler:
    drafts: list[_Draft] = field(default_factory=list)
    signatures: dict[int, Signature] = field(default_factory=dict)
    depth: int = 0

    def root(self, graph: Graph) -> _Part:
        """The root join takes over the graph's own `on_error`."""
        root = self._add(_Draft(0, None, size=1, single=True))
        part = self._inner(graph, JoinSlot(root.number, 0), None)
        self._handle(root, getattr(graph, "on_error", None))
        return part

    def _add(self, draft: _Draft) -> _Draft:
        draft.number = len(self.drafts)
        if draft.number >= NODES:
            raise ConfigurationError(
                f"a workflow has at most {NODES:,} nodes; split it, or send parts with .map"
            )
        self.drafts.append(draft)
        return draft

    def _part(self, graph: Graph, slot: JoinSlot, takes: int | None) -> _Part:
        """A part below another one. Its `on_error` needs a join of its own, of one member."""
        on_error: Signature | None = getattr(graph, "on_error", None)
        if on_error is None:
            return self._inner(graph, slot, takes)
        join = self._add(_Draft(0, slot, size=1, single=True))
        entries = self._inner(graph, JoinSlot(join.number, 0), takes).entries
        self._handle(join, on_error)
        return _Part(entries, join.number)

    def _inner(self, graph: Graph, slot: JoinSlot, takes: int | None) -> _Part:
        if isinstance(graph, Signature):
            return self._task(graph, slot, takes)
        self.depth += 1
        if self.depth > DEPTH:
            raise ConfigurationError(f"a graph is nested at most {DEPTH} levels deep; flatten it")
        if isinstance(graph, Chain):
            part = self._chain(graph.elements, slot, takes)
        elif isinstance(graph, Group):
            part = self._group(graph, slot, takes)
        elif isinstance(graph, Chord):
            part = self._chord(graph, slot, takes)
        else:
            raise ConfigurationError(f"{graph!r} cannot be part of a workflow")
        self.depth -= 1
        return part

    def _task(self, signature: Signature, slot: JoinSlot | None, takes: int | None) -> _Part:
        given = takes is not None and not signature.immutable
        args = (None, *signature.args) if given else signature.args
        signature.task.check_arguments(args, dict(signature.kwargs))
        draft = _Draft(
            0,
            slot,
            takes if given else None,
            task=signature.task.name,
        )
        number = self._add(draft).number
        self.signatures[number] = signature
        return _Part((number,), number)

    def _chain(self, elements: Sequence[Graph], slot: JoinSlot, takes: int | None) -> _Part:
        first = part = self._part(elements[0], slot, takes)
        for element in elements[1:]:
            following = self._part(element, slot, part.exit)
            self.drafts[part.exit].next = following.entries
            part = following
        return _Part(first.entries, part.exit)

    def _group(
        self, group: Group, slot: JoinSlot, takes: int | None, *, passes_errors: bool = False
    ) -> _Part:
        size = len(group.members)
        join = self._add(_Draft(0, slot, size=size, passes_errors=passes_errors))
        entries: list[int] = []
        for number, member in enumerate(group.members):
            entries += self._part(member, JoinSlot(join.number, number), takes).entries
        return _Part(tuple(entries) or (join.number,), join.number)

    def _chord(self, chord: Chord, slot: JoinSlot, takes: int | None) -> _Part:
        header_slot, scope = slot, None
        if chord.header.on_error is not None:
            scope = self._add(_Draft(0, slot, size=1, single=True))
            header_slot = JoinSlot(scope.number, 0)
        header = self._group(chord.header, header_slot, takes, passes_errors=chord.return_errors)
        if scope is not None:
            self._handle(scope, chord.header.on_error)
            header = _Part(header.entries, scope.number)
        body = self._part(chord.body, slot, header.exit)
        self.drafts[header.exit].next = body.entries
        return _Part(header.entries, body.exit)

    def _handle(self, join: _Draft, on_error: Signature | None) -> None:
        if on_error is not None:
            join.on_error = self._task(on_error, None, join.number).exit
