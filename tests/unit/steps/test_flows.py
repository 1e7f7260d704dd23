"""Random flows of steps, waits, calls and branches under random faults, and a plain interpreter.

The interpreter runs a flow once, from its first line to its last, on a clock of its own. A worker
runs it again and again: after every wait, and after every fault. Both must give the same value and
act in the same order, and the worker must act once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from aztask import App, Context, RetryPolicy, TaskFailed, WaitTimeout

NAMES = ("a", "b")
MOST_FAULTS = 6


@dataclass(frozen=True)
class Act:
    """A step; `fails`: its error is caught, and the flow goes on."""

    name: str
    fails: bool


@dataclass(frozen=True)
class Sleep:
    seconds: int


@dataclass(frozen=True)
class WaitFor:
    name: str
    timeout: int


@dataclass(frozen=True)
class Call:
    """A child that sleeps for a time first, and may fail."""

    seconds: int
    fails: bool


@dataclass(frozen=True)
class Gather:
    """Branches without signals: who of two branches gets one is not determined."""

    branches: tuple[tuple[Act | Sleep | Call, ...], ...]


Node = Act | Sleep | WaitFor | Call | Gather

acts = st.builds(Act, st.sampled_from("xyz"), st.booleans())
sleeps = st.builds(Sleep, st.integers(0, 20).map(lambda number: 2 * number))
calls = st.builds(Call, st.integers(0, 5).map(lambda number: 2 * number), st.booleans())
waits = st.builds(
    WaitFor, st.sampled_from(NAMES), st.integers(0, 20).map(lambda number: 2 * number)
)
branches = st.lists(st.one_of(acts, sleeps, calls), max_size=3).map(tuple)
gathers = st.builds(Gather, st.lists(branches, min_size=1, max_size=3).map(tuple))
flows = st.lists(st.one_of(acts, sleeps, waits, calls, gathers), max_size=6)
# At odd seconds, while all waits end at even ones: which of the two is first is determined.
signals = st.lists(
    st.tuples(st.integers(0, 40).map(lambda number: 2 * number + 1), st.sampled_from(NAMES)),
    max_size=4,
    unique_by=lambda each: each[0],
).map(sorted)
faults = st.sets(st.integers(0, 25), max_size=MOST_FAULTS)


@dataclass
class Plain:
    """Runs a flow once. `at`: its clock. `left`: signals that no wait has taken, oldest first."""

    left: list[tuple[int, str]]
    at: int = 0
    acted: Counter[str] = field(default_factory=Counter)

    def run(self, nodes: Sequence[Node]) -> list[Any]:
        return [self.one(node) for node in nodes]

    def one(self, node: Node) -> Any:
        if isinstance(node, Act):
            self.acted[node.name] += 1
            return "failed" if node.fails else node.name
        if isinstance(node, Sleep):
            self.at += node.seconds
            return None
        if isinstance(node, Call):
            self.at += node.seconds
            return "child failed" if node.fails else node.seconds
        if isinstance(node, Gather):
            began, ends, found = self.at, [self.at], []
            for branch in node.branches:
                self.at = began
                found.append(self.run(branch))
                ends.append(self.at)
            self.at = max(ends)
            return found
        deadline = self.at + node.timeout
        first = next((each for each in self.left if each[1] == node.name), None)
        if first is None or first[0] > deadline:
            self.at = deadline
            return "late"
        self.left.remove(first)
        self.at = max(self.at, first[0])
        return first[0]


class Worked:
    """The same flow as a task. `faults`: at which points, counted over all runs, it fails."""

    def __init__(self, nodes: Sequence[Node], faults: set[int]) -> None:
        self.acted: Counter[str] = Counter()
        self.keys: Counter[str] = Counter()
        self._faults, self._points = faults, 0
        policy = RetryPolicy(len(faults) + 1, delay=0.0, jitter=False)
        self.app = App("flows", broker="servicebus://nowhere.invalid", retry=policy)

        @self.app.task_with_context(retry=RetryPolicy(0))
        def child(context: Context, seconds: int, fails: bool) -> int:
            context.sleep(seconds)
            if fails:
                raise ValueError("a child that fails")
            return seconds

        @self.app.task_with_context
        def flow(context: Context) -> Any:
            return [self.one(context, child, node) for node in nodes]

        self.flow = flow

    def point(self) -> None:
        """Fail here, if it is the turn of a fault."""
        self._points += 1
        if self._points - 1 in self._faults:
            raise OSError("a fault between two lines")

    def act(self, context: Context, node: Act) -> str:
        self.acted[node.name] += 1
        self.keys[str(context.step_key)] += 1
        if node.fails:
            raise ValueError(node.name)
        return node.name

    def one(self, context: Context, child: Any, node: Node) -> Any:
        self.point()
        found = self._one(context, child, node)
        self.point()
        return found

    def _one(self, context: Context, child: Any, node: Node) -> Any:  # noqa: PLR0911
        if isinstance(node, Act):
            try:
                return context.step(node.name, self.act, context, node, record_errors=True)
            except ValueError:
                return "failed"
        if isinstance(node, Sleep):
            return context.sleep(node.seconds)
        if isinstance(node, Call):
            try:
                return context.call(child, node.seconds, node.fails)
            except TaskFailed as error:
                assert "a child that fails" in str(error), error
                return "child failed"
        if isinstance(node, Gather):
            return context.gather(
                *(
                    lambda branch=branch: [self._one(context, child, each) for each in branch]
                    for branch in node.branches
                )
            )
        try:
            return context.wait_for(node.name, timeout=node.timeout)
        except WaitTimeout:
            return "late"


@given(flows, signals, faults)
@settings(max_examples=60, deadline=None)
def test_a_worker_does_what_a_plain_interpreter_does(
    nodes: list[Node], sent: list[tuple[int, str]], faults: set[int]
) -> None:
    # A signal to a task that has ended is refused: those that are too late are not sent.
    plain = Plain(list(sent))
    wanted = plain.run(nodes)
    worked = Worked(nodes, faults)
    with worked.app.inline() as inline:
        result = worked.flow.delay()
        passed = 0
        for at, name in sent:
            inline.advance(at - passed)
            passed = at
            if result.ready():
                break
            result.signal(name, at)
        inline.advance(max(0, plain.at + 1 - passed))
        assert result.get(0) == wanted
        store = worked.app.sends.signals.store
        assert store is not None and store.read(result.id).parked is None
    assert worked.acted == plain.acted
    assert set(worked.keys.values()) <= {1}
