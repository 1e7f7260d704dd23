"""Tests of an order that waits for a person, on a clock that the test moves."""

from datetime import timedelta

import orders
import pytest

from aztask import Context


def days(count: float) -> float:
    """That many days, in seconds."""
    return timedelta(days=count).total_seconds()


@pytest.mark.parametrize(("yes", "end"), [(True, "parcel for o-1"), (False, "refunded charge-o-1")])
def test_a_person_decides(yes: bool, end: str) -> None:
    with orders.app.inline() as inline:
        result = orders.order.delay("o-1", 250)
        inline.advance(days(2))
        assert result.state == "waiting"
        result.signal("approved", {"yes": yes, "by": "ann"})
        assert result.get() == end


def test_no_answer_is_a_refund() -> None:
    with orders.app.inline() as inline:
        result = orders.order.delay("o-2", 250)
        inline.advance(days(3))
        assert result.get() == "refunded charge-o-2"
        inline.assert_not_sent(orders.ship)


def test_a_cheap_order_waits_for_no_person() -> None:
    with orders.app.inline():
        assert orders.order.delay("o-3", 20).get() == "parcel for o-3"


def test_the_function_alone() -> None:
    context = Context.for_testing(signals={"approved": [{"yes": True}]})
    assert orders.order.function(context, "o-4", 250) == "parcel for o-4"
