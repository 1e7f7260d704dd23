"""What tasks emit and readers get, in inline mode and with the parts of a worker."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from aztask import App, Context, RetryPolicy, TaskFailed
from aztask.errors import (
    BrokerUnavailable,
    EncodeError,
    ResultTimeout,
    StepError,
    WorkerStopping,
)
from aztask.message.message import TaskMessage
from aztask.steps import emitting
from aztask.steps.emitting import Emission
from aztask.steps.parts import PartStore, parts_of
from aztask.steps.stream import Listener, stream_of
from aztask.steps.suspension import Parked, Renewal, StepsUnavailable
from aztask.stores.rows import Change

MESSAGE = TaskMessage("t", "shop.ask", "default", b"")


@pytest.fixture
def app() -> Iterator[App]:
    made = App(
        "shop",
        broker="local://:memory:",
        results="local://:memory:",
        retry=RetryPolicy(max_retries=2, delay=0.0, jitter=False),
    )
    yield made
    made.close()


class Lease:
    lost = False


def emission(app: App, message: TaskMessage = MESSAGE, delivery: int = 1) -> Emission:
    return Emission(app, message, delivery, Lease())


def store_of(app: App) -> PartStore:
    store = parts_of(app.results, app.codec)
    assert store is not None
    return store


def listener(app: App, after: int | str = 0) -> Listener:
    return Listener(stream_of(app.results, store_of(app), "t"), after, app.codec)


def seen(each: Listener) -> list[Any]:
    """What is new to a listener after one look: values, or "reset"."""
    each.stream._asked_at = float("-inf")
    each.stream.look()
    each.stream._look_for_end = False
    return ["reset" if part.reset else part.value for part in each.new()]


# -- in inline mode --------------------------------------------------------------------------


def test_parts_come_in_order_and_the_value_is_what_the_task_returns(app: App) -> None:
    @app.task_with_context
    def ask(context: Context, count: int) -> int:
        for number in range(count):
            context.emit({"word": number})
        return count

    with app.inline():
        result = ask.delay(5)
        parts = list(result.stream(timeout=10))
        assert [part.value for part in parts] == [{"word": number} for number in range(5)]
        assert [part.number for part in parts] == [1, 2, 3, 4, 5]
        assert not any(part.reset for part in parts)
        assert result.get() == 5
        assert [part.number for part in result.stream(after=3)] == [4, 5]
        assert [part.number for part in result.stream(after=parts[3].id)] == [5]
        assert list(result.stream(after=99)) == []


def test_a_generator_emits_what_it_yields(app: App) -> None:
    @app.task
    def words(text: str) -> Iterator[str]:
        yield from text.split()
        return "done"

    @app.task
    async def awords(text: str) -> AsyncIterator[str]:
        for word in text.split():
            yield word

    with app.inline():
        first = words.delay("one two three")
        assert [part.value for part in first.stream()] == ["one", "two", "three"]
        assert first.get() == "done"
        second = awords.delay("one two")
        assert [part.value for part in second.stream()] == ["one", "two"]
        assert second.get() is None
    assert list(words("called directly")) == ["called", "directly"]


def test_coroutines_emit_and_listen(app: App) -> None:
    @app.task_with_context
    async def ask(context: Context) -> None:
        await context.aemit(1)
        context.emit(2)

    async def listen(result: Any) -> list[int]:
        return [part.value async for part in result.astream(timeout=10)]

    with app.inline():
        result = ask.delay()

        async def several() -> list[list[int]]:
            return await asyncio.gather(*(listen(result) for _ in range(20)))

        assert asyncio.run(several()) == [[1, 2]] * 20


def test_a_retry_is_a_reset_and_a_failure_is_raised_at_the_end(app: App) -> None:
    runs: list[int] = []

    @app.task_with_context
    def ask(context: Context, good: bool) -> None:
        runs.append(1)
        context.emit(f"run {len(runs)}")
        if not good or len(runs) < 2:
            raise OSError("the model is away")

    with app.inline():
        result = ask.delay(True)
        assert [part.value for part in result.stream()] == ["run 2"]
        (part,) = result.stream()
        earlier = "000000000000.1"
        assert [each.reset for each in result.stream(after=earlier)] == [True, False]
        failed = ask.delay(False)
        with pytest.raises(TaskFailed, match="the model is away"):
            for part in failed.stream():
                assert part.value.startswith("run")


def test_after_a_sleep_the_parts_before_it_are_not_emitted_again(app: App) -> None:
    runs: list[int] = []

    @app.task_with_context
    def ask(context: Context) -> None:
        runs.append(1)
        context.emit("one")
        context.emit("two")
        context.sleep(1.0)
        context.emit("three")

    with app.inline() as inline:
        result = ask.delay()
        before = []
        with pytest.raises(ResultTimeout, match="nothing is due"):
            for part in result.stream():
                before.append(part.value)
        assert before == ["one", "two"]
        inline.advance(2.0)
        assert [part.value for part in result.stream(timeout=30)] == ["one", "two", "three"]
        assert len(runs) == 2
        first, _, third = result.stream()
        assert first.id.split(".")[0] != third.id.split(".")[0], "in a take of its own"
        assert [part.number for part in result.stream(after=first.id)] == [2, 3]


def test_a_task_that_emits_nothing_ends_its_stream(app: App) -> None:
    @app.task
    def quiet() -> None: ...

    with app.inline():
        assert list(quiet.delay().stream(timeout=10)) == []
    with pytest.raises(ResultTimeout):
        list(quiet.delay().stream(timeout=0.3))
    with pytest.raises(ValueError, match="after takes"):
        list(quiet.delay().stream(after="x"))
    with pytest.raises(ValueError, match="after takes"):
        list(quiet.delay().stream(after=-1))


def test_what_is_forgotten_has_no_stream(app: App) -> None:
    @app.task_with_context
    def ask(context: Context) -> None:
        context.emit(1)

    with app.inline():
        result = ask.delay()
        assert len(list(result.stream())) == 1
        assert result.forget()
        assert store_of(app).read(result.id).takes == []


def test_a_failed_retry_after_a_sleep_is_a_reset(app: App) -> None:
    runs: list[int] = []

    @app.task_with_context
    def ask(context: Context) -> None:
        context.emit("one")
        context.sleep(1.0)
        runs.append(1)
        context.emit(f"run {len(runs)}")
        if len(runs) < 2:
            raise OSError("the model is away")

    with app.inline() as inline:
        result = ask.delay()
        inline.advance(2.0)
        inline.advance(2.0)
        assert [part.value for part in result.stream(timeout=30)] == ["one", "run 2"]
        first, _ = store_of(app).read(result.id).takes[:2]
        assert store_of(app).read(result.id).takes[-1].base == first.name


@pytest.mark.parametrize("emits", [False, True])
def test_what_a_task_emits_after_it_continued_is_a_stream_of_its_own(app: App, emits: bool) -> None:
    """A history that waited before its first part took that for one of the history before."""

    @app.task_with_context
    def ask(context: Context, left: int = 1) -> None:
        if left:
            context.emit("one")
            context.emit("two")
        context.sleep(1.0)
        if left:
            context.continue_with(left - 1)
        if emits:
            context.emit("other")

    with app.inline() as inline:
        result = ask.delay()
        for _ in range(3):
            inline.advance(2.0)
        assert result.get() is None
        read = ["reset" if part.reset else part.value for part in result.stream()]
        assert read == (["other"] if emits else ["one", "two", "reset"])


@pytest.mark.parametrize("waits", [False, True])
def test_a_retry_that_emits_nothing_leaves_no_part_of_the_failed_attempt(
    app: App, waits: bool
) -> None:
    runs: list[int] = []

    @app.task_with_context
    def ask(context: Context) -> None:
        if waits:
            context.emit("one")
            context.sleep(1.0)
        runs.append(1)
        if len(runs) < 2:
            context.emit("half")
            raise OSError("the model is away")

    kept = ["one"] if waits else []
    with app.inline() as inline:
        result = ask.delay()
        for _ in range(3):
            inline.advance(2.0)
        assert result.get() is None
        read = ["reset" if part.reset else part.value for part in result.stream()]
        assert read == [*kept, "half", "reset", *kept], "the end tells that the half was dropped"
        failed = store_of(app).read(result.id).takes[-1]
        resumed = result.stream(after=f"{failed.token}.{len(kept) + 1}")
        assert [part.reset or part.value for part in resumed] == [True, *kept]


@pytest.mark.parametrize("swallows", [False, True])
def test_a_step_emits_nothing(app: App, swallows: bool) -> None:
    """A run that goes on takes its value from the record, and would not emit again."""

    @app.task_with_context
    def ask(context: Context) -> None:
        def model() -> None:
            try:
                context.emit("word")
            except StepError:
                if not swallows:
                    raise

        context.step("ask", model)

    @app.task_with_context
    async def aask(context: Context) -> None:
        async def model() -> None:
            try:
                await context.aemit("word")
            except StepError:
                if not swallows:
                    raise

        await context.step("ask", model)

    with app.inline():
        for task in (ask, aask):
            result = task.delay()
            with pytest.raises(TaskFailed, match="emit is called inside step 'ask"):
                result.get()
            assert store_of(app).read(result.id).takes == []


def test_in_a_direct_call_the_parts_are_in_the_context() -> None:
    context = Context.for_testing()
    context.emit(1)
    asyncio.run(context.aemit(2))
    assert context.emission.values == [1, 2]


# -- writing ---------------------------------------------------------------------------------


class Counting:
    """A store of parts that counts its appends, and when they were; it may be away."""

    def __init__(self, inner: PartStore) -> None:
        self._inner = inner
        self.at: list[float] = []
        self.away = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def append(self, *args: Any, **options: Any) -> None:
        if self.away:
            raise BrokerUnavailable("away")
        self.at.append(time.monotonic())
        self._inner.append(*args, **options)


@pytest.fixture
def counting(app: App, monkeypatch: pytest.MonkeyPatch) -> Counting:
    made = Counting(store_of(app))
    monkeypatch.setattr(emitting, "parts_of", lambda results, codec: made)
    return made


def test_at_most_ten_requests_a_second_whatever_is_emitted(app: App, counting: Counting) -> None:
    began = time.monotonic()
    with emission(app) as stream:
        while time.monotonic() - began < 1.0:
            stream.emit("a word")
            time.sleep(0.0005)
    paced = counting.at[:-1]  # the end of a run waits for no pause
    assert len(paced) >= 5
    assert (paced[-1] - paced[0]) / (len(paced) - 1) >= 0.08, "a tenth of a second, less a delay"
    parts = store_of(app).read("t").parts.popitem()[1]
    assert [number for number, _ in parts] == list(range(1, len(parts) + 1))


def test_a_part_is_written_at_once_after_a_quiet_time(app: App, counting: Counting) -> None:
    with emission(app) as stream:
        stream.emit("one")
        until = time.monotonic() + 5.0
        while not counting.at and time.monotonic() < until:
            time.sleep(0.005)
        assert counting.at, "without another part, and without the end of the run"


def test_the_end_of_a_run_waits_for_no_pause(
    app: App, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emitting, "BATCH_SECONDS", 60.0)
    began = time.monotonic()
    with emission(app) as stream:
        stream.emit(1)
        stream.flush()
        stream.emit(2)
    assert time.monotonic() - began < 10.0
    assert len(counting.at) == 2


def test_after_the_end_of_a_run_nothing_is_emitted(app: App) -> None:
    """A thread that the task has started may do this: without an error it would wait for ever."""
    with emission(app) as stream:
        stream.emit(1)
    with pytest.raises(StepError, match="the run has ended"):
        stream.emit(2)
    assert seen(listener(app)) == [1]


def test_while_the_store_is_away_parts_wait_and_none_is_lost(
    app: App, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emitting, "RETRY_SECONDS", 0.02)
    counting.away = True
    with emission(app) as stream:
        for number in range(50):
            stream.emit(number)
        threading.Timer(0.2, lambda: setattr(counting, "away", False)).start()
    (parts,) = store_of(app).read("t").parts.values()
    assert [app.codec.decode_value(data) for _, data in parts] == list(range(50))


def test_a_run_whose_parts_cannot_be_written_starts_again_later(
    app: App, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emitting, "END_SECONDS", 0.1)
    monkeypatch.setattr(emitting, "RETRY_SECONDS", 0.02)
    counting.away = True
    with pytest.raises(StepsUnavailable, match="cannot be written"), emission(app) as stream:
        stream.emit(1)


def test_a_run_that_lost_its_lease_writes_nothing_more(app: App, counting: Counting) -> None:
    stream = emission(app)
    stream._lease.lost = True  # type: ignore[misc]
    with stream:
        stream.emit(1)
    time.sleep(0.05)
    assert counting.at == []
    stream._lease.lost = False  # type: ignore[misc]


def test_a_run_that_waits_for_room_goes_on_when_its_lease_is_lost(
    app: App, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emitting, "MOST_BYTES", 1)
    monkeypatch.setattr(emitting, "LOOK_SECONDS", 0.02)
    counting.away = True
    lease = SimpleNamespace(lost=False)
    stream = Emission(app, MESSAGE, 1, lease)
    stream.emit(1)
    waiting = threading.Thread(target=stream.emit, args=(2,), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "there is no room"
    lease.lost = True
    waiting.join(5.0)
    assert not waiting.is_alive()
    with stream:
        pass


def test_an_error_of_the_store_leaves_no_thread_behind(
    app: App, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(emitting, "END_SECONDS", 0.1)
    monkeypatch.setattr(counting, "append", broken)
    before = {each for each in threading.enumerate() if each.name == "aztask-stream"}
    with pytest.raises(StepsUnavailable), emission(app) as stream:
        stream.emit(1)
    until = time.monotonic() + 5.0
    while {each for each in threading.enumerate() if each.name == "aztask-stream"} - before:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_what_is_too_large_or_too_much_is_refused(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    with emission(app) as stream:
        with pytest.raises(EncodeError, match="a part has"):
            stream.emit("x" * 70_000)
        with pytest.raises(EncodeError):
            stream.emit(object())
        monkeypatch.setattr(emitting, "MOST_PARTS", 2)
        stream.emit(1)
        stream.emit(2)
        with pytest.raises(EncodeError, match="at most 2 parts"):
            stream.emit(3)


# -- takes, and those who listen -------------------------------------------------------------


def run(
    app: App,
    *values: Any,
    message: TaskMessage = MESSAGE,
    delivery: int = 1,
    waits: bool = False,
    ends: Exception | None = None,
) -> None:
    """A run that emits these values, and ends, in whatever way, or waits. ends: so, if not well."""
    with suppress(Parked, Renewal, OSError), emission(app, message, delivery) as stream:
        for value in values:
            stream.emit(value)
        if waits:
            raise Parked("a time", 60.0, 0.0)
        if ends is not None:
            raise ends


def hop(number: int) -> TaskMessage:
    """The message of a run that goes on after a wait."""
    return replace(MESSAGE, hop=number, continued=True)


def test_another_delivery_is_a_reset_for_a_live_and_for_a_new_listener(app: App) -> None:
    live = listener(app)
    run(app, 1, 2)
    assert seen(live) == [1, 2]
    place = live._place
    run(app, 10, 20, 30, delivery=2)
    assert seen(live) == ["reset", 10, 20, 30]
    again = listener(app, f"{place.token}.{place.number}")
    again.stream.look()
    assert [part.reset for part in again.new()] == [True, False, False, False]


def test_a_frozen_delivery_that_goes_on_is_not_read(app: App) -> None:
    live = listener(app)
    with emission(app) as frozen:
        frozen.emit(1)
        frozen.flush()
        assert seen(live) == [1]
        run(app, 10, delivery=2)
        assert seen(live) == ["reset", 10]
        frozen.emit(2)
    assert seen(live) == []
    run(app, 0, delivery=1)  # one that was frozen before its first part
    assert seen(live) == []


def test_a_delivery_that_emits_nothing_leaves_no_part_of_the_one_that_died(app: App) -> None:
    """It is the same run: only the broker's count says that another delivery came before."""
    live = listener(app)
    run(app, 1, 2)
    assert seen(live) == [1, 2]
    place = f"{live._place.token}.{live._place.number}"
    run(app, delivery=2)
    assert seen(live) == ["reset"]
    assert seen(listener(app)) == []
    assert seen(listener(app, place)) == ["reset"]
    run(app, 1, delivery=3)
    assert seen(live) == [1], "nothing was shown that it could reset"
    assert seen(listener(app)) == [1]


