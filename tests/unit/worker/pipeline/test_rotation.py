"""Turns by weight, and the deliveries that wait for theirs."""

from collections import Counter
from types import SimpleNamespace

import pytest

from aztask.worker.pipeline.deliveries import Rotation, WeightedItems

WEIGHTS = {"high": 4, "low": 1}


def item(queue, number=0):
    return SimpleNamespace(queue=queue, number=number)


def test_turns_are_in_proportion_and_spread_evenly():
    rotation = Rotation(WEIGHTS)
    turns = [rotation.next(["high", "low"]) for _ in range(50)]
    assert Counter(turns) == {"high": 40, "low": 10}
    assert turns[:5] == ["high", "high", "low", "high", "high"]
    assert turns == turns[:5] * 10


def test_a_queue_without_a_weight_has_weight_1():
    rotation = Rotation({"high": 3})
    assert Counter(rotation.next(["high", "other"]) for _ in range(8)) == {"high": 6, "other": 2}


def test_a_queue_that_was_empty_has_saved_no_turns_up():
    rotation = Rotation({"high": 1, "low": 1})
    assert [rotation.next(["low"]) for _ in range(10)] == ["low"] * 10
    turns = [rotation.next(["high", "low"]) for _ in range(10)]
    assert Counter(turns) == {"high": 5, "low": 5}
    assert turns[:2] in (["high", "low"], ["low", "high"])


def test_deliveries_are_taken_by_weight_and_in_order():
    waiting = WeightedItems(WEIGHTS)
    waiting.extend([item("low", n) for n in range(3)] + [item("high", n) for n in range(10)])
    assert (len(waiting), bool(waiting), len(list(waiting))) == (13, True, 13)
    taken = [waiting.popleft() for _ in range(13)]
    assert [each.queue for each in taken[:5]] == ["high", "high", "low", "high", "high"]
    assert [each.number for each in taken if each.queue == "high"] == list(range(10))
    assert [each.number for each in taken if each.queue == "low"] == list(range(3))
    assert not waiting
    with pytest.raises(IndexError):
        waiting.popleft()


def test_they_can_be_cleared():
    waiting = WeightedItems(WEIGHTS)
    waiting.append(item("low"))
    waiting.clear()
    assert (len(waiting), list(waiting)) == (0, [])
