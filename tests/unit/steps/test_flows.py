"""Random flows of steps, waits, tasks, branches and rounds under random faults, and a plain
interpreter.

The interpreter runs a flow once, from its first line to its last, on a clock of its own. A worker
runs it again and again: after every wait, in every round, and after every fault. Both must give the
same value and act in the same order, and the worker must act once.

Which of two events is first is determined: tasks and sleeps take multiples of `GRID` seconds, a
signal comes some `OFFSET` later than one of these, and each timeout has a `MORE` of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from aztask import App, Context, RetryPolicy, TaskFailed, WaitTimeout
from aztask.steps.stepoptions import StartedTask

NAMES = ("a", "b")
GRID = 16
OFFSET = 2
MORE = 1 / 32
MOST_SIGNALS = 5
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
    timeout: float


@dataclass(frozen=True)
class Call:
    """A child that sleeps for a time first, and may fail."""

    seconds: int
    fails: bool


@dataclass(frozen=True)
class Start:
    """As a call, but the flow goes on at once; a later `WaitAny` may wait for it."""

    seconds: int
    fails: bool


@dataclass(frozen=True)
class WaitAny:
    """A wait for a signal or a task that this round has started, if there is one. `which`: task."""

    name: str
    which: int
    timeout: float


@dataclass(frozen=True)
class Race:
    """A task is started, and waited for, but not longer than `timeout`."""

    seconds: int
    fails: bool
    timeout: float


@dataclass(frozen=True)
class Gather:
    """Branches without signals: who of two branches gets one is not determined."""

    branches: tuple[tuple[Act | Sleep | Call | Race, ...], ...]


Node = Act | Sleep | WaitFor | Call | Start | WaitAny | Race | Gather

times = st.integers(0, 10).map(lambda number: GRID * number)
timeouts = st.integers(0, 20).map(lambda number: GRID * number + MORE)
acts = st.builds(Act, st.sampled_from("xyz"), st.booleans())
sleeps = st.builds(Sleep, times)
calls = st.builds(Call, times, st.booleans())
starts = st.builds(Start, times, st.booleans())
waits = st.builds(WaitFor, st.sampled_from(NAMES), timeouts)
any_waits = st.builds(WaitAny, st.sampled_from(NAMES), st.integers(0, 3), timeouts)
races = st.builds(Race, times, st.booleans(), timeouts)
branches = st.lists(st.one_of(acts, sleeps, calls, races), max_size=3).map(tuple)
gathers = st.builds(Gather, st.lists(branches, min_size=1, max_size=3).map(tuple))
rounds = st.lists(
    st.one_of(acts, sleeps, waits, calls, starts, any_waits, races, gathers), max_size=5
)
flows = st.lists(rounds, min_size=1, max_size=3)
signals = st.lists(
    st.tuples(st.integers(0, 20), st.sampled_from(NAMES)), max_size=MOST_SIGNALS
).map(
    lambda found: sorted(
        (GRID * at + OFFSET * (number + 1), name) for number, (at, name) in enumerate(found)
    )
)
faults = st.sets(st.integers(0, 30), max_size=MOST_FAULTS)


@dataclass
class Plain:
    """Runs a flow once. `at`: its clock. `left`: signals that no wait has taken, oldest first."""

    left: list[tuple[int, str]]
    at: float = 0.0
    acted: Counter[str] = field(default_factory=Counter)
    started: list[tuple[float, Start]] = field(default_factory=list)

    def all(self, nodes: Sequence[Sequence[Node]]) -> list[Any]:
        found: list[Any] = []
        for each in nodes:
            self.started = []
            found += self.run(each)
        return found

    def run(self, nodes: Sequence[Node]) -> list[Any]:
        return [self.one(node) for node in nodes]

    def one(self, node: Node) -> Any:  # noqa: PLR0911
        if isinstance(node, Act):
            self.acted[node.name] += 1
            return "failed" if node.fails else node.name
        if isinstance(node, Sleep):
            self.at += node.seconds
            return None
        if isinstance(node, Call):
            self.at += node.seconds
            return "child failed" if node.fails else node.seconds
        if isinstance(node, Start):
            self.started.append((self.at + node.seconds, node))
            return "started"
        if isinstance(node, Race):
            if node.seconds > node.timeout:
                self.at += node.timeout
                return "late"
            self.at += node.seconds
            return "child failed" if node.fails else ["child", node.seconds]
        if isinstance(node, Gather):
            began, ends, found = self.at, [self.at], []
            for branch in node.branches:
                self.at = began
                found.append(self.run(branch))
                ends.append(self.at)
            self.at = max(ends)
            return found
        return self.wait(node)

    def wait(self, node: WaitFor | WaitAny) -> Any:
        deadline = self.at + node.timeout
        signal = next((each for each in self.left if each[1] == node.name), None)
        ends: list[tuple[float, int]] = [(deadline, 2)]
        if signal is not None:
            ends.append((max(self.at, signal[0]), 0))
        child = None
        if isinstance(node, WaitAny) and self.started:
            at, child = self.started[node.which % len(self.started)]
            ends.append((max(self.at, at), 1))
        self.at, kind = min(ends)
        if kind == 2:
            return "late"
        if kind == 0:
            assert signal is not None
            self.left.remove(signal)
            return signal[0] if isinstance(node, WaitFor) else [node.name, signal[0]]
        assert child is not None
        return "child failed" if child.fails else ["child", child.seconds]


class Worked:
    """The same flow as a task. `faults`: at which points, counted over all runs, it fails."""

    def __init__(self, nodes: Sequence[Sequence[Node]], faults: set[int]) -> None:
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
        def flow(context: Context, number: int, made: list[Any]) -> Any:
            started: list[StartedTask] = []
            made = made + [self.one(context, started, node) for node in nodes[number]]
            if number + 1 < len(nodes):
                context.continue_with(number + 1, made)
            return made

        self.child, self.flow = child, flow

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

    def one(self, context: Context, started: list[StartedTask], node: Node) -> Any:
        self.point()
        try:
            found = self._one(context, started, node)
        except WaitTimeout:
            found = "late"
        except TaskFailed as error:
            assert "a child that fails" in str(error), error
            found = "child failed"
        self.point()
        return found

    def _one(self, context: Context, started: list[StartedTask], node: Node) -> Any:  # noqa: PLR0911
        if isinstance(node, Act):
            try:
                return context.step(node.name, self.act, context, node, record_errors=True)
            except ValueError:
                return "failed"
        if isinstance(node, Sleep):
            return context.sleep(node.seconds)
        if isinstance(node, Call):
            return context.call(self.child, node.seconds, node.fails)
        if isinstance(node, Start):
            started.append(context.start(self.child, node.seconds, node.fails))
            return "started"
        if isinstance(node, Race):
            own = context.start(self.child, node.seconds, node.fails)
            return ["child", context.wait_any(own, timeout=node.timeout)[1]]
        if isinstance(node, Gather):
            return context.gather(
                *(lambda branch=branch: self._branch(context, branch) for branch in node.branches)
            )
        if isinstance(node, WaitFor):
            return context.wait_for(node.name, timeout=node.timeout)
        tasks = [started[node.which % len(started)]] if started else []
        found, value = context.wait_any(node.name, *tasks, timeout=node.timeout)
        return [found if isinstance(found, str) else "child", value]

    def _branch(self, context: Context, nodes: Sequence[Node]) -> list[Any]:
        made: list[Any] = []
        for node in nodes:
            try:
                made.append(self._one(context, [], node))
            except WaitTimeout:
                made.append("late")
            except TaskFailed as error:
                assert "a child that fails" in str(error), error
                made.append("child failed")
        return made


@given(flows, signals, faults)
@settings(max_examples=100, deadline=None)
def test_a_worker_does_what_a_plain_interpreter_does(
    nodes: list[list[Node]], sent: list[tuple[int, str]], faults: set[int]
) -> None:
    # A signal to a task that has ended is refused: those that are too late are not sent.
    plain = Plain(list(sent))
    wanted = plain.all(nodes)
    worked = Worked(nodes, faults)
    with worked.app.inline() as inline:
        result = worked.flow.delay(0, [])
        passed = 0.0
        for at, name in sent:
            inline.advance(at - passed)
            passed = at
            if result.ready():
                break
            result.signal(name, at)
        inline.advance(max(0.0, plain.at + 1 - passed))
        assert result.get(0) == wanted
        store = worked.app.sends.signals.store
        assert store is not None and store.read(result.id).parked is None
    assert worked.acted == plain.acted
    assert set(worked.keys.values()) <= {1}
