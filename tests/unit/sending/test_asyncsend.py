"""Sends from coroutines: batched, on shared threads, each with its own outcome."""

import asyncio
import contextvars
import threading
import time

import pytest

from aztask import App
from aztask.errors import (
    BrokerUnavailable,
    EncodeError,
    MessageTooLarge,
    QueueNotFound,
    SendUnconfirmed,
)


class Slow:
    """Makes each publication take a moment, and notes its size, its queue and its thread."""

    def __init__(self, app, monkeypatch):
        self.sizes, self.threads, self.errors = [], set(), []
        inner = app.sends.sender.publish

        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()

        def publish(queue, messages, delay):
            self.entered.set()
            self.gate.wait(10.0)
            time.sleep(0.02)
            self.sizes.append(len(messages))
            self.threads.add(threading.current_thread().name)
            if self.errors:
                error = self.errors.pop(0)
                if error is not None:
                    raise error(messages) if callable(error) else error
            inner(queue, messages, delay)

        monkeypatch.setattr(app.sends.sender, "publish", publish)


@pytest.fixture
def app():
    app = App("shop", broker="local://:memory:", results="local://:memory:")
    app.task(name="shop.add")(lambda a, b=0: a + b)
    yield app
    app.close()


@pytest.fixture
def slow(app, monkeypatch):
    return Slow(app, monkeypatch)


def stored(app, queue="default"):
    return app.broker.stats(queue).active


def test_calls_under_way_at_the_same_time_share_batches_and_a_thread(app, slow):
    add = app.tasks["shop.add"]

    async def main():
        results = await asyncio.gather(*(add.adelay(number) for number in range(300)))
        return [result.id for result in results]

    ids = asyncio.run(main())
    assert len(set(ids)) == 300
    assert stored(app) == 300
    assert len(slow.sizes) < 10
    assert len(slow.threads) == 1
    peeked = app.broker.peek("default", limit=300)
    sent = [app.codec.from_envelope(each.envelope, "default").id for each in peeked]
    assert sent == ids, "in the order of the calls"


def test_delays_and_queues_are_kept_apart(app, slow):
    add = app.tasks["shop.add"]

    async def main():
        await asyncio.gather(
            *(add.with_options(delay=60).adelay(1) for _ in range(5)),
            *(add.adelay(1) for _ in range(5)),
            *(app.asend("shop.add", [1], queue="other") for _ in range(5)),
        )

    asyncio.run(main())
    assert (stored(app), app.broker.stats("default").scheduled, stored(app, "other")) == (5, 5, 5)


def test_many_invocations_of_one_call(app):
    async def main():
        add = app.tasks["shop.add"]
        results = await add.amap([(number,) for number in range(1201)])
        more = await add.with_options(queue="bulk").amap([(1,), (2,)])
        return len(results) + len(more)

    assert asyncio.run(main()) == 1203
    assert (stored(app), stored(app, "bulk")) == (1201, 2)


def test_a_refused_batch_is_sent_one_by_one(app, slow):
    add = app.tasks["shop.add"]

    async def main():
        slow.gate.clear()
        one_of_them = MessageTooLarge("one of them is too large")
        slow.errors = [None, one_of_them, None, one_of_them, None]
        first = asyncio.create_task(add.adelay(0))
        await asyncio.to_thread(slow.entered.wait, 10.0)
        others = [asyncio.create_task(add.adelay(number)) for number in (1, 2, 3)]
        await asyncio.sleep(0)
        slow.gate.set()
        await first
        return await asyncio.gather(*others, return_exceptions=True)

    answers = asyncio.run(main())
    assert [type(answer).__name__ for answer in answers] == [
        "AsyncResult", "MessageTooLarge", "AsyncResult",
    ]  # fmt: skip
    assert stored(app) == 3


