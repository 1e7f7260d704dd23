"""Payloads: every store keeps them, and every broker carries messages that refer to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from payloads import FACTORIES, PayloadSubject
from subjects import Subject

from aztask import App
from aztask.errors import PayloadDamaged, PayloadMissing
from aztask.message.payload import StoredValue
from aztask.settlement import Abandon, Complete, DeadLetter, Resubmit
from aztask.stores.payloads.holders import PayloadHolders
from aztask.stores.payloads.store import ListedPayload, PayloadKind, new_name

DATA = bytes(range(256)) * 4096


@pytest.fixture(scope="session", params=sorted(FACTORIES))
def kept(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PayloadSubject]:
    with FACTORIES[request.param](tmp_path_factory.mktemp("payloads")) as subject:
        yield subject


def stored(kept: PayloadSubject, data: bytes = DATA) -> StoredValue:
    found = StoredValue.of(new_name(PayloadKind.ARGUMENTS), data)
    kept.store.write(found.name, data)
    return found


def names(kept: PayloadSubject) -> set[str]:
    return {each.name for each in kept.store.list()}


def test_a_store_that_was_never_written_is_empty(kept: PayloadSubject) -> None:
    assert isinstance(names(kept), set)
    kept.store.remove([new_name(PayloadKind.ARGUMENTS)])
    with pytest.raises(PayloadMissing):
        kept.store.read(StoredValue.of(new_name(PayloadKind.ARGUMENTS), DATA))


def test_a_payload_comes_back_as_it_was_written(kept: PayloadSubject) -> None:
    for data in (b"x", DATA):
        assert kept.store.read(stored(kept, data)) == data


def test_writing_again_does_no_harm(kept: PayloadSubject) -> None:
    first = stored(kept)
    kept.store.write(first.name, DATA)
    assert kept.store.read(first) == DATA


def test_a_payload_that_is_gone_is_missing(kept: PayloadSubject) -> None:
    first, second = stored(kept), stored(kept)
    kept.store.remove([first.name])
    kept.store.remove([first.name])
    with pytest.raises(PayloadMissing, match=first.name):
        kept.store.read(first)
    assert kept.store.read(second) == DATA


@pytest.mark.parametrize("other", [DATA[:-1], DATA + b"x", b"y" + DATA[1:]])
def test_other_bytes_are_damage(kept: PayloadSubject, other: bytes) -> None:
    found = stored(kept)
    kept.damage(found.name, other)
    with pytest.raises(PayloadDamaged, match=found.name):
        kept.store.read(found)


def test_many_are_removed_at_once(kept: PayloadSubject) -> None:
    found = [stored(kept, b"x") for _ in range(40)]
    assert names(kept) >= {each.name for each in found}
    kept.store.remove([*(each.name for each in found), new_name(PayloadKind.ARGUMENTS)])
    assert not names(kept) & {each.name for each in found}


def test_the_list_says_how_old_and_how_large(kept: PayloadSubject) -> None:
    name = new_name(PayloadKind.RESULT, 1_800_000_000.0)
    kept.store.write(name, DATA)
    (found,) = [each for each in kept.store.list() if each.name == name]
    assert (found.kind, found.size) == (PayloadKind.RESULT, len(DATA))
    assert 0 <= 1_800_000_000.0 - found.at < 3600


# -- on every broker ---------------------------------------------------------------------------


@pytest.fixture
def app(subject: Subject, tmp_path: Path) -> Iterator[App]:
    app = App("shop", broker=subject.broker, payloads=f"{tmp_path}/payloads")
    app.task(name="shop.weigh")(len)
    yield app
    assert app.payloads is not None
    app.payloads.close()


def sent(app: App, queue: str, count: int = 1) -> None:
    calls = [(DATA,)] * count
    app.tasks["shop.weigh"].with_options(queue=queue).map(calls)


def kept_names(app: App) -> set[str]:
    assert app.payloads is not None
    return {each.name for each in app.payloads.store.list()}


def test_a_large_argument_travels_beside_the_message(subject: Subject, app: App) -> None:
    queue = subject.queue()
    assert app.payloads is not None
    size = min(app.payloads.threshold, 40_000) // 2
    app.tasks["shop.weigh"].with_options(queue=queue).map([(DATA,), (b"x" * size,)])
    receiver = subject.receiver(queue)
    found = {}
    for delivery in subject.take(receiver, 2):
        message = app.message_in(delivery.envelope, queue, delivery.position)
        filled = app.payloads.filled(message)
        ((argument,), _) = app.codec.decode_arguments(filled)
        found[len(argument)] = message.payload is not None
        receiver.settle([(delivery, Complete())])
    assert found == {len(DATA): True, size: False}


def test_every_way_of_a_message_keeps_its_reference(subject: Subject, app: App) -> None:
    queue = subject.queue()
    sent(app, queue)
    receiver = subject.receiver(queue)
    delivery = subject.one(receiver)
    first = app.message_in(delivery.envelope, queue, delivery.position)
    receiver.settle([(delivery, Abandon())])
    delivery = subject.one(receiver)
    assert app.message_in(delivery.envelope, queue, delivery.position).payload == first.payload
    clone = app.codec.to_envelope(first.resubmitted(counted=True))
    receiver.settle([(delivery, Resubmit(delay=0.0, envelope=clone))])
    delivery = subject.one(receiver)
    assert app.message_in(delivery.envelope, queue, delivery.position).payload == first.payload
    receiver.settle([(delivery, DeadLetter("rejected", "no"))])
    dead = subject.receiver(queue, dead_letter=True)
    delivery = subject.one(dead)
    assert app.message_in(delivery.envelope, queue, delivery.position).payload == first.payload
    dead.settle([(delivery, Complete())])


def test_what_messages_and_dead_letters_refer_to_is_seen(subject: Subject, app: App) -> None:
    """The collector removes the rest, so it must not miss one, whatever its state."""
    queue = subject.queue()
    sent(app, queue, 3)
    app.tasks["shop.weigh"].with_options(queue=queue, delay=3600).delay(DATA)
    receiver = subject.receiver(queue)
    leased, dead = subject.take(receiver, 2)
    receiver.settle([(dead, DeadLetter("rejected", "no"))])
    asked = [ListedPayload(new_name(PayloadKind.ARGUMENTS), 1, 0.0)]
    view = PayloadHolders(subject.broker, None, [queue]).needed(asked)
    if subject.can.paged_peek:
        assert view.names >= kept_names(app)
        assert len(kept_names(app)) == 4
    else:  # leased and delayed messages are not shown, and it says so
        assert view.hidden.startswith("the service does not show all messages of")
    receiver.settle([(leased, Complete())])
    subject.broker.delete(queue)
