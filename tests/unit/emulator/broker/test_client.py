"""Which links a client may have, and what happens to them."""

from __future__ import annotations

import pytest
from amqpwire import dispose
from emulatorbench import Bench, message

from aztask.emulator.amqp import AmqpError, encode, outgoing
from aztask.emulator.broker.access import TokenClaim
from aztask.emulator.broker.consumer import SESSION_FILTER
from aztask.emulator.faults import Faults


@pytest.mark.parametrize("receive", [True, False])
def test_links_to_a_queue(bench, receive):
    bench.create("q")
    client = bench.client()
    answer = client.attach(receive=receive)[0]
    assert answer.source is not None
    assert answer.target is not None
    assert client.handler.links == 1
    client.detach(0)
    assert client.handler.links == 0


@pytest.mark.parametrize(
    ("address", "condition"),
    [("missing", "amqp:not-found"), ("q/$DeadLetterQueue", "amqp:not-allowed")],
)
def test_addresses_that_accept_no_messages(bench, address, condition):
    bench.create("q")
    answers = bench.client().attach(receive=False, address=address)
    assert answers[-1].error.value[0] == condition


def test_deleting_an_entity_detaches_its_links(bench):
    bench.create("q")
    bench.create("other")
    client = bench.client()
    client.attach(receive=True)
    client.attach(receive=False, handle=1)
    client.attach(receive=True, handle=2, address="other")
    client.handler.entity_deleted("Q")
    ended = client.frames()
    assert [each.handle for each in ended] == [0, 1]
    assert {each.error.value[0] for each in ended} == {"amqp:not-found"}


def test_with_a_key_a_link_needs_a_claim_at_attach_and_later():
    bench = Bench(shared_access_key="key")
    bench.create("q")
    client = bench.client()
    assert client.attach(receive=True)[-1].error.value[0] == "amqp:unauthorized-access"
    client.detach(0)
    client.handler.claims.add("q", TokenClaim("q", bench.now + 10))
    assert client.attach(receive=True)[0].source is not None
    client.handler.check_tokens()
    assert client.frames() == []
    bench.now += 11
    client.handler.check_tokens()
    assert client.frames()[-1].error.value[0] == "amqp:unauthorized-access"
    bench.emulator.database.close()


def test_plain_credentials_replace_tokens():
    bench = Bench(shared_access_key="key")
    client = bench.client().handler
    assert not client.authenticated("name", "wrong")
    assert client.authenticated("name", "key")
    assert client.claims.expiry("q") == float("inf")
    bench.emulator.database.close()


def test_a_full_socket_gets_no_deliveries(bench):
    bench.create("q")
    client = bench.client()
    client.attach(receive=True)
    client.handler.paused(True)
    bench.put("q", message(b"a"))
    assert client.receive(5) == []
    client.handler.paused(False)
    assert [type(each).__name__ for each in client.frames()] == ["Transfer"]


def test_dispositions_over_several_links_are_split(bench):
    for name in ("one", "two"):
        bench.create(name)
        bench.put(name, message(b"a"))
    client = bench.client()
    for handle, name in enumerate(("one", "two")):
        client.attach(receive=True, handle=handle, address=name)
        assert len(client.receive(1, handle=handle)) == 1
    dispose(client, 0, 1, state=outgoing.ACCEPTED, settled=True)
    client.frames()
    assert [sum(bench.engine.stats(name)) for name in ("one", "two")] == [0, 0]


def idle_for(bench, client, seconds):
    """Let time pass, with the looks of the server in between; return what the client is told."""
    for _ in range(10):
        client.handler.check_idle()
        bench.now += seconds / 10
    client.handler.check_idle()
    return client.frames()


def test_a_link_without_use_is_detached_and_its_connection_closed_as_by_the_service(bench):
    bench.create("q")
    client = bench.client()
    client.attach(receive=True)
    client.attach(receive=False, handle=1)
    assert idle_for(bench, client, 590) == []
    client.flow(1)
    client.send(0, message(), handle=1)
    client.frames()
    assert idle_for(bench, client, 590) == []
    ended = idle_for(bench, client, 20)
    assert [(each.handle, each.error.value[0]) for each in ended] == [
        (0, "amqp:link:detach-forced"),
        (1, "amqp:link:detach-forced"),
    ]
    said = ended[0].error.value[1]
    assert said.endswith("AmqpMessageConsumer.IdleTimerExpired: Idle timeout: 00:10:00.")
    assert idle_for(bench, client, 280) == []
    with pytest.raises(AmqpError, match="inactive for more than the allowed 300000 milli"):
        idle_for(bench, client, 20)


def test_a_connection_that_never_has_a_link_is_closed_after_a_minute(bench):
    bench.create("q")
    client = bench.client()
    assert idle_for(bench, client, 50) == []
    with pytest.raises(AmqpError, match="inactive for more than the allowed 60000 milli"):
        idle_for(bench, client, 20)


def test_links_that_wait_for_a_session_are_in_use(bench):
    bench.create("s", sessions=True)
    client = bench.client()
    filters = encode.map_of([(encode.symbol(SESSION_FILTER), encode.NULL)])
    assert client.attach(receive=True, address="s", filters=filters) == []
    assert idle_for(bench, client, 5000) == []


def test_idle_links_may_stay():
    bench = Bench(faults=Faults(idle=0))
    bench.create("q")
    client = bench.client()
    client.attach(receive=True)
    assert idle_for(bench, client, 5000) == []
    bench.emulator.database.close()


def test_a_request_for_a_link_keeps_it_in_use(bench):
    """Only the link that the request names, for as long as any other use."""
    bench.create("q")
    client = bench.client()
    client.attach(receive=True, name="held")
    client.attach(receive=True, handle=1, name="other")
    assert idle_for(bench, client, 400) == []
    wanted = encode.map_of([(encode.string("lock-tokens"), encode.list_of([]))])
    name = {"associated-link-name": "held"}
    client.request("q/$management", "com.microsoft:renew-lock", wanted, **name)
    assert [each.handle for each in idle_for(bench, client, 250)] == [1]
    assert [each.handle for each in idle_for(bench, client, 400)] == [0]
