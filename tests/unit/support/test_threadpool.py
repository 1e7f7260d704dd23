"""A thread pool carries out calls side by side."""

import threading

import pytest

from aztask.support.threadpool import ThreadPool


@pytest.fixture
def thread_pool():
    made = ThreadPool("test", 4)
    yield made
    made.close()


def test_answers_are_in_order(thread_pool):
    assert thread_pool.map(lambda n: n * n, list(range(50))) == [n * n for n in range(50)]


def test_nothing_is_nothing(thread_pool):
    assert thread_pool.map(str, []) == []


def test_one_call_runs_on_the_callers_thread(thread_pool):
    assert thread_pool.map(lambda _: threading.current_thread(), [1]) == [
        threading.current_thread()
    ]


def test_calls_run_side_by_side_up_to_the_limit(thread_pool):
    barrier = threading.Barrier(4)
    assert thread_pool.map(lambda n: barrier.wait(5) >= 0 and n, [1, 2, 3, 4]) == [1, 2, 3, 4]


def test_an_error_is_raised_where_it_is_waited_for(thread_pool):
    with pytest.raises(ZeroDivisionError):
        thread_pool.map(lambda n: 1 / n, [1, 0, 2])
    assert thread_pool.map(str, [1, 2]) == ["1", "2"]


def test_what_is_queued_is_still_done_after_closing(thread_pool):
    gate = threading.Event()
    futures = [thread_pool.submit(lambda: gate.wait(5)) for _ in range(6)]
    thread_pool.close()
    gate.set()
    assert all(future.result(5) for future in futures)
    with pytest.raises(RuntimeError, match="closed"):
        thread_pool.submit(int)
