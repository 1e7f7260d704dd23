"""Batches in which some deliveries fail: what is called how often, and who is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.message.encryption import Locked
from aztask.worker.pipeline.settling import isolated


class Batch:
    """Items are numbers. bad: what is raised for one."""

    def __init__(self, bad: dict[int, Exception]) -> None:
        self.bad = bad
        self.calls: list[list[int]] = []
        self.unavailable: list[Any] = []
        self.refused: list[Any] = []

    def work(self, items: Sequence[Any]) -> None:
        self.calls.append(list(items))
        for item in items:
            if item in self.bad:
                raise self.bad[item]

    def run(self, count: int) -> None:
        items: Any = range(1, count + 1)
        isolated(
            items,
            self.work,
            unavailable=lambda items, error: self.unavailable.append((list(items), error)),
            refused=lambda item, error: self.refused.append((item, error)),
        )


def test_a_good_batch_is_one_call() -> None:
    batch = Batch({})
    batch.run(256)
    assert [len(each) for each in batch.calls] == [256]
    assert (batch.unavailable, batch.refused) == ([], [])


def test_nothing_is_no_call() -> None:
    batch = Batch({})
    batch.run(0)
    assert batch.calls == []


def test_one_bad_delivery_of_256_costs_sixteen_further_calls() -> None:
    error = ValueError("this one")
    batch = Batch({77: error})
    batch.run(256)
    assert len(batch.calls) == 17
    assert batch.refused == [(77, error)]
    done = [each for call in batch.calls if 77 not in call for each in call]
    assert sorted(done) == [each for each in range(1, 257) if each != 77]


def test_several_bad_ones_of_an_odd_batch() -> None:
    batch = Batch({1: ValueError("a"), 5: KeyError("b")})
    batch.run(5)
    assert [item for item, _ in batch.refused] == [1, 5]
    assert batch.calls == [[1, 2, 3, 4, 5], [1, 2], [1], [2], [3, 4, 5], [3], [4, 5], [4], [5]]


@pytest.mark.parametrize("error", [BrokerUnavailable("away"), ConfigurationError("no rights")])
def test_an_outage_is_not_asked_about_for_each_delivery(error: Exception) -> None:
    batch = Batch({3: error})
    batch.run(8)
    assert len(batch.calls) == 1
    assert batch.unavailable == [(list(range(1, 9)), error)]
    assert batch.refused == []


def test_a_delivery_whose_key_is_missing_waits_alone() -> None:
    """It waits as in an outage, and the others go on."""
    locked = Locked("what is stored waits")
    batch = Batch({3: locked})
    batch.run(4)
    assert batch.unavailable == [([3], locked)]
    assert batch.refused == []
    assert batch.calls == [[1, 2, 3, 4], [1, 2], [3, 4], [3], [4]]


def test_an_interrupt_is_blamed_on_no_delivery() -> None:
    batch = Batch({1: KeyboardInterrupt()})  # type: ignore[dict-item]
    with pytest.raises(KeyboardInterrupt):
        batch.run(2)
    assert batch.refused == []
