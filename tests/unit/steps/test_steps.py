"""Steps of a task: recorded once, replayed, refused where no later run could repeat them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aztask import App, Context, EncodeError, RetryPolicy, StepError, StepFailed, TaskFailed
from aztask.operate.deadletters.actions import replay
from aztask.operate.deadletters.letters import Selection
from aztask.steps import recorded
from aztask.steps.keepers import MemorySteps
from aztask.support.clock import SYSTEM_CLOCK

Calls = list[str]


class CardError(Exception):
    """A card was refused. `code`: why."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


@pytest.fixture
def app() -> App:
    return App("shop", broker="servicebus://nowhere.invalid", retry=RetryPolicy(3, delay=1.0))


@pytest.fixture
def calls() -> Calls:
    return []


def noting(calls: Calls, name: str, value: Any = None, error: Exception | None = None) -> Any:
    """A function that notes its call, and returns or raises this."""

    def function(*args: Any) -> Any:
        calls.append(name)
        if error is not None:
            raise error
        return value if value is not None else list(args)

    return function


def failing(times: int, error: Callable[[], BaseException] = lambda: OSError("down")) -> Any:
    """A function that raises so many times, and then returns "up"."""
    left = [times]

    def function() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise error()
        return "up"

    return function


def test_a_recorded_step_is_not_run_again_when_the_task_is_retried(app: App, calls: Calls) -> None:
    fail = failing(1)

    @app.task_with_context
    def order(context: Context, card: str) -> Any:
        charge = context.step("charge", noting(calls, "charge", {"id": 7}), card)
        fail()
        return charge, context.step("ship", noting(calls, "ship"), charge["id"])

    with app.inline():
        assert order.delay("visa").get() == [{"id": 7}, [7]]
    assert calls == ["charge", "ship"]


def test_a_coroutine_takes_steps_of_both_kinds(app: App, calls: Calls) -> None:
    fail = failing(1)

    async def charge(card: str) -> tuple[str, int]:
        calls.append("charge")
        await asyncio.sleep(0)
        return card, 1

    @app.task_with_context
    async def order(context: Context) -> Any:
        found = await context.step("charge", charge, "visa")
        context.step("note", noting(calls, "note", 1))
        fail()
        return found

    with app.inline():
        assert order.delay().get() == ["visa", 1]
    assert calls == ["charge", "note"]


def test_a_value_is_in_the_first_run_what_it_is_in_the_later_ones(app: App) -> None:
    fail, seen = failing(1), []

    @app.task_with_context
    def order(context: Context) -> None:
        seen.append(context.step("pair", lambda: (1, 2)))
        fail()

    with app.inline():
        order.delay().get()
    assert seen == [[1, 2], [1, 2]]


def test_the_step_key_is_the_same_in_every_run_of_a_step_and_of_no_other(app: App) -> None:
    fail, keys = failing(2), []

    def pay(context: Context, index: int) -> None:
        keys.append((index, context.step_key))
        if index == 1:
            fail()

    @app.task_with_context
    def order(context: Context) -> None:
        assert context.step_key is None
        for index in range(2):
            context.step("pay", pay, context, index)

    with app.inline():
        order.delay().get()
        first = dict(keys)
        assert keys == [(0, first[0]), (1, first[1]), (1, first[1]), (1, first[1])]
        assert len(set(first.values())) == 2
        keys.clear()
        order.delay().get()
        assert set(dict(keys).values()).isdisjoint(first.values())


def test_an_error_after_which_the_function_went_on_is_raised_again(app: App, calls: Calls) -> None:
    """Else the rerun would ship what the first run refunded."""
    ship, fail = failing(1, lambda: CardError(402, "empty")), failing(1)

    @app.task_with_context
    def order(context: Context) -> Any:
        try:
            context.step("ship", ship)
        except CardError as error:
            context.step("refund", noting(calls, "refund"))
            fail()
            return error.code, str(error)
        return "shipped"

    with app.inline():
        assert order.delay().get() == [402, str(CardError(402, "empty"))]
    assert calls == ["refund"]


