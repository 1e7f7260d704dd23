"""What a graph means, said twice: by its nested form, and by its compiled nodes in any order.

A call's value is the text of the call, so that a wrong or misplaced input is seen. A call fails if
its number among all calls of the graph is in a given set.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from aztask import App
from aztask.workflows.graphs import Chain, Chord, Graph, Group, Signature
from aztask.workflows.plan import ROOT, GraphPlan, JoinSlot


class FakeTask:
    """A task that accepts any arguments, of an app without a broker."""

    sender = App("graphs")

    def __init__(self, name: str) -> None:
        self.name = name

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pass

    def plain_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], given: int = 0
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def shown_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def s(self, *args: Any) -> Signature:
        return Signature(self, args)

    def si(self, *args: Any) -> Signature:
        return Signature(self, args, immutable=True)


@dataclass(frozen=True)
class Failed:
    """A call or a part failed; so compares equal whatever the cause."""


FAILED = Failed()


def call(signature: Signature, given: tuple[Any, ...]) -> str:
    return f"{signature.task.name}({', '.join(map(str, (*given, *signature.args)))})"


def evaluate(graph: Graph, failing: Collection[str], given: tuple[Any, ...] = ()) -> Any:
    """The value of a graph, or FAILED. given: the value of the element before, if any.

    failing: the names of the tasks that fail.
    """
    if isinstance(graph, Signature):
        if graph.task.name in failing:
            return FAILED
        return call(graph, () if graph.immutable else given)
    if isinstance(graph, Chain):
        for element in graph.elements:
            value = evaluate(element, failing, given)
            if value == FAILED:
                break
            given = (value,)
        return value
    header = graph.header if isinstance(graph, Chord) else graph
    assert isinstance(header, Group)
    values = [evaluate(member, failing, given) for member in header.members]
    if FAILED in values and not (isinstance(graph, Chord) and graph.return_errors):
        return FAILED
    return evaluate(graph.body, failing, (values,)) if isinstance(graph, Chord) else values


@dataclass
class Interpreter:
    """Runs a plan's nodes, the next one chosen by the dice, until no node is ready.

    failing: the names of the tasks that fail. ran: how often each task ran.
    """

    plan: GraphPlan
    signatures: Mapping[int, Signature]
    failing: Collection[str]
    dice: random.Random
    values: dict[int, Any] = field(default_factory=dict)
    bits: dict[JoinSlot, Any] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)

    def run(self) -> Any:
        ready = list(self.plan.entries)
        while ready:
            number = ready.pop(self.dice.randrange(len(ready)))
            ready += self._run(number)
        return self.values[ROOT]

    def _run(self, number: int) -> list[int]:
        node = self.plan.nodes[number]
        if not node.task:  # an empty join fires at once
            return self._joined(number)
        self.ran.append(node.task)
        if node.task in self.failing:
            return self._end(number, FAILED)
        given = () if node.takes is None else (self.values[node.takes],)
        return self._end(number, call(self.signatures[number], given))

    def _end(self, number: int, value: Any) -> list[int]:
        node = self.plan.nodes[number]
        self.values[number] = value
        if value != FAILED and node.next:
            return list(node.next)
        if node.slot is None:
            return []
        assert node.slot not in self.bits, "a slot is filled once"
        self.bits[node.slot] = value
        return self._joined(node.slot.join)

    def _joined(self, number: int) -> list[int]:
        join = self.plan.nodes[number]
        slots = [JoinSlot(number, member) for member in range(join.size)]
        if not all(slot in self.bits for slot in slots):
            return []
        values = [self.bits[slot] for slot in slots]
        failed = FAILED in values and not join.passes_errors
        handler = [join.on_error] if failed and join.on_error is not None else []
        value = FAILED if failed else values[0] if join.single else values
        return self._end(number, value) + handler
