"""What a service does under load: how fast it is, how long a message takes, and when it refuses.

Rules
1. A refusal is a no: what was refused is sent again under the same id, and is stored once.
2. `throttling` makes the service refuse, which other programs of the namespace or account feel. So
   it is one of the long proofs, which you ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Final

from aztask.errors import BrokerUnavailable, SendUnconfirmed
from aztask.message.envelope import Envelope
from aztask.operate.verifybench import LATE, WAIT, Bench, Refuted, Skipped
from aztask.queues.base import Receiver, Settled, Unknown
from aztask.settlement import Complete
from aztask.support.clock import monotonic, sleep
from aztask.support.threadpool import ThreadPool

MANY: Final = 400
BATCH: Final = 20
SINGLES: Final = 20
PAUSE: Final = 0.5
"""Seconds before a refused send, unless the service asks for more."""
PATIENCE: Final = 120.0
"""How long sends may be refused."""
THREADS: Final = 16
MOST: Final = 20_000
"""Sends after which a service that has refused none is left alone: a fraction of a cent."""


def throughput(bench: Bench) -> str:
    """Send `MANY` messages and complete them."""
    queue = bench.queue()
    envelopes = [Envelope(b"x" * 100, message_id=str(number)) for number in range(MANY)]
    began = monotonic()
    unsure: set[str] = set()
    refused = sum(
        _send(bench, queue, envelopes[start : start + BATCH], unsure)
        for start in range(0, MANY, BATCH)
    )
    sent = monotonic() - began
    began = monotonic()
    receiver = bench.receiver(queue)
    wanted = {each.message_id for each in envelopes}
    _each_once(_drain(receiver, wanted, unsure), wanted, unsure)
    completed = monotonic() - began
    if {each.envelope.message_id for each in receiver.receive(32, 1.0)} - unsure:
        raise Refuted("a message came again that had been completed")
    busy = f"; {refused} sends were refused as busy and made again" if refused else ""
    return (
        f"{MANY} messages sent at {MANY / sent:.0f}/s, and received and completed at "
        f"{MANY / completed:.0f}/s: each came once{busy}"
    )


def latency(bench: Bench) -> str:
    """Send single messages to a receiver that waits."""
    queue = bench.queue()
    receiver = bench.receiver(queue)
    bench.nothing(receiver, 0.5)  # it is connected
    sends, ages = [], []
    for number in range(SINGLES):
        began = monotonic()
        _send(bench, queue, [Envelope(b"x", message_id=str(number))], set())
        sends.append(monotonic() - began)
        delivery = bench.one(receiver)
        ages.append(monotonic() - began)
        bench.complete(receiver, delivery)
    if max(ages) > WAIT:
        raise Refuted(f"a message took {max(ages):.1f} s from its send to its receiver")
    return (
        f"a send takes {1000 * median(sends):.0f} ms, from send to receiver it is "
        f"{1000 * median(ages):.0f} ms (medians of {SINGLES}; the longest {1000 * max(ages):.0f})"
    )


def throttling(bench: Bench) -> str:
    """Send until the service refuses; what it has refused is not there, what it accepted is."""
    queue = bench.queue()
    accepted: set[str] = set()
    unsure: set[str] = set()
    refused: set[str] = set()
    until = monotonic() + LATE

    def send(name: str) -> None:
        if refused or monotonic() > until:
            return
        try:
            bench.broker.send(queue, [Envelope(b"x", message_id=name)])
        except SendUnconfirmed:
            unsure.add(name)
        except BrokerUnavailable:
            refused.add(name)
        else:
            accepted.add(name)

    began = monotonic()
    pool = ThreadPool("throttling", THREADS)
    try:
        for start in range(0, MOST, THREADS * BATCH):
            pool.map(send, [str(number) for number in range(start, start + THREADS * BATCH)])
            if refused or monotonic() > until:
                break
    finally:
        pool.close()
    seconds = monotonic() - began
    if not refused:
        raise Skipped(
            f"{len(accepted)} sends at {len(accepted) / seconds:.0f}/s, and none was refused"
        )
    _send(bench, queue, [Envelope(b"x", message_id="again")], unsure)  # once it accepts again
    wanted = {*accepted, "again"}
    _each_once(_drain(bench.receiver(queue), wanted, unsure), wanted, unsure)
    return (
        f"refused after {len(accepted)} sends at {len(accepted) / seconds:.0f}/s; all that was "
        "accepted was there, and nothing that was refused"
    )


def _send(bench: Bench, queue: str, envelopes: Sequence[Envelope], unsure: set[str]) -> int:
    """Send them until they are accepted; returns how often they were refused.

    * `unsure`: gets the ids of those that were sent again although they may have been stored.
    """
    left, until, refusals = list(envelopes), monotonic() + PATIENCE, 0
    while True:
        try:
            bench.broker.send(queue, left)
        except SendUnconfirmed as error:
            left = list(error.unconfirmed)
            unsure.update(each.message_id for each in left)
            refusals += 1
        except BrokerUnavailable as error:
            if monotonic() > until:
                raise
            refusals += 1
            sleep(max(PAUSE, error.retry_after or 0.0))
        else:
            return refusals


def _drain(receiver: Receiver, wanted: set[str], unsure: set[str]) -> Counter[str]:
    """How often each message came, until all that are wanted did, or none came for `LATE`.

    * `unsure`: gets the ids of those whose completion was not confirmed: they may come again.
    """
    found: Counter[str] = Counter()
    until = monotonic() + LATE
    while monotonic() < until and not wanted <= found.keys():
        deliveries = receiver.receive(32, WAIT)
        answers = receiver.settle([(each, Complete()) for each in deliveries])
        for delivery, answer in zip(deliveries, answers, strict=True):
            if isinstance(answer, Unknown):
                unsure.add(delivery.envelope.message_id)
            elif not isinstance(answer, Settled):
                raise Refuted(f"completing was answered with {type(answer).__name__}")
        found.update(each.envelope.message_id for each in deliveries)
        if deliveries:
            until = monotonic() + LATE
    return found


def _each_once(found: Counter[str], wanted: set[str], unsure: set[str]) -> None:
    """Raises Refuted unless each came once, and nothing else did; `unsure` ones may."""
    lost = wanted - found.keys()
    more = found.keys() - wanted - unsure
    twice = {name for name, count in found.items() if count > 1} - unsure
    if lost or more or twice:
        raise Refuted(
            f"of {len(wanted)} messages {len(lost)} were lost and {len(twice)} came twice; "
            f"{len(more)} came that had been refused"
        )