def test_an_error_is_recorded_before_the_return(app: App) -> None:
    """A replay after a failure to write the result goes the same way."""
    ship, seen = failing(1), []

    @app.task_with_context
    def order(context: Context) -> Any:
        try:
            seen.append(context.step("ship", ship))
        except OSError as error:
            seen.append(str(error))
        return object() if len(seen) == 1 else "ended"

    with app.inline() as inline:
        result = order.delay()
        assert result.failed()
        (letter,) = inline.dead_letters()
        assert letter.reason == "unserialisable-result"
        replay(app, ["default"], Selection(everything=True)).act()
        inline.run()
        assert result.get() == "ended"
    assert seen == ["down", "down"]  # the second one is the record


def test_an_error_that_ends_the_run_leaves_its_step_open(app: App) -> None:
    @app.task_with_context
    def order(context: Context) -> Any:
        return context.step("ship", failed)

    failed = failing(2)
    with app.inline():
        assert order.delay().get() == "up"


def test_record_errors_records_that_one_too(app: App, calls: Calls) -> None:
    @app.task_with_context
    def order(context: Context) -> None:
        fault = noting(calls, "ship", error=OSError("down"))
        context.step("ship", fault, record_errors=True)

    with app.inline(), pytest.raises(TaskFailed, match="OSError: down"):
        order.delay().get()
    assert calls == ["ship"]


def test_a_step_with_a_retry_policy_waits_in_the_queue(app: App) -> None:
    fault, runs, keys = failing(2), [], []

    def ship(context: Context) -> Any:
        keys.append(context.step_key)
        return fault()

    @app.task_with_context(retry=RetryPolicy(0))
    def order(context: Context) -> Any:
        runs.append(context.resubmit_count)
        policy = RetryPolicy(5, delay=60, backoff=1, jitter=False)
        return context.step("ship", ship, context, retry=policy)

    with app.inline() as inline:
        result = order.delay()
        assert result.state == "snoozed"
        inline.advance(59)
        assert runs == [0]
        inline.advance(62)
        assert result.get() == "up"
    assert runs == [0, 0, 0]
    assert len(set(keys)) == 1


def test_the_error_of_a_step_whose_retries_are_used_up_is_raised(app: App) -> None:
    @app.task_with_context(retry=RetryPolicy(0))
    def order(context: Context) -> str:
        try:
            context.step("ship", failing(9), retry=RetryPolicy(2, delay=1))
        except OSError:
            return "refunded"
        return ""

    with app.inline() as inline:
        result = order.delay()
        inline.advance(10)
        assert result.get() == "refunded"


def test_steps_that_were_begun_by_other_code_wait_for_it(app: App) -> None:
    names, changed = ["a", "b"], ["c", "b", "a"]

    @app.task_with_context(retry=RetryPolicy(1, delay=10, jitter=False))
    def order(context: Context) -> Any:
        found = [context.step(name, str, name) for name in names]
        if changed:
            names[:] = changed  # a deploy
            changed.clear()
            raise OSError
        return found

    with app.inline() as inline:
        result = order.delay()
        inline.advance(100)
        assert result.state == "snoozed"
        names[:] = ["a", "b", "c"]  # the former code, and one step more
        inline.advance(31)
        assert result.get() == ["a", "b", "c"]


def test_they_end_as_a_dead_letter(app: App) -> None:
    names = ["a", "b"]

    @app.task_with_context(retry=RetryPolicy(1, delay=10, jitter=False))
    def order(context: Context) -> Any:
        for name in names:
            context.step(name, str, name)
        names[:] = ["d", "a", "b"]
        raise OSError

    with app.inline() as inline:
        result = order.delay()
        inline.advance(280)
        assert result.state == "snoozed"
        inline.advance(60)
        with pytest.raises(TaskFailed, match="runs step d where step a was recorded"):
            result.get()
        (letter,) = inline.dead_letters()
        assert letter.reason == "step-order"


