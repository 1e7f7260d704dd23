"""Whatever a rule says and a message holds: rules are untrusted, and so are messages.

An exception of any other kind would stop the forwarding of all messages.
"""

from __future__ import annotations

import random
from uuid import UUID

from aztask.emulator.amqp import encode
from aztask.emulator.amqp.encode import Described, Int32, Symbol, Timestamp
from aztask.emulator.broker.filters import TIMESPAN, RuleAction, RuleMessage, SqlFilter
from aztask.emulator.broker.sql import SqlFault
from aztask.errors import ConfigurationError

WORDS = [
    *("a", "b", "c", "sys.Label", "sys.MessageId", "sys.TimeToLive", "user.a", "[a b]", "@p"),
    *("1", "-1", "2.5", "1e308", "9223372036854775807", "'x'", "'%_'", "''", "NULL", "TRUE"),
    *("AND", "OR", "NOT", "=", "<>", "<", ">=", "+", "-", "*", "/", "%", "(", ")", ",", ";"),
    *("LIKE", "ESCAPE", "IN", "IS", "EXISTS(a)", "newid()", "p('a')", "p(a)", "p('sys.' + 'To')"),
]
VALUES = [
    *(None, True, False, 0, -1, 2**64 - 1, -(2**63), Int32(5), Timestamp(10), 0.0, -0.0, 2.5),
    *(float("inf"), float("-inf"), float("nan"), "", "x", "%", "9" * 400, Symbol("s"), b"\xff"),
    *(UUID(int=1), Described(TIMESPAN, 5), Described(TIMESPAN, None), Described(TIMESPAN, [1])),
    *(Described(7, {"a": 1}), [1, 2], {"k": "v"}, Described(Symbol("x"), "text")),
]


class Cut:
    """Sections with the values that the test wants."""

    def __init__(self, chance):
        self._chance = chance
        self.application_properties = {
            name: chance.choice(VALUES) for name in ("a", "B", "a b") if chance.random() < 0.9
        }

    def property(self, _index):
        return self._chance.choice(VALUES)


def parts(chance, most):
    return " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, most)))


def evaluated(rule_filter, chance):
    message = RuleMessage(Cut(chance), {"TimeToLive": chance.choice(VALUES)})
    try:
        assert rule_filter.matches(message) in (True, False)
    except SqlFault as fault:
        assert str(fault)


def test_any_text_is_a_filter_or_a_mistake():
    chance = random.Random(1)
    parsed = 0
    for _ in range(4000):
        try:
            rule_filter = SqlFilter(parts(chance, 7), {"@p": chance.choice(VALUES)})
        except ConfigurationError:
            continue
        parsed += 1
        for _ in range(3):
            evaluated(rule_filter, chance)
    assert parsed > 300


def test_every_operator_takes_every_pair_of_values():
    chance = random.Random(2)
    for operator in ("=", "<>", "<", ">=", "+", "-", "*", "/", "%", "LIKE"):
        text = f"a {operator} B" if operator in ("=", "<>", "<", ">=", "LIKE") else None
        rule_filter = SqlFilter(text or f"a {operator} B = 1")
        for first in VALUES:
            for second in VALUES:
                cut = Cut(chance)
                cut.application_properties = {"a": first, "B": second}
                try:
                    assert rule_filter.matches(RuleMessage(cut)) in (True, False)
                except SqlFault as fault:
                    assert str(fault)


def test_any_action_makes_values_that_can_be_encoded_or_are_left_out():
    chance = random.Random(3)
    done = 0
    for _ in range(3000):
        try:
            action = RuleAction(f"SET {chance.choice(['a', 'sys.Label'])} = {parts(chance, 4)}")
        except ConfigurationError:
            continue
        message = RuleMessage(Cut(chance), {"TimeToLive": chance.choice(VALUES)})
        try:
            action.run(message)
        except SqlFault:
            continue
        done += 1
        for value in (*message.fields.values(), *message.properties.values()):
            assert isinstance(encode.simple(value), bytes)
    assert done > 150
