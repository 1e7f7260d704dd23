"""A message that `App.receive` and `App.areceive` hold, on every broker."""

from __future__ import annotations

import asyncio
import time

import pytest
from subjects import Subject, bodies

from aztask import App
from aztask.errors import (
    AlreadySettled,
    CapabilityError,
    ConfigurationError,
    LeaseLost,
    MessageTooLarge,
)
from aztask.queues.lease.asyncheld import AsyncHeldLease
from aztask.queues.lease.held import HeldLease, LeaseTerms

LONGEST = 3600.0


def holding(subject: Subject, queue: str, **options: object) -> HeldLease:
    terms = LeaseTerms(subject.lease, LONGEST, 0.7)
    settings = {"wait": subject.patience, "clock": subject.clock, **options}
    return HeldLease(subject.broker, queue, terms, **settings)


def aholding(subject: Subject, queue: str, **options: object) -> AsyncHeldLease:
    return AsyncHeldLease(lambda stop: holding(subject, queue, stop=stop, **options))


def left(subject: Subject, queue: str) -> list[bytes]:
    """The bodies of messages that can be received now."""
    return bodies(subject.receiver(queue).receive(10, subject.silence))


# -- what a lease can do ---------------------------------------------------------------------------


def test_a_lease_is_extended_at_once(subject):
    queue = subject.queue()
    subject.send(queue, b"x")
    with holding(subject, queue) as lease:
        subject.pass_time(subject.lease * 0.3)
        lease.extend(subject.lease * 3)
        granted = subject.lease * (1 if subject.can.fixed_lease else 3)
        assert granted * 0.9 < lease.remaining_seconds <= granted
        lease.complete()
        with pytest.raises(AlreadySettled):
            lease.extend(10.0)
    assert left(subject, queue) == []


def test_a_lease_of_another_length_is_granted_or_refused(subject):
    """Service Bus: the queue alone decides; holding it under another assumption would be wrong."""
    queue = subject.queue()
    subject.send(queue, b"x")
    app = App("held", broker=subject.broker, lease=subject.lease)
    if subject.can.fixed_lease:
        with pytest.raises(ConfigurationError, match=r"lock duration|lease"):
            app.receive(queue, lease=subject.lease * 2).__enter__()
        return
    lease = app.queues.held(queue, 5.0, subject.lease * 2, None, None)
    lease._clock = lease._keeper._clock = subject.clock
    with lease:
        assert lease.delivery.lease_seconds == subject.lease * 2
        lease.complete()


def test_beyond_max_lease_an_extension_is_refused_at_once(subject):
    queue = subject.queue()
    subject.send(queue, b"x")
    with holding(subject, queue) as lease:
        lease._keeper.limit(lease._held(), lease.delivery.deadline)
        subject.pass_time(subject.lease * 0.3)
        asked_at = time.monotonic()
        with pytest.raises(LeaseLost, match="max_lease"):
            lease.extend(10.0)
        assert time.monotonic() - asked_at < 5.0
        lease.complete()


def test_an_update_is_found_by_the_next_delivery(subject):
    queue = subject.queue()
    subject.send(queue, b"page 0", headers={"kind": "crawl"}, message_id="m")
    with holding(subject, queue) as lease:
        if not subject.can.update:
            with pytest.raises(CapabilityError, match=r"lease\.resubmit\(body="):
                lease.update(b"page 1")
            lease.complete()
            return
        subject.pass_time(subject.lease * 0.3)
        lease.update(b"page 1")
        assert lease.remaining_seconds > subject.lease * 0.9
        assert lease.body == b"page 1"
        lease.update(b"page 2", headers={"kind": "done"})
    with holding(subject, queue) as lease:
        envelope = lease.delivery.envelope
        assert (envelope.body, dict(envelope.headers)) == (b"page 2", {"kind": "done"})
        assert envelope.message_id == "m"
        lease.complete()


def test_content_that_cannot_be_stored_leaves_message_and_lease_as_they_are(subject):
    queue = subject.queue()
    subject.send(queue, b"x")
    huge = b"\0" * (subject.can.max_message_bytes * 2)
    with holding(subject, queue) as lease:
        with pytest.raises(MessageTooLarge):
            lease.resubmit(body=huge)
        if subject.can.update:
            with pytest.raises(MessageTooLarge):
                lease.update(huge)
        for wrong in ("text", None):
            with pytest.raises(TypeError, match="body takes bytes"):
                lease._changed(wrong, None)
        lease.extend(subject.lease)
    assert left(subject, queue) == [b"x"]


def test_a_resubmitted_message_comes_again_after_its_delay(subject):
    queue = subject.queue(duplicate_window=60.0) if subject.can.duplicate_detection else None
    queue = queue or subject.queue()
    subject.send(queue, b"order 7", headers={"kind": "order"}, message_id="m")
    with holding(subject, queue) as lease:
        lease.resubmit(2.0)
    assert left(subject, queue) == []
    subject.pass_time(2.0 + subject.coarse)
    with holding(subject, queue) as lease:
        envelope = lease.delivery.envelope
        assert (envelope.body, dict(envelope.headers)) == (b"order 7", {"kind": "order"})
        assert envelope.message_id == "m~1", "an id of its own, or it would be a duplicate"
        lease.resubmit(body=b"order 8", headers={})
    with holding(subject, queue) as lease:
        envelope = lease.delivery.envelope
        assert (envelope.body, dict(envelope.headers)) == (b"order 8", {})
        lease.complete()
    assert left(subject, queue) == []


