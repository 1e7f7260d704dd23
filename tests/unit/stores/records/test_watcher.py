"""Coroutines that wait for results: woken at the end, on shared threads."""

import asyncio
import threading
import time
from functools import partial

import pytest

from aztask import App, RetryPolicy, as_completed
from aztask.errors import BrokerUnavailable, ResultTimeout, TaskFailed
from aztask.stores.records.local.store import LocalResults
from aztask.stores.records.watcher import ResultWatcher


@pytest.fixture
def app():
    app = App("shop", broker="local://:memory:", retry=RetryPolicy(max_retries=0))

    @app.task
    def add(a, b):
        return a + b

    @app.task
    def fail():
        raise ValueError("no")

    return app


def wait_as_a_real_store(app):
    """The store of inline mode runs what is due instead of waiting."""
    app.results.wait_changed = partial(LocalResults.wait_changed, app.results)


def test_a_result_that_is_there_and_one_that_fails(app):
    async def main():
        add, fail = app.tasks["shop.add"], app.tasks["shop.fail"]
        assert await (await add.adelay(1, 2)).aget() == 3
        with pytest.raises(TaskFailed, match="no"):
            await (await fail.adelay()).aget(timeout=10)

    with app.inline():
        asyncio.run(main())


def test_many_wait_on_few_threads_and_are_woken_by_the_end(app):
    with app.inline(run=False) as inline:
        results = [app.tasks["shop.add"].delay(n, 0) for n in range(200)]
        wait_as_a_real_store(app)

        async def main():
            waiting = [asyncio.create_task(result.aget(timeout=30)) for result in results]
            await asyncio.sleep(0.2)
            threads = [each.name for each in threading.enumerate()]
            await asyncio.to_thread(inline.run)
            return threads, await asyncio.gather(*waiting)

        threads, values = asyncio.run(main())
    assert values == list(range(200))
    assert sum("aztask-results" in name for name in threads) == 1
    assert sum("aztask-awaiting" in name for name in threads) <= 4


def test_results_in_the_order_of_their_ends(app):
    add = app.tasks["shop.add"]
    with app.inline() as inline:
        late = add.with_options(delay=60).delay(1, 1)
        soon = add.delay(2, 2)
        wait_as_a_real_store(app)

        async def main():
            ended = []
            async for result in as_completed([late, soon]):
                ended.append(await result.aget())
                inline.advance(60.0)
            return ended

        assert asyncio.run(main()) == [4, 2]


def test_time_runs_out(app):
    with app.inline(run=False):
        result = app.tasks["shop.add"].delay(1, 1)
        wait_as_a_real_store(app)

        async def main():
            before = time.monotonic()
            with pytest.raises(ResultTimeout, match=r"did not end within 0\.1 s"):
                await result.aget(timeout=0.1)
            with pytest.raises(ResultTimeout, match="did not end within 0 s"):
                await result.aget(timeout=0)
            with pytest.raises(ResultTimeout, match=r"1 tasks did not end within 0\.1 s"):
                async for _ in as_completed([result], timeout=0.1):
                    pass
            return time.monotonic() - before

        assert asyncio.run(main()) < 10.0


def test_an_error_of_the_store_reaches_the_coroutines(app):
    with app.inline(run=False):
        result = app.tasks["shop.add"].delay(1, 1)

        def unreachable(task_id):
            raise BrokerUnavailable("the store is unreachable")

        app.results.get = unreachable
        with pytest.raises(BrokerUnavailable, match="the store is unreachable"):
            asyncio.run(result.aget(timeout=10))


def test_a_task_awaited_between_two_steps_of_the_thread_is_looked_at_before_it_waits(
    app, monkeypatch
):
    """In inline mode, its wait fails if nothing is left to run: the task had ended long ago."""
    add = app.tasks["shop.add"]
    with app.inline():
        first, second = add.delay(1, 1), add.delay(2, 2)
        look = ResultWatcher._look
        held, awaited = threading.Event(), threading.Event()

        def slow_look(self, task_ids):
            if not threading.current_thread().name.endswith("aztask-results"):
                assert held.wait(10)  # the shared threads come late
            look(self, task_ids)
            if task_ids == [first.id] and not awaited.is_set():
                loop.call_soon_threadsafe(waiting.append, second.aget(timeout=10))
                assert awaited.wait(10)

        async def await_second():
            while not waiting:
                await asyncio.sleep(0.01)
            task = asyncio.ensure_future(waiting.pop())
            await asyncio.sleep(0.05)
            awaited.set()
            try:
                return await task
            finally:
                held.set()

        async def main():
            nonlocal loop
            loop = asyncio.get_running_loop()
            return await asyncio.gather(first.aget(timeout=10), await_second())

        loop, waiting = None, []
        monkeypatch.setattr(ResultWatcher, "_look", slow_look)
        assert asyncio.run(main()) == [2, 4]