def test_recorded_steps_may_be_asked_for_in_any_order(app: App) -> None:
    names, fail = ["a", "b"], failing(1)

    @app.task_with_context
    def order(context: Context) -> Any:
        found = [context.step(name, str, name) for name in names]
        names.reverse()
        fail()
        return found

    with app.inline():
        assert order.delay().get() == ["b", "a"]


@pytest.mark.parametrize("began_before", [True, False])
def test_a_patched_flow_takes_the_new_way_only_if_it_began_with_it(
    app: App, began_before: bool
) -> None:
    fail, new = failing(2), [not began_before]

    @app.task_with_context(retry=RetryPolicy(5, delay=1))
    def order(context: Context) -> Any:
        way = []
        if new[0] and context.patched("tax"):
            way.append(context.step("tax", str, "tax"))
        way.append(context.step("ship", str, "ship"))
        new[0] = True
        fail()
        return way

    with app.inline():
        assert order.delay().get() == (["ship"] if began_before else ["tax", "ship"])


def test_branches_have_steps_of_their_own(app: App, calls: Calls) -> None:
    fail, both = failing(1), threading.Barrier(2)

    @app.task_with_context
    def order(context: Context) -> Any:
        def branch(name: str) -> Any:
            if not calls:
                both.wait(10)  # they run side by side
            one = context.step("one", noting(calls, f"{name}1", name))
            return [one, context.step("two", noting(calls, f"{name}2", name))]

        found = context.gather(lambda: branch("a"), lambda: branch("b"))
        context.step("end", noting(calls, "end", 1))
        fail()
        return found

    with app.inline():
        assert order.delay().get() == [["a", "a"], ["b", "b"]]
    assert sorted(calls) == ["a1", "a2", "b1", "b2", "end"]


def test_coroutines_have_branches_too(app: App, calls: Calls) -> None:
    fail = failing(1)

    async def work(name: str) -> str:
        await asyncio.sleep(0.001)
        calls.append(name)
        return name

    @app.task_with_context
    async def order(context: Context) -> Any:
        async def branch(name: str) -> list[str]:
            return [await context.step("work", work, f"{name}{n}") for n in range(3)]

        found = await context.gather(branch("a"), branch("b"))
        fail()
        return found

    with app.inline():
        assert order.delay().get() == [["a0", "a1", "a2"], ["b0", "b1", "b2"]]
    assert len(calls) == 6


def test_a_branch_ends_even_if_another_one_fails(app: App, calls: Calls) -> None:
    fault = failing(1)

    @app.task_with_context
    def order(context: Context) -> Any:
        return context.gather(
            lambda: context.step("a", fault),
            lambda: context.step("b", noting(calls, "b", 2)),
        )

    with app.inline():
        assert order.delay().get() == ["up", 2]
    assert calls == ["b"]


def test_steps_in_a_plain_gather_need_keys(app: App) -> None:
    async def work(name: str) -> str:
        await asyncio.sleep(0)
        return name

    @app.task_with_context
    async def order(context: Context, keyed: bool) -> Any:
        steps = [
            context.step("work", work, name, key=name if keyed else None) for name in ("a", "b")
        ]
        return await asyncio.gather(*steps)

    with app.inline() as inline:
        assert order.delay(True).get() == ["a", "b"]
        with pytest.raises(TaskFailed, match=r"StepError.*context\.gather, or give it a key="):
            order.delay(False).get()
        assert [letter.reason for letter in inline.dead_letters()] == ["not-retryable"]


def test_a_step_inside_a_step_is_refused_even_if_the_task_catches_that(app: App) -> None:
    @app.task_with_context
    def order(context: Context) -> str:
        with contextlib.suppress(StepError):
            context.step("outer", lambda: context.step("inner", str))
        return "went on"

    with app.inline(), pytest.raises(TaskFailed, match="inside step 'outer'"):
        order.delay().get()