def test_a_second_delivery_keeps_the_parts_before_the_wait(app: App) -> None:
    live = listener(app)
    run(app, 1, 2, waits=True)
    run(app, 1, 2, 3, message=hop(1))
    assert seen(live) == [1, 2, 3]
    run(app, message=hop(1), delivery=2)
    assert seen(live) == ["reset", 1, 2]
    assert seen(listener(app)) == [1, 2]


def test_a_delivery_whose_run_never_emitted_writes_no_take(app: App) -> None:
    run(app, delivery=2)
    assert store_of(app).read("t").takes == []
    run(app, 1, waits=True)
    run(app, message=hop(1), delivery=2)
    assert len(store_of(app).read("t").takes) == 1, "that of the hop before stays"


def test_a_delivery_that_is_given_back_leaves_no_part(app: App) -> None:
    """A local queue counts the next one under the same number."""
    live = listener(app)
    with suppress(WorkerStopping), emission(app) as stopped:
        stopped.emit(1)
        raise WorkerStopping
    assert seen(live) in ([], [1, "reset"], ["reset"])
    run(app)
    assert seen(listener(app)) == []
    run(app, 5, 6)
    assert seen(listener(app)) == [5, 6]


def test_branches_emit_only_if_the_task_does_not_wait_afterwards(app: App) -> None:
    """They emit in another order in each run, so the next one could not go on behind them."""

    def ask(context: Context, *, waits: bool) -> None:
        context.emit("first")
        context.gather(lambda: context.emit("left"), lambda: context.emit("right"))
        if waits:
            context.sleep(1.0)

    task = app.task_with_context(retry=RetryPolicy(0))(ask)
    with app.inline() as inline:
        free = task.delay(waits=False)
        assert {part.value for part in free.stream()} == {"first", "left", "right"}
        result = task.delay(waits=True)
        inline.advance(2.0)
        with pytest.raises(TaskFailed, match="emit after the gather"):
            result.get()


