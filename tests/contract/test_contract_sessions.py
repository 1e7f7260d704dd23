"""Sessions: in order, one receiver at a time."""

import threading
from collections import Counter
from concurrent.futures import Future

import pytest
from subjects import bodies, settle

from aztask.address.shards import shard_of_session
from aztask.errors import AztaskError, CapabilityError, DecodeError, KeyMissing, LeaseLost
from aztask.message.codec import Codec
from aztask.message.encryption import Cipher, is_encrypted
from aztask.queues.base import ANY_SESSION, Lost, Renewed, SessionHolder, Settled
from aztask.session import StateCodec
from aztask.settlement import Abandon, Complete, Release

KEY = b"a-key-with-enough-bytes-in-it-0123456789"
SECRET = "4111-1111-1111-1111"


@pytest.fixture
def queue(subject):
    if subject.can.sessions:
        return subject.queue(sessions=True)
    with pytest.raises(CapabilityError):
        subject.queue(sessions=True)
    with pytest.raises(CapabilityError):
        subject.receiver(subject.queue(), session="a")
    return pytest.skip("no sessions here, and asking for them is an error")


def test_a_session_is_received_in_order_by_its_receiver_alone(subject, queue):
    for body, session in ((b"a1", "a"), (b"b1", "b"), (b"a2", "a")):
        subject.send(queue, body, session=session)
    first = subject.receiver(queue, session="a")
    taken = subject.take(first, 2)
    assert bodies(taken) == [b"a1", b"a2"]
    assert {delivery.session for delivery in taken} == {"a"}
    subject.assert_nothing(subject.receiver(queue, session="a", broker=subject.another()))
    assert bodies(subject.take(subject.receiver(queue, session="b"))) == [b"b1"]


def test_any_session_is_one_without_a_receiver(subject, queue):
    for session in ("a", "b"):
        subject.send(queue, session.encode(), session=session)
    receivers = [subject.receiver(queue, session=ANY_SESSION) for _ in range(2)]
    taken = [subject.one(receiver) for receiver in receivers]
    assert sorted(bodies(taken)) == [b"a", b"b"]
    subject.assert_nothing(subject.receiver(queue, session=ANY_SESSION))
    for receiver, delivery in zip(receivers, taken, strict=True):
        assert settle(receiver, Complete(), delivery) == [Settled()]


def test_an_abandoned_message_keeps_its_place(subject, queue):
    subject.send(queue, b"1", b"2", session="a")
    receiver = subject.receiver(queue, session="a")
    settle(receiver, Abandon(), subject.one(receiver))
    assert bodies(subject.take(receiver, 2)) == [b"1", b"2"]


def test_renewing_keeps_the_session(subject, queue):
    subject.send(queue, b"1", b"2", session="a")
    receiver = subject.receiver(queue, session="a")
    first, second = subject.take(receiver, 2)
    other = subject.receiver(queue, session="a")
    for _ in range(2):
        subject.pass_time(subject.lease * 0.6)
        assert isinstance(receiver.renew([first])[0], Renewed)
    subject.assert_nothing(other)
    assert settle(receiver, Complete(), first, second) == [Settled()] * 2


def test_a_lapsed_session_is_lost_with_what_was_leased_in_it(subject, queue):
    subject.send(queue, b"1", session="a")
    receiver = subject.receiver(queue, session="a")
    late = subject.one(receiver)
    subject.lapse()
    other = subject.receiver(queue, session="a", broker=subject.another())
    again = subject.one(other)
    assert again.delivery_count == 2
    assert isinstance(receiver.renew([late])[0], Lost)
    assert isinstance(settle(receiver, Complete(), late)[0], Lost)
    assert settle(other, Complete(), again) == [Settled()]


def test_closing_lets_go_of_the_session(subject, queue):
    subject.send(queue, b"1", b"2", session="a")
    receiver = subject.receiver(queue, session="a")
    settle(receiver, Complete(), subject.one(receiver))
    receiver.close()
    other = subject.receiver(queue, session="a")
    assert subject.one(other).envelope.body == b"2"


def test_letting_go_gives_the_session_to_others_uncounted(subject, queue):
    subject.send(queue, b"a1", b"a2", session="a")
    receiver = subject.receiver(queue, session=ANY_SESSION)
    assert isinstance(receiver, SessionHolder)
    taken = subject.one(receiver)
    receiver.let_go()
    other = subject.receiver(queue, session="a", broker=subject.another())
    again = subject.one(other)
    assert (again.envelope.body, again.delivery_count) == (b"a1", 1)
    assert isinstance(settle(receiver, Complete(), taken)[0], Lost)
    assert settle(other, Complete(), again) == [Settled()]


def test_released_in_a_session_it_comes_first_again_uncounted(subject, queue):
    subject.send(queue, b"1", b"2", session="a")
    receiver = subject.receiver(queue, session="a")
    assert settle(receiver, Release(), subject.one(receiver)) == [Settled()]
    first, second = subject.take(receiver, 2)
    assert bodies([first, second]) == [b"1", b"2"]
    assert first.delivery_count == 1


def test_sessions_take_turns(subject, queue):
    sessions = ("a", "b", "c")
    for session in sessions:
        subject.send(queue, b"1", b"2", b"3", session=session)
    in_shards = Counter(shard_of_session(session, subject.shards) for session in sessions)
    receiver = subject.receiver(queue, session=ANY_SESSION)
    seen: Counter[str] = Counter()
    while len(seen) < 3:
        delivery = subject.one(receiver)
        seen[delivery.session] += 1
        assert settle(receiver, Complete(), delivery) == [Settled()]
        receiver.let_go()
    # Shards take turns, and so do the sessions in each: a fuller shard takes more rounds.
    most = 1 if subject.shards == 1 else max(in_shards.values())
    assert max(seen.values()) <= most


