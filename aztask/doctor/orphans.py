"""Payloads that nothing refers to: ``aztask doctor --collect`` removes them.

Rules
1. A payload that a message or a dead letter refers to is never removed. Messages are only peeked.
2. A payload younger than `YOUNG_SECONDS` is never removed: its message may just be being sent.
3. A queue is seen in full if the service shows all its messages. If one queue is not, arguments and
   checkpoints are removed only once they are older than ``payload_lifetime``.
4. Results are removed when the result store has deleted their rows, values of `App.put` when their
   lifetime has ended.
5. All queues of the broker are read, and no other broker is: a container, or a folder in it,
   belongs to one broker.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from aztask.app import App
from aztask.brokers.base import Broker, Peeked
from aztask.errors import AztaskError, BrokerUnavailable, DecodeError, QueueNotFound
from aztask.message.headers import PAYLOAD, SAVED
from aztask.message.payload import StoredValue, stored_in
from aztask.payloads.ageing import HOUR, ended
from aztask.payloads.payloads import Payloads
from aztask.payloads.store import Kind, Listed
from aztask.support.display import byte_text
from aztask.support.finding import Finding, failed, fine, warning

YOUNG_SECONDS: Final = HOUR
PAGE: Final = 500


@dataclass(frozen=True, slots=True)
class QueueView:
    """What was seen of queues. names: payloads that their messages refer to.

    hidden: why messages may have been missed, "" if all were seen.
    """

    names: frozenset[str]
    hidden: str = ""


def payload_findings(app: App, *, collect: bool = False) -> Iterator[Finding]:
    """Check the store of payloads, and remove what nothing refers to if `collect` is True."""
    payloads = app.payloads
    if payloads is None:
        yield fine(
            "payloads",
            "payloads",
            "large arguments are refused; to store them, set AZTASK_PAYLOADS",
        )
        return
    try:
        store = payloads.store
        next(iter(store.list()), None)
        over = byte_text(payloads.threshold)
        yield fine("payloads", "payloads", f"arguments of more than {over} are stored in {store}")
        if collect:
            yield from _collected(app, payloads, time.time())
    except AztaskError as error:
        yield failed("payloads", "payloads", error)


def _collected(app: App, payloads: Payloads, now: float) -> Iterator[Finding]:
    retention = app.settings.result_retention_seconds
    lifetime = app.settings.payload_lifetime_seconds
    listed = list(payloads.store.list())
    gone = [each for each in listed if ended(each, now, retention, lifetime)]
    kinds = {Kind.ARGUMENTS}
    if app.broker.capabilities.update:  # else the result store has them, too
        kinds.add(Kind.CHECKPOINT)
    doubtful = [
        each
        for each in listed
        if each not in gone
        and each.kind in kinds
        and now - each.at >= YOUNG_SECONDS + HOUR  # its name has the beginning of the hour
    ]
    hidden = ""
    if doubtful or any(each.kind in (Kind.ARGUMENTS, Kind.CHECKPOINT) for each in gone):
        view = seen(app.broker, sorted({*app.queue_names(), app.settings.default_queue}))
        hidden = view.hidden if doubtful else ""
        gone += [] if view.hidden else doubtful
        gone = [each for each in gone if each.name not in view.names]
    payloads.store.remove([each.name for each in gone])
    names = {each.name for each in gone}
    kept = [each for each in listed if each.name not in names]
    text = f"removed {_total(gone)}, kept {_total(kept)}"
    if hidden:
        days = lifetime / 86400
        yield warning(
            "payloads",
            "collect",
            text,
            f"{hidden}, so arguments are kept until they are {days:g} days old (payload_lifetime)",
        )
    else:
        yield fine("payloads", "collect", text)


def seen(broker: Broker, named: Sequence[str]) -> QueueView:
    """The payloads to which messages and dead letters refer, in all queues of the broker.

    * `named`: the queues that the app names, for brokers that do not list their queues.

    A message moves while this reads: a dead letter that is replayed becomes a message of the queue.
    So each queue is read, then its dead letters, then the queue again.
    """
    hidden = ""
    try:
        queues: Sequence[str] = broker.queues()
    except BrokerUnavailable:
        raise
    except AztaskError as error:
        queues, hidden = named, f"the queues cannot be listed ({error})"
    names: set[str] = set()
    for queue in queues:
        try:
            for dead in (False, True, False):
                complete = _read(broker, queue, names, dead=dead)
                if not complete:
                    hidden = hidden or f"the service does not show all messages of {queue}"
        except QueueNotFound:
            continue
    return QueueView(frozenset(names), hidden)


def _read(broker: Broker, queue: str, names: set[str], *, dead: bool) -> bool:
    """Add the payloads of a queue's messages to `names`; False if some could not be seen."""
    found = broker.peek(queue, dead_letter=dead, limit=PAGE)
    count = 0
    while found:
        count += len(found)
        for each in found:
            names.update(_names_in(each))
        if not broker.capabilities.paged_peek:
            break
        found = broker.peek(queue, dead_letter=dead, after=found[-1].position, limit=PAGE)
    if broker.capabilities.paged_peek:
        return True
    stats = broker.stats(queue)  # these counts are never too low
    return count >= ((stats.dead if dead else stats.living) or 0)


def _names_in(peeked: Peeked) -> Iterator[str]:
    """The payloads that a message refers to. The message is not decoded, so it may be damaged."""
    headers = peeked.envelope.headers
    reference, saved = headers.get(PAYLOAD), headers.get(SAVED)
    if isinstance(reference, str):
        with suppress(DecodeError):
            yield StoredValue.parse(reference).name
    stored = stored_in(saved) if isinstance(saved, bytes) else None
    if stored is not None:
        yield stored.name


def _total(listed: Sequence[Listed]) -> str:
    size = sum(each.size for each in listed)
    return f"{len(listed):,} payload{'' if len(listed) == 1 else 's'} of {byte_text(size)}"