def test_one_that_would_expire_first_is_dead_lettered(subject):
    queue = subject.queue()
    subject.send(queue, b"x", expires_at=subject.clock.wall() + 60.0)
    with holding(subject, queue) as lease:
        lease.resubmit(600.0)
    (dead,) = subject.peek(queue, dead_letter=True)
    assert dead.dead_letter_reason == "expired"


def test_a_deferred_message_is_received_by_its_position(subject):
    queue = subject.queue()
    subject.send(queue, b"aside")
    if not subject.can.defer:
        with holding(subject, queue) as lease:
            with pytest.raises(CapabilityError, match=r"lease\.resubmit\(delay="):
                lease.defer()
            lease.complete()
        with pytest.raises(CapabilityError), holding(subject, queue, deferred="m"):
            raise AssertionError("it cannot be received either")
        return
    with holding(subject, queue) as lease:
        position = lease.defer()
    assert left(subject, queue) == []
    with holding(subject, queue, deferred=position) as lease:
        assert lease.body == b"aside"
        with pytest.raises(LookupError, match="no deferred message"):
            holding(subject, queue, deferred=position).__enter__()
        lease.complete()
    with pytest.raises(LookupError, match="no deferred message"):
        holding(subject, queue, deferred=position).__enter__()


def test_a_message_of_a_session_keeps_its_place_instead(subject):
    if not subject.can.sessions:
        return
    queue = subject.queue(sessions=True)
    subject.send(queue, b"x", session="a")
    with holding(subject, queue, session="a") as lease:
        with pytest.raises(CapabilityError, match="session cannot be deferred"):
            lease.defer()
        lease.resubmit(body=b"y")
    with holding(subject, queue, session="a") as lease:
        assert (lease.body, lease.delivery.session) == (b"y", "a")
        lease.complete()


# -- coroutines ------------------------------------------------------------------------------------


def test_a_coroutine_holds_a_message_and_the_loop_goes_on(subject):
    queue = subject.queue()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async def main() -> None:
        ticking = asyncio.create_task(tick())
        entering = asyncio.create_task(aholding(subject, queue).__aenter__())
        while ticks < 3:  # the loop runs while the coroutine waits for a message
            await asyncio.sleep(0.01)
        assert not entering.done()
        await asyncio.to_thread(subject.send, queue, b"x")
        lease = await entering
        assert (lease.body, lease.lost) == (b"x", False)
        lease.ensure()
        await lease.extend(subject.lease)
        await lease.complete()
        with pytest.raises(AlreadySettled):
            await lease.complete()
        await lease.__aexit__(None, None, None)
        ticking.cancel()

    asyncio.run(main())
    assert left(subject, queue) == []


def test_a_coroutines_lease_is_renewed_meanwhile(subject):
    queue = subject.queue()
    subject.send(queue, b"x")

    async def main() -> None:
        async with aholding(subject, queue) as lease:
            for _ in range(2):
                before = lease.delivery.deadline
                subject.pass_time(subject.lease * 0.75)
                until = time.monotonic() + subject.patience
                while lease.delivery.deadline == before and time.monotonic() < until:
                    await asyncio.sleep(0.02)
                assert lease.delivery.deadline > before
            await lease.complete()

    asyncio.run(main())
    assert left(subject, queue) == []


def test_a_cancelled_body_gives_the_message_back(subject):
    queue = subject.queue()
    subject.send(queue, b"x")

    async def body(entered: asyncio.Event) -> None:
        async with aholding(subject, queue):
            entered.set()
            await asyncio.sleep(3600)

    async def main() -> None:
        entered = asyncio.Event()
        working = asyncio.create_task(body(entered))
        await entered.wait()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert working.cancelled()

    asyncio.run(main())
    with holding(subject, queue) as lease:
        assert (lease.body, lease.delivery.delivery_count) == (b"x", 2)
        lease.complete()


def test_a_cancelled_wait_leaves_later_messages_in_the_queue(subject):
    queue = subject.queue()

    async def main() -> None:
        async with asyncio.timeout(0.1), aholding(subject, queue, wait=60.0):
            raise AssertionError("no message came")

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    subject.send(queue, b"x")
    with holding(subject, queue) as lease:
        assert lease.delivery.delivery_count == 1
        lease.complete()


def test_a_coroutine_settles_in_every_way(subject):
    queue = subject.queue()
    subject.send(queue, b"x")

    async def main() -> None:
        for settle in (
            lambda lease: lease.abandon(),
            lambda lease: lease.release(),
            lambda lease: lease.resubmit(body=b"y"),
            lambda lease: lease.dead_letter("why", "because"),
        ):
            async with aholding(subject, queue) as lease:
                await settle(lease)

    asyncio.run(main())
    assert bodies(subject.peek(queue, dead_letter=True)) == [b"y"]


def test_a_coroutine_updates_and_defers_where_the_broker_can(subject):
    queue = subject.queue()
    subject.send(queue, b"x")

    async def main() -> None:
        async with aholding(subject, queue) as lease:
            for able, call in [
                (subject.can.update, lambda: lease.update(b"y")),
                (subject.can.defer, lease.defer),
            ]:
                if able:
                    position = await call()
                else:
                    with pytest.raises(CapabilityError):
                        await call()
        if subject.can.defer:
            async with aholding(subject, queue, deferred=position) as lease:
                await lease.abandon()

    asyncio.run(main())
