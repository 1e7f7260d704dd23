"""A smoke run against the queues of a real service: what only it can show, check by check.

Rules
1. Each check has a queue of its own, whose name begins with `PREFIX` and the run's id.
   Nothing else is read or changed.
2. They are deleted at the end of the check. What a killed run has left is found by its prefix.
3. A check names the rule of docs/rules.md that it proves. It passes, fails with what was seen, or
   is skipped with the reason: the service cannot do it, or a permission is missing.
4. A report has no address, key or name of a queue that the run did not make.
"""

from __future__ import annotations

import html
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from aztask.app import App
from aztask.errors import AztaskError, CapabilityError, ConfigurationError, QueueNotFound
from aztask.message.envelope import Envelope
from aztask.operate.doctor import SKEW_SECONDS
from aztask.queues.base import (
    Broker,
    Delivery,
    Inspectable,
    Lost,
    QueueOptions,
    Receiver,
    Renewed,
    Settled,
)
from aztask.settlement import Abandon, Complete, DeadLetter, Defer, Settlement
from aztask.support.clock import monotonic
from aztask.support.display import mask
from aztask.support.versions import versions

PREFIX: Final = "aztask-verify-"
LOCK: Final = 6.0
"""Seconds of the lock: the service allows 5 at least, and requests to it take a part of that."""

WAIT: Final = 5.0
LATE: Final = 20.0
"""How long a message may take that is due."""


class Refuted(Exception):
    """What a check saw instead of what the rule says."""


class Skipped(Exception):
    """Why a check could not run."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What became of one check."""

    check: str
    rule: str
    state: Literal["passed", "failed", "skipped"]
    text: str
    seconds: float


@dataclass(slots=True)
class Bench:
    """The queues of one check, and what it does with them."""

    broker: Broker
    run: str
    check: str
    queues: list[str] = field(default_factory=list)
    receivers: list[Receiver] = field(default_factory=list)

    def queue(self, **options: Any) -> str:
        """A new queue with a lock of `LOCK` seconds. Raises Skipped if the service lacks it."""
        name = f"{PREFIX}{self.run}-{self.check}"
        lock = LOCK if self.broker.capabilities.fixed_lease else None
        self.queues.append(name)
        try:
            self.broker.declare(name, QueueOptions(lease=lock, **options))
        except CapabilityError as error:
            raise Skipped(str(error)) from None
        return name

    def send(self, queue: str, *bodies: bytes, **fields: Any) -> None:
        """Send messages, each with an id of its own unless one is given."""
        given = {"message_id": uuid.uuid4().hex, **fields}
        for body in bodies:
            each = given if "message_id" in fields else {**given, "message_id": uuid.uuid4().hex}
            self.broker.send(queue, [Envelope(body, **each)])

    def receiver(self, queue: str, **options: Any) -> Receiver:
        """A receiver that is closed at the end of the check."""
        made = self.broker.receiver(queue, lease=LOCK, **options)
        self.receivers.append(made)
        return made

    def one(self, receiver: Receiver, wait: float = LATE) -> Delivery:
        """The next message. Raises Refuted if none comes."""
        until = monotonic() + wait
        while monotonic() < until:
            if found := receiver.receive(1, min(WAIT, max(0.1, until - monotonic()))):
                return found[0]
        raise Refuted(f"no message within {wait:g} s")

    def nothing(self, receiver: Receiver, wait: float = 2.0) -> None:
        """Raises Refuted if a message comes."""
        if found := receiver.receive(1, wait):
            raise Refuted(
                f"a message came that no receiver may have now: {found[0].envelope.body!r}"
            )

    def settle(self, receiver: Receiver, delivery: Delivery, settlement: Settlement) -> object:
        """The answer to one settlement."""
        (answer,) = receiver.settle([(delivery, settlement)])
        return answer

    def complete(self, receiver: Receiver, delivery: Delivery) -> None:
        """Complete it. Raises Refuted for any other answer."""
        if not isinstance(answer := self.settle(receiver, delivery, Complete()), Settled):
            raise Refuted(f"completing was answered with {type(answer).__name__}")

    def close(self) -> str:
        """Close what was opened, and delete the queues. Returns what is left behind, "" usually."""
        for receiver in self.receivers:
            receiver.close()
        left = []
        for queue in self.queues:
            try:
                self.broker.delete(queue)
            except QueueNotFound:
                continue
            except AztaskError:  # the reason why the check failed, too; or it is found by --clean
                left.append(queue)
        return f"; what may be left: {', '.join(left)}" if left else ""


# -- the checks ------------------------------------------------------------------------------------


