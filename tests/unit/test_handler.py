"""Handlers of foreign messages: registered, and run inline under the usual rules."""

from dataclasses import dataclass

import pytest

from aztask import App, RetryPolicy, current_context
from aztask.errors import ConfigurationError, DuplicateTask, TaskFailed
from aztask.message.envelope import Envelope
from aztask.message.foreign import RAW, is_foreign

KEY = "k" * 32


@dataclass
class Order:
    id: int
    article: str = "tea"


def make(**options):
    app = App("shop", broker="local://:memory:", retry=RetryPolicy(2, delay=1.0), **options)
    seen = []

    @app.handler(queue="orders", model=Order)
    def on_order(order: Order) -> str:
        seen.append((order, current_context().message))
        if order.id < 0 and current_context().resubmit_count < -order.id:
            raise ValueError("not yet")
        return f"{order.id} {order.article}"

    @app.task(queue="orders")
    def add(a, b):
        return a + b

    return app, seen


def test_a_message_of_another_program_runs_the_handler():
    app, seen = make()
    with app.inline() as inline:
        result = inline.deliver("orders", {"id": 7, "new": True}, tenant="acme", id="x", eta="soon")
        assert result.get() == "7 tea"
        assert app.tasks["shop.add"].delay(1, 2).get() == 3, "tasks run beside it"
    order, message = seen[0]
    assert order == Order(7)
    assert (message.task, message.queue, message.content_type) == ("shop.on_order", "orders", RAW)
    assert message.extra["tenant"] == "acme"
    assert (message.extra["foreign-id"], message.extra["foreign-eta"]) == ("x", "soon")


def test_retries_keep_the_body_and_end_in_the_dead_letters():
    app, seen = make()
    with app.inline() as inline:
        assert inline.deliver("orders", '{"id": -2, "article": "cup"}').get() == "-2 cup"
        assert [message.resubmit_count for _, message in seen] == [0, 1, 2]
        assert {message.body for _, message in seen} == {b'{"id": -2, "article": "cup"}'}
        with pytest.raises(TaskFailed, match="not yet"):
            inline.deliver("orders", {"id": -3}).get()
        (letter,) = inline.dead_letters("orders")
        assert (letter.reason, letter.envelope.body) == ("retries-exhausted", b'{"id": -3}')


def test_a_bad_body_is_a_dead_letter_with_its_reason_and_bytes():
    app, seen = make()
    with app.inline() as inline:
        for body in (b"\xff\x00", b'{"id": "seven"}', b"{}"):
            assert inline.deliver("orders", body).failed()
        letters = inline.dead_letters("orders")
        assert [letter.envelope.body for letter in letters] == [
            b"\xff\x00",
            b'{"id": "seven"}',
            b"{}",
        ]
        assert {letter.reason for letter in letters} == {"undecodable"}
        assert letters[1].description == "task shop.on_order: order.id is a str, not int"
        assert all(letter.message and letter.message.task == "shop.on_order" for letter in letters)
    assert not seen


def test_two_messages_of_one_id_are_two_runs():
    app, seen = make()
    with app.inline() as inline:
        app.broker.send("orders", [Envelope(b'{"id": 1}', {}, "same")])
        app.broker.send("orders", [Envelope(b'{"id": 2}', {}, "same")])
        inline.run()
    assert [order.id for order, _ in seen] == [1, 2]
    assert len({message.id for _, message in seen}) == 2


@pytest.mark.parametrize("serializer", ["msgpack", "json"])
def test_what_aztask_sends_to_a_handler_is_read_alike(serializer):
    app, _ = make(serializer=serializer, accept=[serializer])
    with app.inline() as inline:
        assert app.send("shop.on_order", [{"id": 5}], queue="orders").get() == "5 tea"
        assert inline.deliver("orders", {"id": 6}).get() == "6 tea"


def test_with_signing_keys_only_messages_that_claim_to_be_ours_are_verified():
    app, seen = make(signing_keys=[KEY])
    with app.inline() as inline:
        assert inline.deliver("orders", {"id": -1}).get() == "-1 tea", "its retry is signed"
        headers = {"task": "shop.on_order", "id": "forged"}
        app.broker.send("orders", [Envelope(b'{"id": 1}', headers, "m", RAW)])
        inline.run()
        assert [letter.reason for letter in inline.dead_letters("orders")] == ["undecodable"]
    assert len(seen) == 2


def test_without_a_handler_it_is_refused_as_before():
    app, _ = make()
    with app.inline() as inline:
        app.broker.send("other", [Envelope(b'{"id": 1}')])
        inline.run()
        (letter,) = inline.dead_letters("other")
        assert "no task header" in letter.description


def test_a_raw_body_for_a_task_is_refused():
    app, _ = make()
    with app.inline() as inline:
        headers = {"task": "shop.add", "id": "x"}
        app.broker.send("orders", [Envelope(b"[[1, 2], {}, {}]", headers, "m", RAW)])
        inline.run()
        assert [letter.reason for letter in inline.dead_letters("orders")] == ["undecodable"]


def test_one_handler_for_each_queue_and_name():
    app, _ = make()
    with pytest.raises(DuplicateTask, match=r"queue 'orders' has a handler .*on_order"):
        app.handler(queue="orders")(print)
    with pytest.raises(ConfigurationError, match="unsigned is True or False, not 1"):
        app.handler(queue="others", unsigned=1)  # type: ignore[arg-type]
    with pytest.raises(DuplicateTask, match=r"the name 'shop\.add' has a handler"):
        app.handler(queue="more", name="shop.add")(print)
    assert "orders" in app.queue_names()


@pytest.mark.parametrize(
    ("envelope", "foreign"),
    [
        (Envelope(b"{}"), True),
        (Envelope(b"{}", {"id": "x", "eta": "y"}), True),
        (Envelope(b"{}", {"task": "a"}), False),
        (Envelope(b"{}", {"aztask-hop": 1}), False),
        (Envelope(b"{}", problem="damaged"), False),
    ],
)
def test_what_is_foreign(envelope, foreign):
    assert is_foreign(envelope) is foreign
