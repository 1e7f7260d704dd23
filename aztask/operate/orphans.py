"""Payloads that nothing refers to: ``aztask doctor --collect`` removes them.

Rules
1. A payload that anything still needs is never removed: `aztask.stores.payloads.holders` knows
   messages, dead letters, and what waits in the result store. Messages are only peeked.
2. A payload younger than `YOUNG_SECONDS` is never removed: its message may just be being sent.
3. A queue is seen in full if the service shows all its messages. If one queue is not, arguments and
   checkpoints are removed only once they are older than ``payload_lifetime``.
4. Results are removed when the result store has deleted their rows, values of `App.put` when their
   lifetime has ended.
5. All queues of the broker and the app's result store are read, and no others are: payloads whose
   names say that they belong to another broker stay. Older releases wrote names that say nothing:
   as long as there are such payloads, give each broker a container, or a folder in it, of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from aztask.app import App
from aztask.errors import AztaskError
from aztask.operate.action import Action, Progress
from aztask.stores.payloads.holders import HOUR, PayloadHolders, ended
from aztask.stores.payloads.payloads import Payloads
from aztask.stores.payloads.store import ListedPayload, PayloadKind, may_remove
from aztask.support.display import byte_text
from aztask.support.finding import Finding, failed, fine, warning

YOUNG_SECONDS: Final = HOUR


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


def collect(app: App, payloads: Payloads, now: float) -> CollectPayloads:
    """Remove the payloads that nothing refers to, `now`. Raises BrokerUnavailable."""
    retention = app.settings.result_retention_seconds
    lifetime = app.settings.payload_lifetime_seconds
    mark = payloads.mark
    listed = [each for each in payloads.store.list() if may_remove(each.name, mark)]
    gone = [each for each in listed if ended(each, now, retention, lifetime)]
    kinds = {PayloadKind.ARGUMENTS}
    if app.broker.capabilities.update or app.results is not None:
        kinds.add(PayloadKind.CHECKPOINT)  # else another app's result store may have them
    doubtful = [
        each
        for each in listed
        if each not in gone
        and each.kind in kinds
        and now - each.at >= YOUNG_SECONDS + HOUR  # its name has the beginning of the hour
    ]
    named = sorted({*app.queue_names(), app.settings.default_queue})
    needed = PayloadHolders(app.broker, app.results, named).needed([*gone, *doubtful])
    hidden = needed.hidden if doubtful else ""
    gone += [] if needed.hidden else doubtful
    gone = [each for each in gone if each.name not in needed.names]
    names = {each.name for each in gone}
    kept = [each for each in listed if each.name not in names]
    return CollectPayloads(app, len(gone), payloads, gone, kept, hidden)


@dataclass(slots=True)
class CollectPayloads(Action[None]):
    """Removes payloads.

    * `gone`: those that nothing refers to. `kept`: the others.
    * `hidden`: why some are kept that perhaps nothing needs, "" if none is.
    """

    name: ClassVar[str] = "payload-collect"

    payloads: Payloads
    gone: Sequence[ListedPayload]
    kept: Sequence[ListedPayload]
    hidden: str

    def __str__(self) -> str:
        return f"remove {_total(self.gone)}"

    def _act(self, progress: Progress) -> None:
        self.payloads.store.remove([each.name for each in self.gone])
        self.done = self.count


def _collected(app: App, payloads: Payloads, now: float) -> Iterator[Finding]:
    action = collect(app, payloads, now)
    if action.count:
        action.act()
    text = f"removed {_total(action.gone)}, kept {_total(action.kept)}"
    if action.hidden:
        days = app.settings.payload_lifetime_seconds / 86400
        yield warning(
            "payloads",
            "collect",
            text,
            f"{action.hidden}, so arguments are kept until they are {days:g} days old "
            "(payload_lifetime)",
        )
    else:
        yield fine("payloads", "collect", text)


def _total(listed: Sequence[ListedPayload]) -> str:
    size = sum(each.size for each in listed)
    return f"{len(listed):,} payload{'' if len(listed) == 1 else 's'} of {byte_text(size)}"
