"""What is relied on of the SDK's private side: a new SDK that changes it fails here first."""

import contextlib
import inspect
import queue
import select
import socket
import threading
import time
import uuid
from types import SimpleNamespace

import pytest
from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceiver,
    ServiceBusSender,
)
from azure.servicebus._base_handler import BaseHandler
from azure.servicebus._pyamqp._connection import Connection
from azure.servicebus._pyamqp._transport import SSLTransport
from azure.servicebus._pyamqp.client import AMQPClient, ReceiveClient
from azure.servicebus._pyamqp.link import Link
from azure.servicebus._pyamqp.receiver import ReceiverLink
from azure.servicebus.exceptions import (
    MessageLockLostError,
    ServiceBusAuthenticationError,
    ServiceBusError,
)

from aztask.errors import ConfigurationError, QueueNotFound
from aztask.queues.servicebus import private
from aztask.queues.servicebus.errors import error_of
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


def test_this_sdk_has_the_calls():
    assert private.available()


@pytest.mark.parametrize(
    ("close", "open_still"), [(private.close, False), (ServiceBusSender.close, True)]
)
def test_a_socket_is_closed_though_the_goodbye_fails(bus, close, open_still):
    """Beside the SDK's own close, for which this is done."""
    client = ServiceBusClient.from_connection_string(bus.connection_string, retry_total=0)
    sender = client.get_queue_sender("q")
    private.open_link(sender, 10)
    sock = sender._handler._connection._transport.sock
    sock.shutdown(socket.SHUT_WR)
    with contextlib.suppress(ServiceBusError, OSError):
        close(sender)
    assert (sock.fileno() >= 0) == open_still
    sock.close()


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (ServiceBusReceiver, "_settle_message_via_mgmt_link", ["settlement", "lock_tokens"]),
        (ServiceBusReceiver, "_renew_locks", ["lock_tokens"]),
        (ServiceBusReceiver, "_open", ["timeout"]),
        (ServiceBusReceiver, "_create_handler", ["auth"]),
        (ServiceBusSender, "_create_handler", ["auth"]),
        (AMQPClient, "_keep_alive", []),
        (Connection, "listen", ["wait", "batch"]),
        (BaseHandler, "_mgmt_request_response_with_retry", ["mgmt_operation", "message"]),
        (ServiceBusReceiver, "_handle_exception", ["exception"]),
        (ServiceBusReceiver, "_close_handler", []),
        (AMQPClient, "do_work", []),
        (AMQPClient, "client_ready", []),
        (ReceiveClient, "settle_messages", ["delivery_id", "delivery_tag", "outcome"]),
        (Link, "flow", []),
        (ReceiverLink, "_outgoing_disposition", ["first", "last", "delivery_tag", "settled"]),
    ],
)
def test_the_shape_of_what_is_called(owner, name, parameters):
    found = list(inspect.signature(getattr(owner, name)).parameters)
    assert found[1 : 1 + len(parameters)] == parameters


def test_an_sdk_without_them_is_noticed(monkeypatch):
    private.available.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.delattr(ServiceBusReceiver, "_renew_locks")
            assert not private.available()
        private.available.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(ServiceBusReceiver, "_open", lambda self, other: None)
            assert not private.available()
    finally:
        private.available.cache_clear()


def test_the_keep_alive_thread_reads_only_what_is_there():
    """The SDK's own waits 200 ms for a frame, and holds the connection meanwhile."""
    ours, theirs = socket.socketpair()
    batches = []

    def listen(*, batch):
        batches.append(batch)

    connection = SimpleNamespace(_transport=SimpleNamespace(sock=ours), listen=listen)
    client = SimpleNamespace(_connection=connection, _shutdown=False, _keep_alive_interval=0.0)
    client._link = SimpleNamespace(current_link_credit=5)

    def pause(_):
        if len(batches) == 1:
            theirs.send(b"x")
        client._shutdown = len(batches) == 2

    private.keep_alive(SimpleNamespace(_handler=client), pause)
    assert batches[:2] == [0, 5]
    connection.listen = None  # the connection is broken
    client._shutdown = False
    private.keep_alive(SimpleNamespace(_handler=client), lambda _: None)
    ours.close()
    theirs.close()


def test_an_open_link_is_kept_alive_so(receiver):
    assert receiver._handler._keep_alive.func is private._keep_alive
    targets = [getattr(each, "_target", None) for each in threading.enumerate()]
    assert receiver._handler._keep_alive in targets


def test_many_locks_in_one_request(receiver):
    messages = private.pull(receiver, 6, 5.0)
    assert len(messages) == 6
    private.renew_many(receiver, [each.lock_token for each in messages], 5.0)
    private.settle_many(receiver, "abandon", [messages[0].lock_token], "", "")
    private.settle_many(receiver, "complete", [each.lock_token for each in messages[1:]], "", "")
    (again,) = private.pull(receiver, 6, 5.0)
    assert again.delivery_count == 1


def test_one_lost_lock_fails_the_whole_request(receiver):
    messages = private.pull(receiver, 2, 5.0)
    tokens = [messages[0].lock_token, uuid.uuid4(), messages[1].lock_token]
    with pytest.raises(MessageLockLostError):
        private.settle_many(receiver, "complete", tokens, "", "")
    with pytest.raises(MessageLockLostError):
        private.renew_many(receiver, tokens, 5.0)
    private.settle_many(receiver, "complete", [tokens[0], tokens[2]], "", "")