def _queue(bench: Bench) -> str:
    queue = bench.queue(max_deliveries=20 if bench.broker.capabilities.own_limits else None)
    if not isinstance(bench.broker, Inspectable):
        raise Skipped("its settings cannot be read")
    facts = bench.broker.inspector().facts(queue)
    if facts.unread:
        raise Skipped(facts.unread)
    if facts.exists is False or (facts.lease_seconds or LOCK) != LOCK:
        raise Refuted(f"exists {facts.exists}, lock {facts.lease_seconds} s")
    return f"created, with a lock of {facts.lease_seconds or LOCK:g} s"


def _lock(bench: Bench) -> str:
    queue = bench.queue()
    bench.send(queue, b"x")
    receiver = bench.receiver(queue)
    delivery = bench.one(receiver)
    bench.nothing(bench.receiver(queue))
    bench.complete(receiver, delivery)
    bench.nothing(bench.receiver(queue))
    return "one receiver had it, and completing removed it"


def _renewal(bench: Bench) -> str:
    queue = bench.queue()
    bench.send(queue, b"x")
    receiver, other = bench.receiver(queue), bench.receiver(queue)
    delivery = bench.one(receiver)
    began = monotonic()
    while monotonic() - began < 1.5 * LOCK:
        bench.nothing(other, LOCK * 0.4)
        (answer,) = receiver.renew([delivery])
        if not isinstance(answer, Renewed):
            raise Refuted(f"a renewal was answered with {type(answer).__name__}")
    bench.complete(receiver, delivery)
    return f"held for {monotonic() - began:.0f} s under a lock of {LOCK:g} s"


def _lapse(bench: Bench) -> str:
    queue = bench.queue()
    bench.send(queue, b"x")
    receiver = bench.receiver(queue)
    late = bench.one(receiver)
    began = monotonic()
    other = bench.receiver(queue)
    again = bench.one(other, LOCK + LATE)
    after = monotonic() - began
    if again.delivery_count != 2:
        raise Refuted(f"the delivery count is {again.delivery_count}")
    answer = bench.settle(receiver, late, Complete())
    if not isinstance(answer, Lost):
        raise Refuted(f"a late settlement was answered with {type(answer).__name__}")
    bench.complete(other, again)
    return f"delivered again after {after:.1f} s, and the late settlement changed nothing"


def _sessions(bench: Bench) -> str:
    if not bench.broker.capabilities.sessions:
        raise Skipped("the service has no sessions")
    queue = bench.queue(sessions=True)
    for body, session in ((b"a1", "a"), (b"b1", "b"), (b"a2", "a")):
        bench.send(queue, body, session=session)
    first, second = bench.receiver(queue, session="a"), bench.receiver(queue, session="b")
    got = [bench.one(first), bench.one(first)]
    if [each.envelope.body for each in got] != [b"a1", b"a2"]:
        raise Refuted(f"the order was {[each.envelope.body for each in got]}")
    bench.nothing(bench.receiver(queue, session="a"))
    bench.complete(second, bench.one(second))
    for each in got:
        bench.complete(first, each)
    return "in order, and one receiver for each session"


def _deferral(bench: Bench) -> str:
    if not bench.broker.capabilities.defer:
        raise Skipped("the service defers nothing")
    queue = bench.queue()
    bench.send(queue, b"x")
    receiver = bench.receiver(queue)
    delivery = bench.one(receiver)
    if not isinstance(bench.settle(receiver, delivery, Defer()), Settled):
        raise Refuted("it was not deferred")
    bench.nothing(receiver)
    found = receiver.receive_deferred([delivery.position])
    if len(found) != 1:
        raise Refuted("its number does not find it")
    bench.complete(receiver, found[0])
    return f"found by its number alone, with the delivery count {found[0].delivery_count}"


def _duplicates(bench: Bench) -> str:
    if not bench.broker.capabilities.duplicate_detection:
        raise Skipped("the service detects no duplicates")
    queue = bench.queue(duplicate_window=60.0)
    bench.send(queue, b"first", message_id="one")
    bench.send(queue, b"again", message_id="one")
    bench.send(queue, b"clone", message_id="two")
    receiver = bench.receiver(queue)
    got = [bench.one(receiver), bench.one(receiver)]
    if [each.envelope.body for each in got] != [b"first", b"clone"]:
        raise Refuted(f"there came {[each.envelope.body for each in got]}")
    bench.nothing(receiver)
    for each in got:
        bench.complete(receiver, each)
    return "the second message of one id was dropped, one of another id was not"


def _scheduled(bench: Bench) -> str:
    queue = bench.queue()
    began = monotonic()
    bench.send(queue, b"later", delay=4.0)
    receiver = bench.receiver(queue)
    delivery = bench.one(receiver, 4.0 + LATE)
    took = monotonic() - began
    if took < 3.0:
        raise Refuted(f"it came after {took:.1f} s, and was due after 4 s")
    bench.complete(receiver, delivery)
    return f"due after 4 s, received after {took:.1f} s"


