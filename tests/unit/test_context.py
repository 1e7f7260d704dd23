"""What a running task can read and request."""

import asyncio
import threading

import pytest
from still import Still

from aztask import App, Context, LeaseLost, TaskLease, current_context
from aztask.context import set_current_context
from aztask.support.clock import Clock


def lease_of(still, seconds=30.0, ask=lambda seconds: None):
    clock = Clock(still.monotonic, still.wall)
    return TaskLease(still.now + seconds, ask=ask, clock=clock)


def test_a_lease_is_lost_at_its_deadline():
    still = Still()
    lease = lease_of(still)
    assert (lease.remaining_seconds, lease.lost) == (30.0, False)
    lease.ensure()
    still.now += 30.0
    assert (lease.remaining_seconds, lease.lost) == (0.0, True)
    with pytest.raises(LeaseLost):
        lease.ensure()


def test_a_renewal_moves_the_deadline_and_a_loss_names_its_reason():
    still = Still()
    lease = lease_of(still)
    lease.renewed(still.now + 60.0)
    assert lease.remaining_seconds == 60.0
    lease.lose("another worker has it")
    assert lease.lost
    with pytest.raises(LeaseLost, match="another worker has it"):
        lease.ensure()


def test_extend_returns_once_the_worker_has_renewed():
    still = Still()
    asked = []

    def ask(seconds):
        asked.append(seconds)
        threading.Thread(target=lambda: lease.renewed(still.now + seconds)).start()

    lease = lease_of(still, ask=ask)
    lease.extend(120.0)
    assert (asked, lease.remaining_seconds) == ([120.0], 120.0)
    with pytest.raises(ValueError, match="seconds above 0"):
        lease.extend(0)


def test_a_context_shows_its_message_and_saves_through_the_worker():
    app = App("shop", broker="local://:memory:")
    app.broker.declare("default")
    app.send("shop.add", [1, 2], task_id="order-7")
    (peeked,) = app.broker.peek("default", limit=1)
    message = app.codec.from_envelope(peeked.envelope, "default")
    saved = []
    context = Context(message, delivery_count=2, lease=lease_of(Still()), save=saved.append)
    assert (context.task_id, context.task, context.queue) == ("order-7", "shop.add", "default")
    assert (context.resubmit_count, context.delivery_count, context.saved) == (0, 2, None)
    context.checkpoint({"page": 7})
    assert (saved, context.saved) == ([{"page": 7}], {"page": 7})
    app.close()


def test_the_current_context_belongs_to_its_thread():
    context = object()
    seen = []
    set_current_context(context)
    try:
        thread = threading.Thread(target=lambda: seen.append(current_context()))
        thread.start()
        thread.join()
        assert (current_context(), seen) == (context, [None])
    finally:
        set_current_context(None)


def test_a_context_for_testing():
    context = Context.for_testing(task_id="a", resubmit_count=2, saved={"page": 1}, session="ann")
    assert (context.task_id, context.resubmit_count, context.saved) == ("a", 2, {"page": 1})
    context.checkpoint({"page": 2})
    assert context.saved == {"page": 2}
    assert context.session.state is None
    context.session.state = 7
    assert (context.session.id, context.session.state) == ("ann", 7)
    assert 59.0 < context.lease.remaining_seconds <= 60.0
    context.lease.extend(600.0)
    assert context.lease.remaining_seconds > 500.0
    context.lease.lose("the test says so")
    with pytest.raises(LeaseLost, match="the test says so"):
        context.checkpoint({"page": 3})
    assert context.saved == {"page": 2}


def test_coroutines_have_their_own_forms():
    async def use(context):
        await context.acheckpoint({"page": 2})
        await context.lease.aextend(600.0)

    context = Context.for_testing()
    asyncio.run(use(context))
    assert context.saved == {"page": 2}
    assert context.lease.remaining_seconds > 500.0
