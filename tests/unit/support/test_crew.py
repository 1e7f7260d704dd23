"""A crew carries out calls side by side."""

import threading

import pytest

from aztask.support.crew import Crew


@pytest.fixture
def crew():
    made = Crew("test", 4)
    yield made
    made.close()


def test_answers_are_in_order(crew):
    assert crew.map(lambda n: n * n, list(range(50))) == [n * n for n in range(50)]


def test_nothing_is_nothing(crew):
    assert crew.map(str, []) == []


def test_one_call_runs_on_the_callers_thread(crew):
    assert crew.map(lambda _: threading.current_thread(), [1]) == [threading.current_thread()]


def test_calls_run_side_by_side_up_to_the_limit(crew):
    barrier = threading.Barrier(4)
    assert crew.map(lambda n: barrier.wait(5) >= 0 and n, [1, 2, 3, 4]) == [1, 2, 3, 4]


def test_an_error_is_raised_where_it_is_waited_for(crew):
    with pytest.raises(ZeroDivisionError):
        crew.map(lambda n: 1 / n, [1, 0, 2])
    assert crew.map(str, [1, 2]) == ["1", "2"]


def test_what_is_queued_is_still_done_after_closing(crew):
    gate = threading.Event()
    futures = [crew.submit(lambda: gate.wait(5)) for _ in range(6)]
    crew.close()
    gate.set()
    assert all(future.result(5) for future in futures)
    with pytest.raises(RuntimeError, match="closed"):
        crew.submit(int)
