"""Settlements: the action of a delivery state, and its execution."""

from __future__ import annotations

import pytest
from amqpwire import dispose
from emulatorbench import message

from aztask.emulator.amqp import AmqpError, encode, outgoing
from aztask.emulator.amqp.encode import Described, Symbol
from aztask.emulator.amqp.sections import cut
from aztask.emulator.broker import stored
from aztask.emulator.broker.settlement import (
    SettlementAction,
    SettlementKind,
    action_of,
    settle,
)

DEAD = Symbol("com.microsoft:dead-letter")


def rejected(*error):
    return Described(0x25, [Described(0x1D, list(error))])


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (Described(0x24, []), SettlementKind.COMPLETE),
        (Described(Symbol("amqp:accepted:list"), []), SettlementKind.COMPLETE),
        (Described(0x26, []), SettlementKind.RELEASE),
        (Described(0x27, []), SettlementKind.ABANDON),
        (Described(0x27, [True]), SettlementKind.ABANDON),
        (Described(0x27, [None, True]), SettlementKind.DEFER),
        (Described(0x25, []), SettlementKind.DEAD_LETTER),
    ],
)
def test_the_action_of_a_state(state, kind):
    assert action_of(state).kind is kind


def test_states_that_settle_nothing():
    assert action_of(None) is None
    assert action_of(Described(0x23, [1, 2])) is None
    with pytest.raises(AmqpError, match="invalid-field"):
        action_of(Described(0x99, []))


@pytest.mark.parametrize(
    ("state", "reason", "description"),
    [
        (
            rejected(DEAD, None, {"DeadLetterReason": "r", "DeadLetterErrorDescription": "d"}),
            "r",
            "d",
        ),
        (rejected(Symbol("my:condition"), "text", None), "my:condition", "text"),
        (rejected(DEAD, "text", None), "", ""),
        (rejected(DEAD, None, {"DeadLetterReason": "x" * 5000}), "x" * 4096, ""),
    ],
    ids=range(4),
)
def test_reasons_of_dead_letters(state, reason, description):
    action = action_of(state)
    assert (action.reason, action.description) == (reason, description)
    assert action.properties == {}


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        (SettlementKind.COMPLETE, {}),
        (SettlementKind.ABANDON, {"active": 1}),
        (SettlementKind.RELEASE, {"active": 1}),
        (SettlementKind.DEFER, {"deferred": 1}),
        (SettlementKind.DEAD_LETTER, {"dead": 1}),
    ],
)
def test_a_settlement_and_a_lost_lease(bench, kind, counts):
    bench.create("q")
    bench.put("q", message())
    (lease,) = bench.engine.receive("q", 1)
    leases = [(lease.seq, lease.token)]
    action = SettlementAction(kind, "r", "d")
    assert settle(bench.engine, "q", False, action, leases) == [True]
    found = bench.engine.stats("q")._asdict()
    assert {name: number for name, number in found.items() if number} == counts
    assert settle(bench.engine, "q", False, action, leases) == [False]


def test_properties_are_set_on_the_message(bench):
    bench.create("q")
    bench.put("q", message(kept=1, changed=1))
    (lease,) = bench.engine.receive("q", 1)
    action = SettlementAction(SettlementKind.ABANDON, properties={"changed": 2, "new": "x"})
    settle(bench.engine, "q", False, action, [(lease.seq, lease.token)])
    (found,) = bench.engine.peek("q", limit=1)
    properties = cut(stored.unpack(found.payload).bare).application_properties
    assert properties == {"kept": 1, "changed": 2, "new": "x"}


def test_confirmations_are_grouped_and_lost_locks_rejected(bench):
    bench.create("q")
    client = bench.client()
    client.attach(receive=True)
    bench.put("q", *[message()] * 4)
    assert len(client.receive(9)) == 4
    lock = next(iter(client.connection.sessions[0].unsettled.values())).context
    bench.engine.complete("q", [(lock.seq, lock.token)])
    dispose(client, 0, 3, state=outgoing.ACCEPTED)
    lost, held = client.frames()
    assert (lost.first, lost.last, lost.state.descriptor) == (0, None, 0x25)
    assert lost.state.value[0].value[0] == "com.microsoft:message-lock-lost"
    assert (held.first, held.last, held.state.descriptor) == (1, 3, 0x24)
    assert sum(bench.engine.stats("q")) == 0
    assert len(bench.broker.locks) == 0


def test_properties_that_a_message_has_no_room_for_are_refused_and_the_lock_stays(bench):
    bench.create("q")
    bench.put("q", message(a="x" * 40_000))
    client = bench.client()
    client.attach(receive=True)
    assert len(client.receive(1)) == 1
    more = encode.map_of([(encode.string("b"), encode.string("x" * 40_000))])
    state = encode.described(0x27, encode.list_of([encode.TRUE, encode.FALSE, more]))
    dispose(client, 0, state=state)
    (answer,) = client.frames()
    assert answer.state.value[0].value[0] == "amqp:link:message-size-exceeded"
    assert bench.engine.stats("q").leased == 1
