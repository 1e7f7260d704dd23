"""The lease as an object around the work, on a real queue in a file."""

import asyncio
import threading
import time
from datetime import timedelta

import pytest

from aztask import AlreadySettled, App, ConfigurationError, LeaseLost
from aztask.message.envelope import Envelope
from aztask.queues.local.receiver import LocalReceiver


@pytest.fixture
def app(tmp_path):
    app = App("held", broker=f"local://{tmp_path}/q.db", lease=60.0)
    app.broker.declare("orders")
    yield app
    app.close()


def send(app, body=b"order 1"):
    app.broker.send("orders", [Envelope(body)])


def counts(app):
    stats = app.broker.stats("orders")
    return stats.active, stats.leased, stats.dead


def test_a_completed_message_is_gone(app):
    send(app)
    with app.receive("orders", wait=5.0) as lease:
        assert lease.body == b"order 1"
        assert not lease.lost
        assert 0 < lease.remaining_seconds <= 60.0
        lease.ensure()
        assert counts(app) == (0, 1, 0)
        lease.complete()
    assert counts(app) == (0, 0, 0)


def test_leaving_the_block_unsettled_abandons(app):
    send(app)
    with app.receive("orders", wait=5.0):
        pass
    assert counts(app) == (1, 0, 0)
    with app.receive("orders", wait=5.0) as lease:
        assert lease.delivery.delivery_count == 2


def test_an_error_in_the_block_abandons_and_is_raised(app):
    send(app)
    with pytest.raises(ValueError, match="bad order"), app.receive("orders", wait=5.0):
        raise ValueError("bad order")
    assert counts(app) == (1, 0, 0)


def test_the_other_ways_to_settle(app):
    for settle, after in [
        (lambda lease: lease.abandon(), (1, 0, 0)),
        (lambda lease: lease.release(), (1, 0, 0)),
        (lambda lease: lease.dead_letter("bad", "no such article"), (0, 0, 1)),
    ]:
        if counts(app)[0] == 0:
            send(app)
        with app.receive("orders", wait=5.0) as lease:
            settle(lease)
        assert counts(app) == after
    (dead,) = app.broker.peek("orders", dead_letter=True)
    assert (dead.dead_letter_reason, dead.dead_letter_description) == ("bad", "no such article")


def test_a_second_settlement_is_an_error_without_effect(app):
    send(app)
    with app.receive("orders", wait=5.0) as lease:
        lease.complete()
        for again in (lease.complete, lease.abandon, lambda: lease.dead_letter("again")):
            with pytest.raises(AlreadySettled):
                again()
    assert counts(app) == (0, 0, 0)


def test_an_error_while_cleaning_up_never_hides_the_blocks_own(app, caplog):
    send(app)
    with pytest.raises(ValueError, match="the work's own"), app.receive("orders", wait=5.0):
        app.broker.delete("orders")  # so that abandoning fails
        raise ValueError("the work's own")
    assert "could not clean up after a message of orders" in caplog.text


def test_the_lease_is_renewed_inside_the_block(tmp_path):
    app = App("held", broker=f"local://{tmp_path}/q.db", lease=0.4)
    app.broker.declare("orders")
    send(app)
    with app.receive("orders", wait=5.0) as lease:
        time.sleep(1.2)
        assert not lease.lost
        assert app.broker.receiver("orders", lease=1.0).receive(1, 0.0) == []
        lease.complete()
    app.close()


def test_a_lease_that_reached_its_limit_is_lost_and_settles_nothing(tmp_path):
    app = App("held", broker=f"local://{tmp_path}/q.db", lease=0.2, max_lease=0.3)
    app.broker.declare("orders")
    send(app)
    with app.receive("orders", wait=5.0) as lease:
        time.sleep(0.6)
        assert lease.lost
        with pytest.raises(LeaseLost):
            lease.ensure()
        with pytest.raises(LeaseLost):
            lease.complete()
    assert counts(app) == (1, 0, 0)
    app.close()


def test_no_message_is_a_lookup_error_after_the_wait(app):
    with pytest.raises(LookupError, match="no message came on 'orders'"):
        app.receive("orders", wait=0.05).__enter__()


def test_it_is_used_as_a_context_manager(app):
    with pytest.raises(RuntimeError, match=r"with app\.receive"):
        app.receive("orders").complete()


def test_no_thread_is_left(app):
    before = set(threading.enumerate())
    send(app)
    with app.receive("orders", wait=5.0) as lease:
        lease.complete()
    assert {thread for thread in threading.enumerate() if "lease" in thread.name} <= before


def test_a_held_lease_is_extended_when_the_block_asks(app):
    send(app)
    with app.receive("orders") as lease:
        assert lease.remaining_seconds <= 60.0
        lease.extend(600.0)
        assert lease.remaining_seconds > 500.0
        with pytest.raises(ValueError, match="above 0"):
            lease.extend(0.0)
        lease.complete()
    assert lease.delivery.lease_seconds == 600.0


def test_the_block_may_ask_for_a_lease_of_its_own(app):
    for lease, seconds in [(5.0, 5.0), (timedelta(minutes=2), 120.0)]:
        send(app)
        with app.receive("orders", lease=lease) as held:
            assert held.delivery.lease_seconds == seconds
            held.complete()
    with pytest.raises(ConfigurationError, match="must be longer"):
        app.receive("orders", lease=7200.0).__enter__()
    with pytest.raises(ConfigurationError, match="lease must be seconds"):
        app.receive("orders", lease="5s").__enter__()


def test_a_message_is_set_aside_and_received_again(app):
    send(app)
    with app.receive("orders") as lease:
        position = lease.defer()
    assert app.broker.stats("orders").deferred == 1
    with app.receive("orders", deferred=position) as lease:
        lease.resubmit(delay=60.0, body=b"order 2")
    stats = app.broker.stats("orders")
    assert (stats.scheduled, stats.deferred) == (1, 0)


def test_coroutines_hold_messages_at_the_same_time(app):
    app.broker.send("orders", [Envelope(b"%d" % number) for number in range(20)])
    seen = set()

    async def work() -> None:
        async with app.areceive("orders", lease=30.0) as lease:
            await asyncio.sleep(0.05)
            seen.add(lease.body)
            await lease.complete()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(work())

    asyncio.run(main())
    assert len(seen) == 20
    assert counts(app) == (0, 0, 0)


def test_leaving_while_a_renewal_hangs_at_the_broker(tmp_path, monkeypatch):
    """A real renewal that is under way, not a made-up state; the same for an update."""
    app = App("held", broker=f"local://{tmp_path}/q.db", lease=2.0, renew_at=0.5)
    app.broker.declare("orders")
    send(app)
    hanging = threading.Event()
    renew = LocalReceiver.renew

    def slow(*given):
        hanging.set()
        time.sleep(0.3)
        return renew(*given)

    monkeypatch.setattr(LocalReceiver, "renew", slow)
    with pytest.raises(ValueError, match="the block's own"), app.receive("orders"):
        assert hanging.wait(5.0)
        raise ValueError("the block's own")
    assert counts(app) == (1, 0, 0)
    hanging.clear()
    with app.receive("orders") as lease:
        assert hanging.wait(5.0)
        lease.update(b"page 1")
        lease.complete()
    assert counts(app) == (0, 0, 0)
    app.close()
