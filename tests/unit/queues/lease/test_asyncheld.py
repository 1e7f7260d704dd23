"""A lease in a coroutine: cancellations and errors while the broker takes its time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from heldbench import Bench

from aztask.errors import BrokerUnavailable
from aztask.queues.lease.asyncheld import AsyncHeldLease
from aztask.settlement import Abandon, Complete, Release, Settlement

SOON = 5.0


class Slow:
    """A call of the receiver that waits until it may go on."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._call: Callable[..., Any] = getattr(bench.receiver, name)
        setattr(bench.receiver, name, self._wait)

    def _wait(self, *given: Any) -> Any:
        self.reached.set()
        assert self.go_on.wait(SOON)
        return self._call(*given)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def held(bench: Bench) -> AsyncHeldLease:
    bench.receiver.brings.append([bench.delivery()])
    return AsyncHeldLease(lambda stop: bench.lease(stop=stop))


def settlements(bench: Bench) -> list[Settlement]:
    return [how for _, how in bench.receiver.settled]


async def reached(slow: Slow) -> None:
    assert await asyncio.to_thread(slow.reached.wait, SOON)


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if "areceive" in each.name]


def test_a_cancellation_while_leaving_is_raised_after_the_message_was_given_back(
    bench: Bench,
) -> None:
    slow = Slow(bench, "settle")

    async def main() -> None:
        async def body() -> None:
            async with held(bench):
                pass

        working = asyncio.create_task(body())
        await reached(slow)
        for _ in range(2):  # however often it is cancelled
            working.cancel()
            await asyncio.sleep(0.01)
        assert not working.done()
        slow.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await working

    asyncio.run(main())
    assert settlements(bench) == [Abandon()]
    assert bench.receiver.closed == 1


def test_a_message_that_comes_after_the_cancellation_is_released(bench: Bench) -> None:
    slow = Slow(bench, "receive")

    async def main() -> None:
        entering = asyncio.create_task(held(bench).__aenter__())
        await reached(slow)
        entering.cancel()
        await asyncio.sleep(0.01)
        slow.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await entering

    asyncio.run(main())
    assert settlements(bench) == [Release()]
    assert bench.receiver.closed == 1


def test_a_settlement_that_is_under_way_at_the_cancellation_takes_effect(bench: Bench) -> None:
    slow = Slow(bench, "settle")

    async def main() -> None:
        async def body() -> None:
            async with held(bench) as lease:
                await lease.complete()

        working = asyncio.create_task(body())
        await reached(slow)
        working.cancel()
        await asyncio.sleep(0.01)
        slow.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await working

    asyncio.run(main())
    assert settlements(bench) == [Complete()], "it is not abandoned as well"


@pytest.mark.parametrize("answer", [BrokerUnavailable("away"), OSError("no route")])
def test_an_error_while_leaving_hides_neither_error_nor_cancellation(
    bench: Bench, answer: Exception
) -> None:
    async def main(error: BaseException) -> None:
        bench.receiver.answers.append(answer)
        async with held(bench):
            raise error

    for error in (ValueError("the body's own"), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            asyncio.run(main(error))
    assert bench.receiver.closed == 2


def test_an_error_of_the_broker_comes_out_of_the_waiting_coroutine(bench: Bench) -> None:
    def fail(*_: object) -> None:
        raise BrokerUnavailable("away")

    bench.receiver.receive = fail  # type: ignore[assignment]

    async def main() -> None:
        async with held(bench):
            raise AssertionError("nothing was received")

    with pytest.raises(BrokerUnavailable, match="away"):
        asyncio.run(main())
    assert bench.receiver.closed == 1


def test_leases_that_wait_take_no_thread_from_others(bench: Bench) -> None:
    """With the loop's own executor, a few waiting coroutines would hold up every settlement."""
    slow = Slow(bench, "receive")
    other = Bench()

    async def main() -> None:
        waiting = [asyncio.create_task(held(bench).__aenter__()) for _ in range(40)]
        await reached(slow)
        async with held(other) as lease:
            await asyncio.wait_for(lease.complete(), SOON)
        slow.go_on.set()
        for lease in await asyncio.gather(*waiting):
            await lease.__aexit__(None, None, None)

    asyncio.run(main())
    assert settlements(other) == [Complete()]
    assert len(settlements(bench)) == 40


def test_no_thread_is_left(bench: Bench) -> None:
    async def main() -> None:
        async with held(bench) as lease:
            await lease.complete()

    asyncio.run(main())
    for thread in threading.enumerate():
        if "areceive" in thread.name:
            thread.join(SOON)
    assert threads() == []


def test_outside_of_its_block_it_holds_nothing(bench: Bench) -> None:
    lease = held(bench)
    for use in (lambda: lease.delivery, lambda: lease.body, lambda: lease.lost, lease.ensure):
        with pytest.raises(RuntimeError, match="async with"):
            use()