def test_coroutines_in_branches_are_refused_too(app: App) -> None:
    @app.task_with_context(retry=RetryPolicy(0))
    async def ask(context: Context) -> None:
        await context.gather(context.aemit("left"), context.aemit("right"))
        context.wait_for("go", timeout=1.0)

    with app.inline(), pytest.raises(TaskFailed, match="emit after the gather"):
        ask.delay().get()


def test_a_continuation_whose_mark_is_damaged_begins_anew(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    run(app, 1, 2, waits=True)
    store = store_of(app)
    (mark,) = store._rows.range(store.owner, "t", "m", "n")
    store._rows.write(Change(mark.place, {"data": b"\xc1"}, mark))
    run(app, 1, 2, 3, message=hop(1))
    assert "begins its stream anew" in caplog.text
    assert seen(listener(app)) == [1, 2, 3]
    assert [take.base for take in store.read("t").takes] == ["", ""]


def test_a_continuation_goes_on_and_one_that_is_killed_is_a_reset(app: App) -> None:
    live = listener(app)
    run(app, 1, 2, waits=True)
    assert seen(live) == [1, 2]
    run(app, 1, 2, 3, message=hop(1))
    assert seen(live) == [3]
    place = f"{live._place.token}.{live._place.number}"
    run(app, 1, 2, 3, 4, message=hop(1), delivery=2, waits=True)
    assert seen(live) == ["reset", 1, 2, 3, 4]
    run(app, 1, 2, 3, 4, 5, message=hop(2))
    assert seen(live) == [5]
    assert seen(listener(app)) == [1, 2, 3, 4, 5]
    assert seen(listener(app, place))[0] == "reset", "its third part belongs to no take here"


def test_what_a_failed_attempt_behind_a_wait_has_emitted_is_no_part_of_the_stream(app: App) -> None:
    """Its retry counts from the wait, not from the failed attempt."""
    live = listener(app)
    run(app, 1, 2, waits=True)
    assert seen(live) == [1, 2]
    run(app, 1, 2, "half", "lost", message=hop(1))
    assert seen(live) == ["half", "lost"]
    run(app, 1, 2, 3, message=hop(2))
    assert seen(live) == ["reset", 1, 2, 3]
    assert seen(listener(app)) == [1, 2, 3]
    run(app, 1, 2, 3, 4, message=hop(3))
    assert seen(live) == ["reset", 1, 2, 3, 4], "the second retry too"


def test_a_run_that_waits_again_without_a_new_part_keeps_the_mark(app: App) -> None:
    live = listener(app)
    run(app, 1, 2, waits=True)
    run(app, 1, 2, message=hop(1), waits=True)
    run(app, 1, message=hop(2), waits=True)
    run(app, 1, 2, 3, message=hop(3), waits=True)
    run(app, 1, 2, 3, 4, message=hop(4))
    assert seen(live) == [1, 2, 3, 4]


def test_a_mark_of_a_wait_that_was_not_recorded_does_not_count(app: App) -> None:
    """The worker died between the mark and the record of the wait: the hop starts again."""
    live = listener(app)
    run(app, 1, waits=True)
    run(app, 1, 2, message=hop(1), waits=True)
    assert seen(live) == [1, 2]
    run(app, 1, 2, 3, message=hop(1), delivery=2)
    assert seen(live) == ["reset", 1, 2, 3]


@pytest.mark.parametrize("values", [(1, 2), ()], ids=["emits", "emits nothing"])
def test_a_redelivered_run_that_continues_takes_back_the_mark_of_the_wait_before(
    app: App, values: tuple[int, ...]
) -> None:
    """Its worker died behind the mark. Then the signal had come, so the run did not wait again."""
    run(app, 1, 2, waits=True)
    run(app, *values, delivery=2, ends=Renewal())
    run(app, "other", message=hop(1))
    assert seen(listener(app)) == ["other"], "the first part of the new history is no old one"


@pytest.mark.parametrize("values", [(1, "go"), ()], ids=["emits", "emits nothing"])
def test_a_redelivered_run_that_fails_takes_back_the_mark_of_the_wait_before(
    app: App, values: tuple[object, ...]
) -> None:
    """Its retry would go on behind parts that only the delivery before has emitted."""
    live = listener(app)
    run(app, 1, waits=True)
    run(app, 1, "no signal yet", message=hop(1), waits=True)
    assert seen(live) == [1, "no signal yet"]
    run(app, *values, message=hop(1), delivery=2, ends=OSError("the model is away"))
    run(app, 1, "go", "end", message=hop(2))
    assert seen(live) == ["reset", 1, "go", "end"]
    assert seen(listener(app)) == [1, "go", "end"]


def test_a_redelivered_run_that_waits_and_emits_nothing_keeps_no_part_of_the_one_before(
    app: App,
) -> None:
    run(app, "half", waits=True)
    run(app, delivery=2, waits=True)
    run(app, 5, message=hop(1))
    assert seen(listener(app)) == [5]


def test_a_redelivered_run_that_fails_keeps_the_mark_of_a_wait_that_was_recorded(app: App) -> None:
    live = listener(app)
    run(app, 1, 2, waits=True)
    run(app, 1, 2, "half", message=hop(1), delivery=2, ends=OSError("the model is away"))
    run(app, 1, 2, 3, message=hop(2))
    assert seen(live) == [1, 2, 3]
    assert store_of(app).read("t").takes[-1].kept == 2


def test_a_run_that_goes_on_reads_one_row_however_long_its_stream_is(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(app, *range(50), waits=True)
    asked: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(PartStore, "read", lambda *_: pytest.fail("it reads the stream"))
        marked = PartStore.marked
        patched.setattr(
            PartStore, "marked", lambda self, task: (asked.append(task), marked(self, task))[1]
        )
        run(app, *range(55), message=hop(1))
    assert asked == ["t"]
    assert seen(listener(app)) == list(range(55))


def test_listeners_share_one_request_in_each_period(app: App) -> None:
    listeners = [listener(app) for _ in range(50)]
    assert len({id(each.stream) for each in listeners}) == 1
    stream, now = listeners[0].stream, time.monotonic()
    asked = 0
    while time.monotonic() - now < 0.35:
        for each in listeners:
            if not each.stream.due():
                each.stream.look()
                asked += 1
    assert asked <= 0.35 / stream.seconds + 2


def test_a_listener_that_is_due_and_never_looks_holds_up_no_other(app: App) -> None:
    gone, other = listener(app), listener(app)
    run(app, 1)
    assert gone.stream.due() == 0.0
    assert other.stream.due() == 0.0
    assert seen(other) == [1]
    assert other.stream.due() > 0.0


def test_a_cancelled_reader_holds_up_no_other(app: App) -> None:
    """It is cancelled while its request waits for a thread, so the request is never made."""

    @app.task_with_context
    def ask(context: Context) -> None:
        context.emit(1)

    async def scene(result: Any) -> list[int]:
        release = threading.Event()
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as only:
            loop.set_default_executor(only)
            first = asyncio.ensure_future(anext(result.astream()))
            await asyncio.sleep(0)
            busy = loop.run_in_executor(None, release.wait)
            await asyncio.sleep(0.1)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            release.set()
            await busy
            return [part.value async for part in result.astream(timeout=5)]

    with app.inline():
        result = ask.delay()
        shared = stream_of(app.results, store_of(app), result.id)
        assert asyncio.run(scene(result)) == [1]
        assert shared.record is not None, "both had the same stream"
