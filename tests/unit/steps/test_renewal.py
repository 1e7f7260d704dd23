"""`context.continue_with`: a task goes on with other arguments, in a new history of steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aztask import App, Context, RetryPolicy, StepError, TaskFailed, chain
from aztask.message.codec import Codec
from aztask.message.message import CONTINUE, RENEWED, TaskMessage
from aztask.operate.steps import steps
from aztask.steps.home import StepHome
from aztask.steps.keepers import StoredOutside
from aztask.steps.records import (
    arguments_record,
    former_history,
    is_renewed,
    next_history,
    taken_signals,
)
from aztask.steps.waits import REPEATED_SECONDS, may_come_again, sent_at


@pytest.fixture
def app() -> App:
    return App("shop", broker="servicebus://nowhere.invalid", retry=RetryPolicy(2, delay=0.0))


def histories(app: App, task_id: str) -> list[str]:
    return StepHome(app).store().histories(task_id)


def test_names_of_histories() -> None:
    assert [next_history(name) for name in ("0", "0.1", "3.9")] == ["0.1", "0.2", "3.10"]
    assert [former_history(name) for name in ("0.1", "0.2", "3.10")] == ["0", "0.1", "3.9"]


def test_the_next_round_has_a_name_of_its_own_on_the_wire() -> None:
    """A worker of an older release knows no rounds, so it puts the message off."""
    codec = Codec(signing_keys=[b"0123456789abcdef"])
    message = TaskMessage("t", "s" * 512, "q", b"\x93\x90\x80\x80")
    renewed = message.parked().renewed(message, "0.1")
    for each in (renewed, renewed.resubmitted(counted=True)):
        envelope = codec.to_envelope(each)
        assert envelope.headers["task"] == "s" * 512 + RENEWED
        found = codec.from_envelope(envelope, "q")
        assert (found.task, found.continued) == ("s" * 512, False)
        assert is_renewed(found)
    waits = codec.to_envelope(renewed.parked())
    assert waits.headers["task"] == "s" * 512 + CONTINUE
    assert codec.from_envelope(waits, "q").continued
    fresh = codec.to_envelope(renewed.replayed(keep_saved=False))
    assert fresh.headers["task"] == "s" * 512, "its history follows no other one"


def test_each_round_has_a_history_of_its_own(app: App) -> None:
    keys: list[str | None] = []

    def note(context: Context) -> int:
        keys.append(context.step_key)
        return len(keys)

    @app.task_with_context
    def poll(context: Context, left: int, *, seen: int = 0) -> int:
        seen += context.step("note", note, context)
        if left:
            context.continue_with(left - 1, seen=seen)
        return seen

    with app.inline():
        result = poll.delay(3)
        assert result.get(0) == 1 + 2 + 3 + 4
        assert len(set(keys)) == 4
        assert histories(app, result.id) == ["0.3"], "the former ones are removed"
        assert [each.record.label for each in steps(app, result.id)] == ["note"]
        assert app.results is not None
        runs = app.results.history(result.id)
        assert [run.state.value for run in runs] == ["snoozed"] * 3 + ["succeeded"]


def test_a_retry_stays_in_its_round(app: App) -> None:
    ran = []

    @app.task_with_context
    def poll(context: Context, left: int) -> str:
        context.step("act", ran.append, left)
        if context.resubmit_count < 2:
            raise OSError("twice in each round, as often as it may")
        if left:
            context.continue_with(left - 1)
        return "done"

    with app.inline():
        assert poll.delay(2).get(0) == "done"
        assert ran == [2, 1, 0]


def test_signals_stay_and_none_is_taken_twice(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker died after the record of a wait, so the signal that it took is still stored."""
    monkeypatch.setattr(StoredOutside, "take", lambda *_: None)

    @app.task_with_context
    def collect(context: Context, found: list[Any]) -> list[Any]:
        found = [*found, context.wait_for("page")]
        if len(found) < 3:
            context.continue_with(found)
        return found

    with app.inline():
        result = collect.delay([])
        for page in (1, 2, 3):
            result.signal("page", page)
        assert result.get(0) == [1, 2, 3]
        store = app.sends.signals.store
        assert store is not None
        assert store.read(result.id) == (None, [], [], [])


