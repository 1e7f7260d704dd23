"""What `aztask.testing` offers, on a real emulator."""

from datetime import timedelta

import pytest

from aztask import App, LeaseLost, current_context
from aztask.testing import RunningEmulator, emulator, task_context


def test_an_emulator_serves_an_app_inside_the_block():
    with emulator(queues=["orders"]) as running:
        assert isinstance(running, RunningEmulator)
        assert (running.host, running.certificate) == ("127.0.0.1", None)
        running.create_queue("slow", lock_seconds=5)
        app = App("shop", broker=running.connection_string)
        app.send("shop.add", [1, 2], queue="orders")
        app.send("shop.add", [1, 2], queue="slow")
        assert [len(app.broker.peek(name, limit=5)) for name in ("orders", "slow")] == [1, 1]
        app.close()


def test_a_wrong_setting_of_a_queue_is_refused():
    with emulator() as running, pytest.raises(TypeError):
        running.create_queue("orders", no_such_setting=1)


def test_a_context_for_tests_is_current_inside_the_block():
    with task_context(
        task="shop.crawl",
        queue="pages",
        task_id="a",
        saved={"page": 3},
        resubmit_count=2,
        delivery_count=4,
        session="customer-7",
    ) as context:
        assert current_context() is context
        assert (context.task, context.queue, context.task_id) == ("shop.crawl", "pages", "a")
        assert (context.saved, context.resubmit_count) == ({"page": 3}, 2)
        assert (context.delivery_count, context.session.id) == (4, "customer-7")
        context.checkpoint({"page": 4})
        context.session.state = (context.session.state or 0) + 1
        context.session.state += 1
        with task_context() as inner:
            assert current_context() is inner
        assert current_context() is context
    assert current_context() is None
    assert context.saved == {"page": 4}
    assert context.session.state == 2


def test_the_lease_of_a_context_for_tests_can_end_and_can_be_extended():
    with task_context(lease=timedelta(minutes=1)) as context:
        assert 50 < context.lease.remaining_seconds <= 60
        context.lease.extend(timedelta(hours=1))
        assert 3500 < context.lease.remaining_seconds <= 3600
    with task_context(lease=0) as context:
        assert context.lease.lost
        with pytest.raises(LeaseLost):
            context.checkpoint({"page": 1})
