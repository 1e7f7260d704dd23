"""Frozen dataclasses, made from a dict of their fields."""

from dataclasses import FrozenInstanceError, dataclass

import pytest

from aztask.message.message import build


@dataclass(frozen=True)
class Point:
    x: int
    y: int = 0


def test_it_equals_one_that_was_made_as_usual_and_is_frozen():
    point = build(Point, {"x": 1, "y": 2})
    assert (point, hash(point)) == (Point(1, 2), hash(Point(1, 2)))
    with pytest.raises(FrozenInstanceError):
        point.x = 3