def test_a_late_message_ends_with_its_session(subject, queue):
    subject.send(queue, b"1", session="a")
    receiver = subject.receiver(queue, session="a")
    first = subject.one(receiver)
    subject.pass_time(subject.lease * 0.6)
    subject.send(queue, b"2", session="a")
    second = subject.one(receiver)
    assert second.deadline == (before := first.deadline)
    assert isinstance(receiver.renew([second])[0], Renewed)
    assert first.deadline == second.deadline > before + subject.lease * 0.5
    assert settle(receiver, Complete(), first, second) == [Settled()] * 2


def test_a_sessions_state_outlives_its_messages_and_holder(subject, queue):
    subject.send(queue, b"1", session="a")
    receiver = subject.receiver(queue, session=ANY_SESSION)
    delivery = subject.one(receiver)
    assert receiver.session_state("a") is None
    receiver.set_session_state("a", b"\x00state")
    assert receiver.session_state("a") == b"\x00state"
    assert settle(receiver, Complete(), delivery) == [Settled()]
    with pytest.raises(LeaseLost):
        receiver.session_state("b")
    receiver.let_go()
    other = subject.receiver(queue, session="a", broker=subject.another())
    subject.send(queue, b"2", session="a")
    assert subject.one(other).envelope.body == b"2"
    assert other.session_state("a") == b"\x00state"
    other.set_session_state("a", None)
    assert other.session_state("a") is None


def test_an_encrypted_state_is_read_in_its_session_alone(subject, queue):
    """What the service keeps of it has no secret, and is worth nothing in another session."""
    ours = Codec(cipher=Cipher([KEY], encrypt=True))
    subject.send(queue, b"1", session="a")
    subject.send(queue, b"2", session="b")
    receiver = subject.receiver(queue, session="a")
    subject.one(receiver)
    receiver.set_session_state("a", StateCodec(ours, queue, "a").encode({"card": SECRET}))
    stored = receiver.session_state("a")
    assert is_encrypted(stored)
    assert SECRET.encode() not in stored
    assert StateCodec(ours, queue, "a").decode(stored) == {"card": SECRET}
    other = subject.receiver(queue, session="b")
    subject.one(other)
    other.set_session_state("b", stored)
    for elsewhere in (StateCodec(ours, queue, "b"), StateCodec(ours, f"{queue}-2", "a")):
        with pytest.raises(DecodeError, match="copied from another"):
            elsewhere.decode(other.session_state("b"))
    with pytest.raises(KeyMissing):
        StateCodec(Codec(), queue, "a").decode(stored)


def test_a_state_from_before_encryption_is_read_and_then_encrypted(subject, queue):
    subject.send(queue, b"1", session="a")
    receiver = subject.receiver(queue, session="a")
    subject.one(receiver)
    receiver.set_session_state("a", StateCodec(Codec(), queue, "a").encode([1, SECRET]))
    assert SECRET.encode() in receiver.session_state("a")
    state = StateCodec(Codec(cipher=Cipher([KEY], encrypt=True)), queue, "a")
    assert state.decode(receiver.session_state("a")) == [1, SECRET]
    receiver.set_session_state("a", state.encode([2, SECRET]))
    assert is_encrypted(receiver.session_state("a"))
    only_read = StateCodec(Codec(cipher=Cipher([KEY])), queue, "a")
    assert only_read.decode(receiver.session_state("a")) == [2, SECRET]
    assert not is_encrypted(only_read.encode([3]))
    receiver.set_session_state("a", state.encode(None))
    assert state.decode(receiver.session_state("a")) is None


def test_a_lost_session_has_no_state_for_us(subject, queue):
    subject.send(queue, b"1", session="a")
    receiver = subject.receiver(queue, session="a")
    subject.one(receiver)
    subject.lapse()
    for call in (
        lambda: receiver.session_state("a"),
        lambda: receiver.set_session_state("a", b"x"),
    ):
        with pytest.raises(LeaseLost):
            call()
    other = subject.receiver(queue, session="a", broker=subject.another())
    subject.one(other)
    assert other.session_state("a") is None


def test_closing_ends_a_receive_that_waits_for_a_session(subject, queue):
    receiver = subject.receiver(queue, session=ANY_SESSION)
    waiting = Future()
    thread = threading.Thread(target=lambda: waiting.set_result(receiver.receive(1, 60.0)))
    thread.start()
    thread.join(0.8)
    assert thread.is_alive(), "it waits"
    receiver.close()
    assert waiting.result(timeout=5.0) == []
    thread.join(5.0)


def test_a_message_without_session_is_refused(subject, queue):
    with pytest.raises(AztaskError, match="session"):
        subject.send(queue, b"x")


def test_a_receiver_without_session_is_refused(subject, queue):
    subject.send(queue, b"x", session="a")
    with pytest.raises(AztaskError, match="session"):
        subject.receiver(queue).receive(1, 0.0)


def test_asking_a_plain_queue_for_a_session_is_refused(subject, queue):
    with pytest.raises(AztaskError, match="session"):
        subject.receiver(subject.queue(), session="a").receive(1, 0.0)
