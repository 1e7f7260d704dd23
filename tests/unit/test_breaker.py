"""The value that says when failures pause a task."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from aztask import App, CircuitBreaker
from aztask.errors import ConfigurationError


def test_the_defaults() -> None:
    breaker = CircuitBreaker()
    assert (breaker.share, breaker.window, breaker.minimum) == (0.5, 60.0, 10)
    assert (breaker.pause, breaker.longest) == (30.0, 600.0)


def test_the_pause_doubles_up_to_the_longest() -> None:
    breaker = CircuitBreaker(pause=timedelta(seconds=10), longest=60)
    assert [breaker.pause_after(n) for n in (0, 1, 2, 3, 5000)] == [10.0, 20.0, 40.0, 60.0, 60.0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"share": 0}, "share is above 0 and at most 1"),
        ({"share": 1.1}, "share is above 0 and at most 1"),
        ({"share": True}, "share is above 0 and at most 1"),
        ({"share": "50%"}, "share is above 0 and at most 1"),
        ({"window": 0.5}, "window"),
        ({"window": float("nan")}, "window"),
        ({"minimum": 0}, "minimum takes a whole number"),
        ({"minimum": 2.0}, "minimum takes a whole number"),
        ({"pause": "10s"}, "pause"),
        ({"pause": 60, "longest": 30}, "must not be shorter than its pause"),
    ],
)
def test_a_wrong_value_says_what_is_allowed(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        CircuitBreaker(**options)


def test_a_task_takes_one_and_nothing_else() -> None:
    app = App("shop", broker="local://:memory:")
    assert app.task(len).breaker is None
    assert app.task(name="a", breaker=None)(len).breaker is None
    task = app.task(name="b", breaker=CircuitBreaker(share=0.2))(len)
    assert task.breaker == CircuitBreaker(share=0.2)
    with pytest.raises(ConfigurationError, match=r"breaker takes a CircuitBreaker, .* not 0.5"):
        app.task(name="c", breaker=0.5)(len)  # type: ignore[call-overload]
