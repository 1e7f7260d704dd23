"""Dead letters whose arguments are encrypted: replayed and edited with the key and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aztask import App
from aztask.errors import KeyMissing
from aztask.message.encryption import is_encrypted
from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.operate.queues import arguments_of
from aztask.settlement import DeadLetter

KEYS: dict[str, Any] = {
    "signing_keys": ["a-signing-key-of-enough-bytes"],
    "id_key": "an-id-key-of-enough-bytes",
    "encryption_keys": ["a-key-that-encrypts-and-is-long-enough"],
}
SECRET = "4111-1111-1111-1111"
ALL = Selection(everything=True)
Open = Callable[..., App]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Apps on one broker, with these keys and options."""
    made: list[App] = []

    def open_app(**options: Any) -> App:
        made.append(App("shop", broker=f"local://{tmp_path}/q.db", **{**KEYS, **options}))
        return made[-1]

    yield open_app
    for app in made:
        with closing(app):
            pass


@pytest.fixture
def shop(opened: Open) -> App:
    """An app that encrypts, with a dead letter."""
    app = opened(encrypt=True)
    app.send("shop.charge", [SECRET], task_id="a")
    receiver = app.broker.receiver("default", lease=30.0)
    (delivery,) = receiver.receive(1, 1.0)
    receiver.settle([(delivery, DeadLetter("not-retryable", "it broke"))])
    return app


def waiting(app: App) -> Any:
    (peeked,) = app.broker.peek("default")
    assert is_encrypted(peeked.envelope.body)
    return app.codec.from_envelope(peeked.envelope, "default")


def test_it_is_replayed_with_the_key(shop: App) -> None:
    assert DeadLetters(shop, "default").replay(ALL).ids == ["a"]
    message = waiting(shop)
    assert message.generation == 1
    assert shop.codec.decode_arguments(message) == ((SECRET,), {})


def test_it_is_replayed_with_other_arguments(shop: App) -> None:
    DeadLetters(shop, "default").replay(ALL, arguments=(["other"], {}))
    assert shop.codec.decode_arguments(waiting(shop)) == (("other",), {})


@pytest.mark.parametrize("keys", [[], ["another-key-that-is-long-enough-01"]])
def test_a_program_without_its_key_says_so_and_replays_it(
    shop: App, opened: Open, keys: list[str]
) -> None:
    other = opened(encryption_keys=keys)
    (letter,) = DeadLetters(other, "default").list()
    assert letter.task == "shop.charge"
    found = arguments_of(other, letter.message, letter.problem)
    assert found.args is None
    assert "the arguments: it is encrypted with the key" in found.problem
    assert DeadLetters(other, "default").replay(ALL).ids == ["a"]
    with pytest.raises(KeyMissing):
        other.codec.decode_arguments(waiting(other))
    assert shop.codec.decode_arguments(waiting(shop)) == ((SECRET,), {})
