"""Our decoder in the SDK's place: on our links alone, and one message at a time."""

from types import SimpleNamespace

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusReceivedMessage
from azure.servicebus._pyamqp._decode import decode_payload
from azure.servicebus._pyamqp.message import Message
from azure.servicebus._pyamqp.receiver import ReceiverLink

from aztask.queues.servicebus import private
from aztask.queues.servicebus.reading import damage_of, damaged, read_message, supported
from aztask.testing import emulator


@pytest.fixture(scope="module")
def bus():
    with emulator(queues=["q"]) as running:
        yield running


@pytest.fixture
def receiver(bus):
    client = ServiceBusClient.from_connection_string(
        bus.connection_string, retry_total=0, try_timeout=5
    )
    with client.get_queue_sender("q") as sender:
        sender.send_messages([ServiceBusMessage(str(number)) for number in range(6)])
    link = client.get_queue_receiver("q")
    private.open_link(link, 10)
    yield link
    while messages := private.pull(link, 100, 0.2):
        private.settle_many(link, "complete", [each.lock_token for each in messages], "", "")
    private.disconnect(link)


def test_our_links_decode_with_our_decoder_and_nobody_elses_do(bus, receiver):
    method = receiver._handler._link._incoming_transfer
    assert method.__func__.__code__ is ReceiverLink._incoming_transfer.__code__
    assert method.__func__.__globals__["decode_payload"] is read_message
    assert ReceiverLink._incoming_transfer.__globals__["decode_payload"] is decode_payload
    client = ServiceBusClient.from_connection_string(bus.connection_string, retry_total=0)
    with client.get_queue_receiver("q") as another:
        another.peek_messages()
        theirs = another._handler._link._incoming_transfer
        assert theirs.__func__ is ReceiverLink._incoming_transfer


def test_a_message_that_the_sdk_cannot_take_is_damaged_alone(receiver, monkeypatch):
    """Whatever the decoder made of it: its neighbours arrive."""
    build, seen = receiver._build_received_message, []

    def refuse(received):
        seen.append(received)
        if len(seen) == 2:
            raise KeyError("something new")
        return build(received)

    monkeypatch.setattr(receiver, "_build_received_message", refuse)
    messages = private.pull(receiver, 6, 5.0)
    assert len(messages) == 6
    damages = [damage_of(each) for each in messages]
    assert [bool(each) for each in damages] == [False, True, False, False, False, False]
    assert "something new" in damages[1].problem
    private.settle_many(receiver, "complete", [each.lock_token for each in messages], "", "")


def test_an_sdk_that_decodes_elsewhere_is_noticed(monkeypatch):
    supported.cache_clear()
    private.available.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(ReceiverLink, "_incoming_transfer", lambda self, frame: None)
            assert not supported()
            assert not private.available()
    finally:
        supported.cache_clear()
        private.available.cache_clear()


def test_only_a_message_that_could_not_be_read_has_a_damage():
    broken = damaged(b"raw", "why")
    assert damage_of(ServiceBusReceivedMessage(broken, receiver=None)) is broken
    assert damage_of(ServiceBusReceivedMessage(Message(), receiver=None)) is None
    assert damage_of(SimpleNamespace()) is None