@pytest.mark.parametrize("verb", sorted(private.STATUSES))
def test_the_public_calls_do_the_same(receiver, verb):
    (message,) = private.pull(receiver, 1, 5.0)
    private.settle_one(receiver, verb, message, "why", "because")
    with pytest.raises((ServiceBusError, ValueError)):
        private.settle_one(receiver, "complete", message, "", "")


def test_a_pull_leaves_no_credit(receiver):
    assert len(private.pull(receiver, 100, 5.0)) >= 1
    assert receiver._handler._link.current_link_credit == 0


def test_a_release_does_not_count(receiver):
    (message,) = private.pull(receiver, 1, 5.0)
    assert private.release(receiver, message)
    counts = {each.message_id: each.delivery_count for each in private.pull(receiver, 100, 5.0)}
    assert counts[message.message_id] == 0


def test_a_release_over_another_link_is_refused(receiver):
    (message,) = private.pull(receiver, 1, 5.0)
    private.disconnect(receiver)
    private.open_link(receiver, 10)
    assert not private.release(receiver, message)


def test_a_server_that_never_speaks_does_not_hold_the_opening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = []
        thread = threading.Thread(target=lambda: taken.append(server.accept()), daemon=True)
        thread.start()
        client = ServiceBusClient.from_connection_string(
            f"Endpoint=sb://127.0.0.1:{server.getsockname()[1]};SharedAccessKeyName=a;"
            "SharedAccessKey=b;UseDevelopmentEmulator=true",
            retry_total=0,
        )
        link = client.get_queue_receiver("q")
        began = time.monotonic()
        with pytest.raises(ServiceBusError):
            private.open_link(link, 0.5)
        assert time.monotonic() - began < 5.0
        private.disconnect(link)
        thread.join()
        taken[0][0].close()


def test_a_connection_that_the_server_ended_has_something_to_read():
    ours, theirs = socket.socketpair()
    transport = SimpleNamespace(sock=ours)
    connection = SimpleNamespace(_transport=transport)
    handler = SimpleNamespace(_handler=SimpleNamespace(_connection=connection))
    assert not private.has_unread(handler)
    theirs.close()
    assert private.has_unread(handler)
    ours.close()
    assert private.has_unread(handler), "a socket that is closed cannot be used"


def test_frames_that_came_together_are_read_at_once():
    """The SDK alone makes two system calls for each frame, and this a third."""
    ours, theirs = socket.socketpair()
    transport = SSLTransport("localhost")
    transport.sock = ours
    frame = b"\x00\x00\x00\x0c\x02\x00\x00\x00data"
    theirs.sendall(3 * frame + frame[:5])
    assert private._arrived(transport, 1.0)
    assert not select.select([ours], [], [], 0)[0], "all of it was read"
    for _ in range(3):
        assert private._arrived(transport, 0.0)
        assert bytes(transport.read()[2]) == b"data"
    ours.settimeout(0.05)
    with pytest.raises(TimeoutError):
        transport.read()  # half a frame waits for its rest
    theirs.sendall(frame[5:])
    assert bytes(transport.read()[2]) == b"data"
    assert not private._arrived(transport, 0.0)
    theirs.close()
    assert private._arrived(transport, 0.0), "the end of the connection, which the SDK finds"
    with pytest.raises(OSError, match="closed connection"):
        transport.read()
    ours.close()


def test_the_buffer_of_the_sdk_is_a_queue(receiver):
    assert isinstance(receiver._handler._received_messages, queue.Queue)


def test_what_was_settled_elsewhere_is_forgotten_on_both_ends(bus, receiver):
    """Else a link keeps every delivery for as long as it lives."""
    messages = private.pull(receiver, 6, 5.0)
    tags = receiver._handler._link._received_delivery_tags
    (endpoint,) = bus._emulator.server.endpoints
    (ours,) = endpoint.client._consumers
    assert len(tags) == len(ours.unsettled) == 6
    done = [*messages[:2], *messages[4:]]
    private.settle_many(receiver, "complete", [each.lock_token for each in done], "", "")
    arrivals = [private.arrival(each) for each in done]
    private.forget(receiver, [*arrivals, arrivals[0], (10**6, b"of another link")])
    assert len(tags) == 2
    assert private.pull(receiver, 1, 0.2) == []
    assert len(ours.unsettled) == 2
    private.forget(receiver, arrivals)
    kept = [each.lock_token for each in messages[2:4]]
    private.settle_many(receiver, "complete", kept, "", "")


def test_a_message_that_came_over_no_link_has_no_arrival():
    assert private.arrival(None) is None
    assert private.arrival(SimpleNamespace(_delivery_id=None, _delivery_tag=None)) is None


def test_a_missing_queue_is_told_from_a_wrong_key(bus):
    """Both are the same error to the SDK; the status that the service gave tells them apart."""
    assert private.keep_refusals()
    client = ServiceBusClient.from_connection_string(bus.connection_string, retry_total=0)
    with pytest.raises(ServiceBusAuthenticationError) as caught:
        client.get_queue_sender("missing").__enter__()
    assert private.refused_status(caught.value) == 404
    assert isinstance(error_of(caught.value, "missing"), QueueNotFound)


def test_a_wrong_key_is_no_missing_queue():
    assert private.keep_refusals()
    with emulator(queues=["q"], shared_access_key="right") as locked:
        text = locked.connection_string.replace("=right", "=wrong")
        client = ServiceBusClient.from_connection_string(text, retry_total=0)
        for queue in ("q", "missing"):
            with pytest.raises(ServiceBusAuthenticationError) as caught:
                client.get_queue_sender(queue).__enter__()
            assert private.refused_status(caught.value) == 401
            refused = error_of(caught.value, queue)
            assert type(refused) is ConfigurationError
