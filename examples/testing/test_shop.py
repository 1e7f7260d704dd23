"""Tests of a shop: inline, in time, and on a real worker."""

from collections.abc import Iterator

import pytest
import shop

from aztask import TaskFailed
from aztask.testing import BackgroundWorker, Inline


@pytest.fixture(autouse=True)
def full_stock() -> Iterator[None]:
    """Start each test with the same stock."""
    shop.stock["tea"] = 2
    yield


def test_an_order_sends_its_bill(aztask_inline: Inline) -> None:
    result = shop.order.with_options(task_id="o-1").delay("tea")
    assert result.get() == "ordered"
    bill = aztask_inline.assert_sent(shop.bill, "o-1", "tea")
    assert shop.app.result(bill.id).get() == "o-1: 1 x tea"


def test_the_reminder_comes_after_two_weeks(aztask_inline: Inline) -> None:
    shop.order.with_options(task_id="o-1").delay("tea")
    (reminder,) = aztask_inline.sent_to(shop.remind)
    aztask_inline.advance(13 * 86_400)
    assert shop.app.result(reminder.id).state == "pending"
    aztask_inline.advance(86_400)
    assert shop.app.result(reminder.id).get() == "please pay o-1"


def test_sold_out_is_retried_and_ends_in_the_dead_letters(aztask_inline: Inline) -> None:
    shop.stock["tea"] = 0
    with pytest.raises(TaskFailed, match="sold out"):
        shop.order.delay("tea").get()
    (letter,) = aztask_inline.dead_letters()
    assert letter.reason == "retries-exhausted"


def test_an_unknown_article_is_rejected(aztask_inline: Inline) -> None:
    with pytest.raises(TaskFailed, match="no such article"):
        shop.order.delay("coffee").get()
    aztask_inline.assert_not_sent(shop.bill)


def test_on_a_real_worker(aztask_worker: BackgroundWorker) -> None:
    assert shop.order.delay("tea").get(timeout=10) == "ordered"
    aztask_worker.wait_until_idle()
    assert shop.stock["tea"] == 2, "the task ran in another process"
