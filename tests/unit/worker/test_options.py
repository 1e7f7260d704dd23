"""The options of a worker, checked."""

import pytest

from aztask import App
from aztask.errors import ConfigurationError
from aztask.worker.options import MOST_CONCURRENCY, WorkerOptions, weights_of


@pytest.mark.parametrize(
    ("pool", "concurrency", "processes", "slots"),
    [("processes", 8, 8, 1), ("threads", 8, 1, 8), ("threads", 1, 1, 1)],
)
def test_processes_and_slots_follow_from_the_pool(pool, concurrency, processes, slots):
    options = WorkerOptions(pool=pool, concurrency=concurrency)
    assert (options.processes, options.slots) == (processes, slots)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"queues": ()}, "needs at least one queue"),
        ({"pool": "thread"}, "Did you mean 'threads'"),
        ({"concurrency": 0}, "concurrency takes a whole number from 1"),
        ({"concurrency": MOST_CONCURRENCY + 1}, "concurrency takes"),
        ({"concurrency": True}, "concurrency takes"),
        ({"concurrency": 2.0}, "concurrency takes"),
        ({"prefetch": -1}, "prefetch takes a whole number from 0"),
        ({"max_sessions": 0}, "max-sessions takes"),
        ({"max_tasks": 0}, "max-tasks takes"),
        ({"lease": 10.0, "max_lease": 10.0}, "must be longer than --lease"),
    ],
)
def test_values_that_make_no_sense_are_refused(given, words):
    with pytest.raises(ConfigurationError, match=words):
        WorkerOptions(**given)


def test_the_bounds_themselves_are_allowed():
    WorkerOptions(concurrency=MOST_CONCURRENCY, prefetch=0, max_tasks=1, max_sessions=1)
    WorkerOptions(lease=10.0, max_lease=10.1)


def test_weights_are_those_given_else_the_declared_ones_else_1():
    app = App("shop", broker="local://:memory:")
    app.queue("orders", priorities={"high": 4})
    served = ("mail", "orders", "orders-high")
    assert weights_of(app, WorkerOptions(queues=("mail", "other"))) == {}, "none is declared"
    assert weights_of(app, WorkerOptions(queues=("orders-high",))) == {}, (
        "there is nothing to share"
    )
    weights = {"mail": 1, "orders": 1, "orders-high": 4}
    assert weights_of(app, WorkerOptions(queues=served)) == weights
    options = WorkerOptions(queues=served, weights={"orders": 3})
    assert weights_of(app, options) == {**weights, "orders": 3}
    app.close()


@pytest.mark.parametrize("weight", [0, 101, True, "4"])
def test_a_wrong_weight_is_refused(weight):
    with pytest.raises(ConfigurationError, match="the weight of queue 'a' is a whole number"):
        WorkerOptions(queues=("a", "b"), weights={"a": weight})
