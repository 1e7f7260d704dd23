"""An emulator whose time and whose loop a test turns by hand, and clients without a socket."""

from __future__ import annotations

from amqpwire import Wire

from aztask.emulator.amqp import encode, sections
from aztask.emulator.amqp.performatives import Attach, Transfer
from aztask.emulator.amqp.sections import cut
from aztask.emulator.broker.client import Client
from aztask.emulator.broker.entities import Entity
from aztask.emulator.broker.producer import new_message
from aztask.emulator.config import Options
from aztask.emulator.emulator import Emulator
from aztask.support.clock import Clock


def message(body=b"body", **properties):
    """An encoded message: its id and session, and application properties."""
    fields = [encode.NULL] * 13
    for name, index in (("message_id", 0), ("label", 3), ("session", 10)):
        if name in properties:
            fields[index] = encode.string(properties.pop(name))
    pairs = [(encode.string(name), encode.simple(value)) for name, value in properties.items()]
    return (
        encode.fields(sections.PROPERTIES, fields)
        + encode.described(sections.APPLICATION_PROPERTIES, encode.map_of(pairs))
        + encode.described(sections.DATA, encode.binary(body))
    )


def body_of(raw):
    """The body of an encoded message."""
    found = cut(raw)
    start, end = found.data_items[0]
    return found.raw[start:end]


class Bench:
    """A real emulator without sockets. Its clock stands still until a test sets `now`."""

    def __init__(self, **options):
        self.now = 1_000_000.0
        clock = Clock(lambda: self.now, lambda: self.now)
        self.emulator = Emulator(Options(**options), clock=clock)
        self.broker = self.emulator.broker
        self.engine, self.namespace = self.broker.engine, self.broker.namespace
        self._calls = []
        self.broker.committer._soon = self._calls.append
        self.broker.dispatcher.plan_flush = self.broker.committer.plan_flush

    def create(self, path, **settings):
        return self.namespace.create(Entity(path, **settings))

    def put(self, path, *raw):
        """Store encoded messages as if a client had sent them; return their sequence numbers."""
        entity = self.namespace.get(path)
        new = [new_message(entity, each, self.now) for each in raw]
        return self.engine.send(path, new)

    def turn(self):
        """Run what the loop would run, until it is idle."""
        while self._calls:
            calls, self._calls[:] = list(self._calls), []
            for call in calls:
                call()

    def client(self):
        return BenchClient(self)


class BenchClient(Wire):
    """A client that has opened its connection and begun a session."""

    def __init__(self, bench):
        self.bench = bench
        super().__init__(Client(bench.broker))
        self.started()
        self._requests = 0

    def frames(self):
        self.bench.turn()
        return super().frames()

    def send(self, delivery_id, payload, *, handle=0, **options):
        """Send one message on an attached link; return the answers."""
        self.transfer(delivery_id, payload, handle=handle, **options)
        return [each for each in self.frames() if type(each).__name__ != "Flow"]

    def receive(self, credit, *, handle=0):
        """Grant credit; return the transfers that it brings."""
        self.flow(credit, handle=handle)
        return [each for each in self.frames() if isinstance(each, Transfer)]

    def request(
        self, node, operation, body=encode.NULL, *, handle=4, state=encode.NULL, **properties
    ):
        """Send a request to a node over links of its own; return (status, condition, body)."""
        name = f"answers-{handle}"
        for receive in (True, False):
            number = handle + (0 if receive else 1)
            answers = self.attach(receive=receive, handle=number, address=node, end=name)
            assert isinstance(answers[0], Attach)
            assert (answers[0].source and answers[0].target) is not None, answers
        self.flow(5, handle=handle)
        pairs = {"operation": operation, **properties}
        fields = [encode.string("id"), *[encode.NULL] * 3, encode.string(name)]
        self.transfer(
            0,
            encode.fields(sections.PROPERTIES, fields)
            + encode.described(
                sections.APPLICATION_PROPERTIES,
                encode.map_of([(encode.string(k), encode.simple(v)) for k, v in pairs.items()]),
            )
            + encode.described(sections.AMQP_VALUE, body),
            handle=handle + 1,
            state=state,
        )
        (response,) = [each for each in self.frames() if isinstance(each, Transfer)]
        for number in (handle, handle + 1):
            self.detach(number)
        found = cut(response.payload)
        answer = found.application_properties
        status = answer.get("statusCode", answer.get("status-code"))
        condition = answer.get("errorCondition", answer.get("error-condition"))
        return status, condition, sections.value_body(found)