def _dead_letters(bench: Bench) -> str:
    queue = bench.queue()
    bench.send(queue, b"x")
    receiver = bench.receiver(queue)
    delivery = bench.one(receiver)
    bench.settle(receiver, delivery, Abandon())
    again = bench.one(receiver)
    if again.delivery_count != 2:
        raise Refuted(f"the delivery count is {again.delivery_count}")
    bench.settle(receiver, again, DeadLetter("why", "because"))
    dead = bench.receiver(queue, dead_letter=True)
    found = bench.one(dead)
    if (found.dead_letter_reason, found.dead_letter_description) != ("why", "because"):
        raise Refuted(f"its reason is {found.dead_letter_reason!r}")
    bench.complete(dead, found)
    return "kept with its reason and description"


def _clock(bench: Bench) -> str:
    queue = bench.queue()
    if not isinstance(bench.broker, Inspectable):
        raise Skipped("its clock cannot be read")
    inspector = bench.broker.inspector()
    inspector.facts(queue)  # a Storage queue's answers say what time it is there
    offset = inspector.clock_offset(queue)
    if offset is None:
        raise Skipped("its clock cannot be read")
    if abs(offset) >= SKEW_SECONDS:
        raise Refuted(f"the service's clock and this machine's are {offset:+.1f} s apart")
    return f"{offset:+.1f} s from this machine's"


CHECKS: Final[Mapping[str, tuple[str, Callable[[Bench], str]]]] = {
    "queue": ("5", _queue),
    "lock": ("1", _lock),
    "renewal": ("15", _renewal),
    "lapse": ("14", _lapse),
    "sessions": ("order within a session", _sessions),
    "deferral": ("10", _deferral),
    "duplicates": ("16", _duplicates),
    "scheduled": ("11", _scheduled),
    "dead-letters": ("12", _dead_letters),
    "clock": ("11", _clock),
}
"""{check: (a rule of docs/rules.md by its number, or a promise of its last table; what runs)}"""

NOT_COVERED: Final = (
    "the transactions of Azure Tables, and blobs that are appended to",
    "each role of Entra ID by itself, and what it is refused",
    "throughput, throttling, and links that are idle for long",
)


def verify(app: App, names: Sequence[str] = (), *, run: str = "") -> Iterator[Proof]:
    """Run the checks, each with its queues, and yield each result at once.

    * `names`: of checks; empty for all.
    * `run`: the id of the run, in the names of its queues; a new one by default.

    If the process dies, `leftovers` finds its queues. Raises BrokerUnavailable if nothing answers.
    """
    broker = app.broker
    if not broker.capabilities.remote:
        raise ConfigurationError(
            f"{app.address} is no service: name a namespace or an account in AZTASK_BROKER"
        )
    run = run or uuid.uuid4().hex[:8]
    for name in names or CHECKS:
        rule, check = CHECKS[name]
        bench, began = Bench(broker, run, name), monotonic()
        state: Literal["passed", "failed", "skipped"] = "failed"
        try:
            text, state = check(bench), "passed"
        except Skipped as why:
            text, state = str(why), "skipped"
        except (Refuted, AztaskError) as why:
            text = str(why)
        finally:
            left = bench.close()
        yield Proof(name, rule, state, mask(text + left), round(monotonic() - began, 2))


def leftovers(app: App) -> list[str]:
    """The queues that runs before this one have left."""
    return [name for name in app.broker.queues() if name.startswith(PREFIX)]


# -- the report ------------------------------------------------------------------------------------


def report(app: App, proofs: Sequence[Proof]) -> dict[str, Any]:
    """The report as JSON (rule 4)."""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "service": app.broker.capabilities.name,
        "versions": versions(),
        "proofs": [asdict(each) for each in proofs],
        "not covered": list(NOT_COVERED),
    }


def as_html(found: Mapping[str, Any]) -> str:
    """The report as a page."""

    def cells(each: Mapping[str, Any]) -> str:
        return "".join(f"<td>{html.escape(str(value))}</td>" for value in each.values())

    rows = [f"<tr>{cells(each)}</tr>" for each in found["proofs"]]
    about = html.escape(f"{found['service']}, {found['at']}, aztask {found['versions']['aztask']}")
    missing = "".join(f"<li>{html.escape(each)}</li>" for each in found["not covered"])
    head = "".join(f"<th>{each}</th>" for each in ("check", "rule", "state", "seen", "seconds"))
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">\n'
        "<title>aztask azure verify</title>\n"
        f"<h1>aztask azure verify</h1>\n<p>{about}</p>\n<table border>\n<tr>{head}</tr>\n"
        + "\n".join(rows)
        + f"\n</table>\n<p>Not covered:</p>\n<ul>{missing}</ul>\n</html>\n"
    )