def test_a_function_that_returns_a_coroutine_is_refused(app: App) -> None:
    async def ship() -> None: ...

    @app.task_with_context
    def order(context: Context) -> Any:
        def start() -> Any:
            return ship()

        return context.step("ship", start)

    with app.inline(), pytest.raises(TaskFailed, match="pass its async def itself"):
        order.delay().get()


def test_a_value_that_cannot_be_written_fails_that_task_alone(app: App) -> None:
    @app.task_with_context
    def order(context: Context, value: Any) -> Any:
        return context.step("ship", lambda: value or object())

    with app.inline():
        with pytest.raises(TaskFailed, match="the value of step ship"):
            order.delay(None).get()
        assert order.delay(1).get() == 1


def test_a_task_has_at_most_so_many_steps() -> None:
    app = App("shop", broker="servicebus://nowhere.invalid", max_steps=3)

    @app.task_with_context
    def order(context: Context, count: int) -> int:
        return len([context.step("one", str) for _ in range(count)])

    with app.inline():
        assert order.delay(3).get() == 3
        with pytest.raises(TaskFailed, match="3 recorded steps already"):
            order.delay(4).get()


def test_steps_need_a_delivery_that_comes_again(app: App) -> None:
    @app.task_with_context(delivery="at-most-once")
    def order(context: Context) -> Any:
        return context.step("ship", str)

    with app.inline(), pytest.raises(TaskFailed, match="delivered at most once"):
        order.delay().get()


def test_a_context_without_a_worker_keeps_steps_in_memory() -> None:
    context = Context.for_testing()
    assert context.step("pair", lambda: (1, 2)) == [1, 2]
    with pytest.raises(EncodeError):
        context.step("bad", object)
    with pytest.raises(OSError):
        context.step("fault", failing(1))
    assert asyncio.run(_async_step(Context.for_testing())) == 3


async def _async_step(context: Context) -> int:
    async def three() -> int:
        return 3

    return await context.step("three", three)


@pytest.mark.parametrize("name", ["", 7, "x" * 201])
def test_a_name_is_a_text(name: Any) -> None:
    with pytest.raises(StepError, match="a step's name is a text"):
        Context.for_testing().step(name, str)


@pytest.mark.parametrize("function", [7, None, "charge"])
def test_a_step_takes_a_function_and_not_its_value(function: Any) -> None:
    with pytest.raises(StepError, match="step 'charge' takes a function and its arguments"):
        Context.for_testing().step("charge", function)


def test_a_coroutine_instead_of_its_function_is_closed_and_refused() -> None:
    async def charge() -> None: ...

    with pytest.raises(StepError, match="step 'charge' takes a function and its arguments"):
        Context.for_testing().step("charge", charge())  # type: ignore[arg-type]


def test_retry_takes_a_policy() -> None:
    with pytest.raises(StepError, match="retry takes a RetryPolicy, not 5"):
        Context.for_testing().step("charge", str, retry=5)  # type: ignore[arg-type]


def test_an_error_keeps_its_class_and_what_can_be_written_of_it() -> None:
    keeper = MemorySteps(SYSTEM_CLOCK)

    def again(error: Exception) -> Exception:
        return recorded.error_from(keeper.decode(recorded.encoded_error(keeper, error)))

    found = again(CardError(402, "empty"))
    assert isinstance(found, CardError) and (found.code, found.args) == (402, (402, "empty"))
    odd = CardError(1, "x")
    odd.more = object()  # type: ignore[attr-defined]
    assert again(odd).args == (1, "x")
    assert isinstance(again(ValueError(object())), ValueError)
    local = type("Local", (Exception,), {"__module__": "nowhere"})
    gone = again(local("text"))
    assert isinstance(gone, StepFailed) and str(gone) == "Local: text"
    assert isinstance(recorded.error_from({"module": "os", "class": "system"}), StepFailed)
    assert isinstance(recorded.error_from(None), StepFailed)