def test_a_signal_that_is_stored_once_more_is_not_taken_by_the_next_round(app: App) -> None:
    """Its sender got no answer from the store, and wrote it again after the first was taken."""

    @app.task_with_context
    def collect(context: Context, found: list[int]) -> list[int]:
        found = [*found, context.wait_for("page")]
        if len(found) < 4:
            context.continue_with(found)
        return found

    with app.inline():
        result = collect.delay([])
        store = app.sends.signals.store
        assert store is not None
        rows = []
        add = store._rows.write_all

        def noting(changes: Any) -> Any:
            made = add(changes)
            rows.extend(change for change, row in zip(changes, made, strict=True) if row)
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store._rows, "write_all", noting)
            result.signal("page", 1)
            first = [
                change for change in rows if change.values is not None and ":s:" in change.place.key
            ]
            assert len(first) == 1
            assert add(first) != [None], "it was taken, so its place is free"
            result.signal("page", 2)
            assert add(first) != [None]
            for page in (3, 4):
                result.signal("page", page)
        assert result.get(0) == [1, 2, 3, 4]


def test_what_former_rounds_have_taken_is_passed_on_for_a_while() -> None:
    keys = [f"g:s:d:{1000.0 + n:017.6f}-00000001" for n in range(3)]
    assert [sent_at(key) for key in keys] == [1000.0, 1001.0, 1002.0]
    assert sent_at("anything") == 0.0
    assert may_come_again(keys[0], 1000.0 + REPEATED_SECONDS - 1.0)
    assert not may_come_again(keys[0], 1000.0 + REPEATED_SECONDS)
    record = arguments_record(TaskMessage("t", "s", "q", b""), keys)
    assert taken_signals([record]) == set(keys)
    assert taken_signals([arguments_record(TaskMessage("t", "s", "q", b""))]) == set()


def test_waits_in_every_round(app: App) -> None:
    @app.task_with_context
    def poll(context: Context, left: int) -> str:
        context.sleep(3600)
        if left:
            context.continue_with(left - 1)
        return "three hours later"

    with app.inline() as inline:
        result = poll.delay(2)
        for _ in range(3):
            assert result.state == "waiting"
            inline.advance(3600)
        assert result.get(0) == "three hours later"


def test_long_arguments_are_stored_apart_and_removed(tmp_path: Path) -> None:
    app = App(
        "shop",
        broker="servicebus://nowhere.invalid",
        payloads=str(tmp_path),
        payload_threshold=1000,
    )

    @app.task_with_context
    def grow(context: Context, data: bytes) -> int:
        context.step("look", len, data)
        if len(data) < 8_000:
            assert len(files(tmp_path)) <= 3
            context.continue_with(data + data)
        return len(data)

    with app.inline():
        assert grow.delay(b"x" * 2_000).get(0) == 8_000
    assert files(tmp_path) == []


def files(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_file() and "arguments" in each.parts]


@dataclass
class Mailbox:
    name: str
    seen: int = 0


def test_typed_arguments(app: App) -> None:
    @app.task_with_context
    def poll(context: Context, mailbox: Mailbox) -> int:
        assert isinstance(mailbox, Mailbox)
        if mailbox.seen < 2:
            context.continue_with(Mailbox(mailbox.name, mailbox.seen + 1))
        return mailbox.seen

    with app.inline():
        assert poll.delay(Mailbox("in")).get(0) == 2


def test_where_it_is_refused(app: App) -> None:
    @app.task_with_context(retry=RetryPolicy(0))
    def odd(context: Context, how: str) -> Any:
        if how == "step":
            return context.step("inner", context.continue_with, "none")
        if how == "branch":
            return context.gather(lambda: context.continue_with("none"))
        if how == "signature":
            context.continue_with("none", "of", "these")
        if how == "value":
            context.continue_with(object())
        return "went on"

    with app.inline():
        for how, error in (
            ("step", "StepError"),
            ("branch", "StepError"),
            ("signature", "TypeError"),
            ("value", "EncodeError"),
        ):
            with pytest.raises(TaskFailed) as caught:
                odd.delay(how).get(0)
            assert caught.value.error_type == error
        assert odd.delay("none").get(0) == "went on"
    with pytest.raises(StepError, match=r"use app.inline"):
        Context.for_testing().continue_with(1)


def test_a_task_that_catches_it_fails(app: App) -> None:
    @app.task_with_context(retry=RetryPolicy(0))
    def greedy(context: Context, left: int) -> str:
        try:
            context.continue_with(left - 1)
        except BaseException:  # noqa: BLE001
            return "caught"

    with app.inline(), pytest.raises(TaskFailed, match="caught the end of its run"):
        greedy.delay(1).get(0)


def test_the_task_of_a_workflow_gets_its_input_once(app: App) -> None:
    @app.task
    def first() -> int:
        return 5

    @app.task_with_context
    def down(context: Context, left: int) -> int:
        if left:
            context.continue_with(left - 1)
        return left

    with app.inline():
        assert chain(first.s(), down.s()).delay().get(0) == 0
