"""The critical path of a workflow, from the times of its tasks."""

import random

import pytest

from aztask.spark.events.workflows import TaskTimes, critical_path
from aztask.workflows.compiler import compile_graph
from aztask.workflows.graphs import Signature, chain, chord, group
from aztask.workflows.plan import task_id_of
from aztask.workflows.starting import _parents


class Callee:
    """A task without an app."""

    name = "t"

    def check_arguments(self, args, kwargs):
        """Any arguments fit."""


def s():
    return Signature(Callee())


def times(**tasks):
    """TaskTimes from "parent started ended" by number; parent 0 is none."""
    found = []
    for name, (parent, started, ended) in tasks.items():
        parent_id = f"w.{parent}" if parent else None
        found.append(TaskTimes(f"w.{name[1:]}", parent_id, started, ended))
    return found


def names(steps):
    return [step.task_id for step in steps]


def test_the_slowest_member_of_a_group_is_on_the_path():
    # chain(1, group 2 of (3, 4), 5)
    tasks = times(t1=(0, 0.0, 2.0), t3=(1, 2.5, 3.0), t4=(1, 2.5, 9.0), t5=(2, 9.25, 10.0))
    steps = critical_path("w", reversed(tasks))
    assert names(steps) == ["w.1", "w.4", "w.5"]
    assert [(step.wait_seconds, step.run_seconds) for step in steps] == [
        (0.0, 2.0),
        (0.5, 6.5),
        (0.25, 0.75),
    ]


def test_an_unfinished_or_strange_log_gives_what_it_can():
    assert critical_path("w", []) == []
    assert critical_path("w", [TaskTimes("other.1", None, 1.0, 2.0)]) == []
    alone = critical_path("w", times(t5=(2, None, 10.0)))
    assert [(step.task_id, step.run_seconds) for step in alone] == [("w.5", 0.0)]
    circle = times(t1=(2, 0.0, 1.0), t2=(1, 1.0, 2.0))
    assert names(critical_path("w", circle)) == ["w.1", "w.2"]
    skewed = times(t1=(0, 0.0, 5.0), t2=(1, 4.0, 6.0))
    assert critical_path("w", skewed)[1].wait_seconds == 0.0


GRAPHS = [
    chain(s(), s(), s()),
    chord([s(), s(), s()], s()),
    chain(s(), group(chain(s(), s()), chord([s(), s()], s())), s(), group(s(), s()), s()),
    chain(s(), chord(group(s(), s(), on_error=s()), chain(s(), s())), on_error=s()),
    group(chain(s(), group(s(), s()), on_error=s()), s()),
]


@pytest.mark.parametrize("graph", GRAPHS, ids=range(len(GRAPHS)))
@pytest.mark.parametrize("seed", range(5))
def test_the_path_of_any_graph_has_no_gap(graph, seed):
    """Each task starts the moment its last predecessor ends, so the path waits for nothing."""
    dice = random.Random(seed)
    plan = compile_graph(graph, lambda signature: "q").plan
    parents = _parents("w", plan)
    ends = {}

    def run(numbers, at):
        """The end of these nodes and of all that follows them in their slots."""
        last = at
        for number in numbers:
            node = plan.nodes[number]
            if node.task:
                ends[number] = (at, at + dice.uniform(1.0, 9.0))
                last = max(last, finish(number, ends[number][1]))
        return last

    joined = {}

    def finish(number, at):
        node = plan.nodes[number]
        if node.next:
            return run(node.next, at)
        join = plan.nodes[node.slot.join]
        seen = joined.setdefault(join.number, [])
        seen.append(at)
        if len(seen) < join.size or join.slot is None:
            return at
        return finish(join.number, max(seen))

    run(plan.entries, 0.0)
    tasks = [
        TaskTimes(task_id_of("w", number), parents.get(number), *span)
        for number, span in ends.items()
    ]
    steps = critical_path("w", tasks)
    assert all(step.wait_seconds == pytest.approx(0.0) for step in steps)
    total = max(end for _, end in ends.values())
    assert sum(step.run_seconds for step in steps) == pytest.approx(total)