@pytest.mark.parametrize("error", [BrokerUnavailable("no answer"), QueueNotFound("it is gone")])
def test_an_unavailable_broker_is_asked_once_for_all_calls_of_a_batch(app, slow, error):
    add = app.tasks["shop.add"]

    async def main():
        slow.gate.clear()
        slow.errors = [None, error]
        first = asyncio.create_task(add.adelay(0))
        await asyncio.to_thread(slow.entered.wait, 10.0)
        others = [asyncio.create_task(add.adelay(number)) for number in range(1, 40)]
        await asyncio.sleep(0)  # they wait while the first is under way, and then go together
        slow.gate.set()
        await first
        return await asyncio.gather(*others, return_exceptions=True)

    assert asyncio.run(main()) == [error] * 39
    assert slow.sizes == [1, 39]


def test_only_the_unconfirmed_calls_of_a_batch_fail(app, slow):
    add = app.tasks["shop.add"]
    heard = []
    app.on_event(heard.append)

    def half(messages):
        envelopes = [app.codec.to_envelope(message) for message in messages]
        return SendUnconfirmed("no answer", envelopes[1:])

    async def main():
        slow.gate.clear()
        slow.errors = [None, half]
        first = asyncio.create_task(add.adelay(0))
        await asyncio.to_thread(slow.entered.wait, 10.0)
        others = [asyncio.create_task(add.adelay(number)) for number in (1, 2, 3)]
        await asyncio.sleep(0)  # they wait while the first is under way, and then go together
        slow.gate.set()
        await first
        return await asyncio.gather(*others, return_exceptions=True)

    answers = asyncio.run(main())
    assert [type(answer).__name__ for answer in answers] == [
        "AsyncResult", "SendUnconfirmed", "SendUnconfirmed",
    ]  # fmt: skip
    assert [len(error.unconfirmed) for error in answers[1:]] == [1, 1]


def test_errors_before_the_send_reach_their_caller_alone(app):
    add = app.tasks["shop.add"]

    async def main():
        return await asyncio.gather(add.adelay(object()), add.adelay(1), return_exceptions=True)

    refused, sent = asyncio.run(main())
    assert isinstance(refused, EncodeError)
    assert sent.id
    with pytest.raises(TypeError):
        asyncio.run(add.adelay(1, 2, 3, 4))


def test_hooks_run_with_the_variables_of_the_caller(app):
    tenant = contextvars.ContextVar("tenant", default="none")

    @app.around_send
    def send_tenant(sending):
        sending.headers["tenant"] = tenant.get()
        yield

    async def one(name):
        tenant.set(name)
        await app.tasks["shop.add"].adelay(1)

    async def main():
        await asyncio.gather(one("acme"), one("umbrella"))

    asyncio.run(main())
    peeked = app.broker.peek("default", limit=9)
    sent = [app.codec.from_envelope(each.envelope, "default").extra["tenant"] for each in peeked]
    assert sorted(sent) == ["acme", "umbrella"]


def test_a_cancelled_caller_harms_no_other(app, slow):
    add = app.tasks["shop.add"]

    async def main():
        calls = [asyncio.create_task(add.adelay(number)) for number in range(3)]
        await asyncio.sleep(0)
        calls[0].cancel()
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = asyncio.run(main())
    assert isinstance(answers[0], asyncio.CancelledError)
    assert all(answer.id for answer in answers[1:])


def test_an_unexpected_error_reaches_its_calls_and_the_queue_goes_on(app, monkeypatch):
    add = app.tasks["shop.add"]
    sender = app.sends.async_sender
    with monkeypatch.context() as patch:
        patch.setattr(sender, "_publish", lambda calls: {}["bug"])
        with pytest.raises(KeyError, match="bug"):
            asyncio.run(add.adelay(1))
    assert asyncio.run(add.adelay(2)).id
    assert stored(app) == 1


def test_several_loops_may_send(app):
    for _ in range(3):
        asyncio.run(app.asend("shop.add", [1]))
    assert stored(app) == 3
    app.close()
    asyncio.run(app.asend("shop.add", [1]))
