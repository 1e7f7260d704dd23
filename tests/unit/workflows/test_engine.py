"""The engine against the interpreter: random graphs, random faults, one meaning.

A small worker runs the messages: it records, sets bits and settles with the real code, on the
embedded queue and a real store in memory. A fault is an exception at a step where a kill could
strike; its message is delivered again.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from unittest import mock

import pytest
from graphinterpreter import FAILED, FakeTask, call, evaluate
from hypothesis import given, settings
from hypothesis import strategies as st

from aztask import App
from aztask.errors import ResultError, TaskFailed
from aztask.settlement import Abandon, Complete
from aztask.stores.records.base import Finish, Outcome, Recorded, RunKey, Start, State
from aztask.support.clock import SYSTEM_CLOCK
from aztask.workflows import plan as plans
from aztask.workflows.graphs import Chain, Chord, Group, chain, chord, group
from aztask.workflows.inputs import first_argument
from aztask.workflows.joins import TaskEnd
from aztask.workflows.place import NodePlace
from aztask.workflows.repair import Repair
from aztask.workflows.starting import WorkflowLauncher

NAMES = [f"t{n}" for n in range(5)]


class Crash(Exception):
    """A kill, at a step of the code."""


class Owned(FakeTask):
    """A task of one app, which it must name to start workflows."""

    limits = ()

    sender = None
    queue = None
    priority = None


TASKS = [Owned(name) for name in NAMES]
ALARM = Owned("alarm")
SIGNATURES = st.builds(
    lambda task, number, immutable: task.si(number) if immutable else task.s(number),
    st.sampled_from(TASKS),
    st.integers(0, 9),
    st.booleans(),
)
HANDLER = st.none() | st.just(ALARM.s())


def larger(parts):
    lists = st.lists(parts, max_size=5).map(tuple)
    return (
        st.builds(Chain, lists.filter(bool), HANDLER)
        | st.builds(Group, lists, HANDLER)
        | st.builds(Chord, st.builds(Group, lists), parts, st.booleans(), HANDLER)
    )


GRAPHS = st.recursive(SIGNATURES, larger, max_leaves=20)


class Site:
    """One app in memory, and a worker that may be struck at every step."""

    def __init__(self, app, dice, failing, faults):
        self.app, self.engine = app, app.workflows.engine
        self.dice, self.failing, self.faults = dice, failing, faults
        self.receiver = app.broker.receiver("default", lease=60.0)
        self.runs = Counter()
        self.owners = 0

    def strike(self, step, times=1):
        """Every step may be the last one, a limited number of times."""
        if self.faults and self.dice.random() < 0.3:
            self.faults -= 1
            raise Crash(step)

    def start(self, graph):
        for _ in range(50):
            try:
                self.app.workflows.start(graph, "w")
            except Crash:
                continue
            return
        raise AssertionError("it cannot be started")

    def work(self):
        """Deliver and run until nothing is left, in any order."""
        for _ in range(3000):
            found = self.receiver.receive(8, 0.0)
            if not found:
                return
            self.dice.shuffle(found)
            for delivery in found:
                try:
                    self.one(delivery)
                except Crash:
                    self.receiver.settle([(delivery, Abandon())])
                else:
                    self.receiver.settle([(delivery, Complete())])
        raise AssertionError("it does not end")

    def one(self, delivery):
        codec, results = self.app.codec, self.app.results
        message = codec.from_envelope(delivery.envelope, "default")
        place, key = NodePlace.read(message.node), RunKey(*message.key)
        self.owners += 1
        start = Start(key, message.task, "default", delivery.position, f"o{self.owners}", "w", 1.0)
        (answer,) = results.start([start])
        repeated = isinstance(answer, Recorded)
        if repeated:
            outcome = answer.outcome
        else:
            self.runs[message.id] += 1
            outcome = self.run(message, place)
            self.strike("ran")
            results.record([Finish(key, start.owner, outcome)])
            self.strike("recorded")
        self.engine.joins.ended(
            [
                TaskEnd(
                    "w", place, key.generation, outcome.state, outcome.value, outcome.error_type,
                    outcome.error, repeated,
                )
            ]
        )  # fmt: skip
        self.strike("followed")

    def run(self, message, place):
        if message.task in self.failing:
            return Outcome(State.FAILED, Complete(), None, "ValueError", message.task)
        args, _ = self.app.codec.decode_arguments(message)
        given = self.engine.inputs.load("w", place)
        if given is not None:
            first = first_argument(self.app.codec, *given.packet())
            args = (shown(first), *args)
        value = f"{message.task}({', '.join(map(str, args))})"
        return Outcome(State.SUCCEEDED, Complete(), self.app.codec.encode_value(value))


def shown(value):
    """A first argument as the interpreter has it: errors are equal."""
    if isinstance(value, list):
        return [FAILED if isinstance(each, ResultError) else shown(each) for each in value]
    return value


def run(graph, failing, seed, faults, row, blocked=False):
    dice = random.Random(seed)
    with closing(App("shop", broker="local://:memory:", results="local://:memory:")) as app:
        site = Site(app, dice, failing, faults)
        steps = [f"aztask.workflows.{each}.hit" for each in ("joins", "mailing", "starting")]
        sizes = mock.patch.multiple(plans, ROW=row, BLOCK=row, RUN=max(1, row // 2))
        striped = mock.patch.object(type(app.results), "remote", not blocked)
        with sizes, striped, mock.patch(steps[0], site.strike):
            with mock.patch(steps[1], site.strike), mock.patch(steps[2], site.strike):
                site.start(graph)
                site.work()
            look_after(site)
            result = app.workflows.result("w")
            progress = result.progress
            try:
                value = result.get(timeout=0)
            except TaskFailed:
                value = FAILED
        assert not app.results.workflows.open_workflows(5)
        return value, progress, site


def look_after(site):
    """What housekeeping does with a workflow that was struck after its last settlement."""
    app = site.app
    starter = WorkflowLauncher(site.engine, app.broker, app.codec, SYSTEM_CLOCK)
    repair = Repair(site.engine, starter, app.broker, SYSTEM_CLOCK, app.tasks)
    for _ in range(3):
        repair.look()


@settings(max_examples=40, deadline=None)
@given(
    GRAPHS,
    st.sets(st.sampled_from(NAMES), max_size=2),
    st.integers(),
    st.integers(0, 12),
    st.sampled_from([1, 2, 512]),
    st.booleans(),
)
def test_a_workflow_means_what_its_graph_means_whatever_strikes_it(
    graph, failing, seed, faults, row, blocked
):
    value, progress, _ = run(graph, failing, seed, faults, row, blocked)
    assert value == evaluate(graph, failing)
    if not failing:
        assert (progress.done, progress.failed) == (progress.total, 0)


def test_without_faults_each_task_runs_once():
    a, b, c = TASKS[:3]
    graph = chain(a.s(1), group(a.s(2), chord([b.s(3), b.s(4)], c.s())), c.s())
    value, progress, site = run(graph, (), 1, 0, 2)
    assert value == evaluate(graph, ())
    assert set(site.runs.values()) == {1}
    assert (progress.done, progress.failed, progress.total) == (6, 0, 6)


def test_the_call_of_the_interpreter_is_that_of_the_worker():
    assert call(TASKS[0].s(1), ("x",)) == "t0(x, 1)"


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("row", [1, 2, 3, 512])
@pytest.mark.parametrize("blocked", [False, True])
def test_values_come_in_order_however_many_rows_there_are(size, row, blocked):
    graph = chord([TASKS[0].s(n) for n in range(size)], TASKS[1].s())
    value, _, _ = run(graph, (), size, 0, row, blocked)
    assert value == f"t1({[f't0({n})' for n in range(size)]})"


def test_long_values_are_parked_and_come_in_order(monkeypatch):
    monkeypatch.setattr("aztask.workflows.edits.INLINE_BYTES", 20)
    for row in (2, 512):
        graph = chord([TASKS[0].s(n) for n in range(9)], TASKS[1].s())
        value, _, _ = run(graph, (), 3, 8, row)
        assert value == f"t1({[f't0({n})' for n in range(9)]})"
