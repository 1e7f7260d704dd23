"""What steps start, what begins a new history, and how long steps are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aztask import App, ConfigurationError, Context, Reject, RetryPolicy, chain
from aztask.operate.deadletters import DeadLetters, Selection
from aztask.operate.deadletters.actions import replay
from aztask.operate.steps import reset, steps
from aztask.steps.home import StepHome
from aztask.steps.keeping import StepPurge


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(
        "shop",
        broker="servicebus://nowhere.invalid",
        retry=RetryPolicy(3, delay=1.0),
        payloads=str(tmp_path),
    )


def test_a_declared_step_is_one_wherever_a_task_calls_it(app: App) -> None:
    calls, errors = [], [OSError()]

    @app.step
    def charge(card: str, *, amount: int = 1) -> str:
        """Charge a card."""
        calls.append("charge")
        return f"{card} {amount}"

    @app.step(name="sending", record_errors=True)
    async def ship(parcel: str) -> str:
        calls.append("ship")
        return charge(parcel)  # inside a step, it is a call

    @app.task
    async def order(card: str) -> Any:
        found = charge(card, amount=2), await ship("book")
        if errors:
            raise errors.pop()
        return found

    with app.inline():
        result = order.delay("visa")
        assert result.get() == ["visa 2", "book 1"]
        assert [each.record.label for each in steps(app, result.id)] == ["charge", "sending"]
    assert calls == ["charge", "ship", "charge"]
    assert charge("visa") == "visa 1" and charge.__doc__ == "Charge a card."


@pytest.mark.parametrize("graph", [False, True])
def test_what_a_step_starts_is_started_once(app: App, graph: bool) -> None:
    errors = [OSError(), OSError()]

    @app.task
    def mail(text: str) -> str:
        return text

    def start(context: Context) -> list[str]:
        ids = [chain(mail.s("a"), mail.si("b")).delay().id if graph else mail.delay("a").id]
        ids += [each.id for each in mail.map([("c",), ("d",)])]
        if errors:
            raise errors.pop()
        return ids

    @app.task_with_context
    def order(context: Context) -> Any:
        return context.step("start", start, context)

    with app.inline() as inline:
        ids = order.delay().get()
        assert len(set(ids)) == 3
        ran = {sent.id for sent in inline.sent if sent.task == "shop.mail"}
        assert len(ran) == (4 if graph else 3)


def test_a_forced_send_begins_a_new_history(app: App) -> None:
    keys = []

    @app.task_with_context
    def order(context: Context) -> Any:
        return context.step("charge", lambda: keys.append(context.step_key) or len(keys))

    with app.inline():
        assert order.with_options(task_id="a").delay().get() == 1
        assert order.with_options(task_id="a", force=True).delay().get() == 2
        assert {each.history for each in steps(app, "a")} == {"0", "1"}
    assert len(set(keys)) == 2


def dead_once(app: App) -> tuple[Any, list[str]]:
    """A task that is rejected after its two steps in its first run, and what its steps did."""
    calls: list[str] = []

    @app.task_with_context
    def order(context: Context) -> Any:
        found = [context.step(name, lambda name=name: calls.append(name) or name) for name in "ab"]
        if len(calls) == 2 and context.message.generation == 0:
            raise Reject("no stock")
        return found

    return order, calls


@pytest.mark.parametrize(("fresh", "ran"), [(False, "ab"), (True, "abab")])
def test_a_replay_goes_on_after_the_steps_and_a_fresh_one_does_not(
    app: App, fresh: bool, ran: str
) -> None:
    order, calls = dead_once(app)
    with app.inline() as inline:
        result = order.delay()
        action = replay(app, ["default"], Selection(everything=True), fresh=fresh)
        assert ("from the start: their recorded steps run again" in str(action)) is fresh
        action.act()
        inline.run()
        assert result.get() == ["a", "b"]
    assert "".join(calls) == ran


def test_after_a_reset_the_replay_runs_the_later_steps_again(app: App) -> None:
    order, calls = dead_once(app)
    with app.inline() as inline:
        result = order.delay()
        action = reset(app, result.id, "b")
        assert str(action) == f"forget 1 recorded step of task {result.id}, from b on"
        assert action.act() == 1
        DeadLetters(app, "default").replay(Selection(everything=True))
        inline.run()
        assert result.get() == ["a", "b"]
    assert calls == ["a", "b", "b"]


def test_a_reset_that_no_run_would_follow_is_refused(app: App) -> None:
    """The outcome of a task that succeeded is recorded: its steps are never asked for again."""

    @app.task_with_context
    def order(context: Context) -> Any:
        return context.step("a", str)

    with app.inline():
        result = order.delay()
        with pytest.raises(ConfigurationError, match=r"has ended \(succeeded\) and has no dead"):
            reset(app, result.id, "a")
        assert [each.record.label for each in steps(app, result.id)] == ["a"]


def purged(app: App) -> int:
    results = app.results
    assert results is not None
    results.purge(4e9)
    return StepPurge(StepHome(app).store(), results, app.broker, app.payloads).purge(4e9)


def test_steps_are_kept_as_long_as_the_run_and_its_dead_letter(app: App) -> None:
    @app.task_with_context
    def order(context: Context, ending: str) -> Any:
        context.step("long", lambda: "x" * 100_000)
        if ending == "dead":
            raise Reject("no stock")
        return context.step("b", str)

    def payloads() -> int:
        assert app.payloads is not None
        return len(list(app.payloads.store.list()))

    with app.inline():
        dead, well = order.delay("dead"), order.delay("well")
        results = app.results
        assert results is not None
        StepPurge(StepHome(app).store(), results, app.broker, app.payloads).purge(4e9)
        assert len(steps(app, well.id)) == 2, "its run is known"
        assert payloads() == 2
        assert purged(app) == 2
        assert payloads() == 1
        assert [each.record.label for each in steps(app, dead.id)] == ["long"]
        assert purged(app) == 0
        DeadLetters(app, "default").purge(Selection(everything=True))
        assert purged(app) == 1
        assert payloads() == 0
