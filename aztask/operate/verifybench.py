"""What one check of `aztask.operate.verify` has: queues, a table and a container of its own.

Rules
1. A name begins with `PREFIX`, a table's with `TABLE_PREFIX`; then follow the run's id and the
   check's name.
2. What is made is noted before, so that `Bench.close` deletes it. `leftovers` finds what a killed
   run has left, by such names.
3. The libraries of the storage account are imported only if the app names one.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aztask.address.addresses import BlobAddress, TablesAddress
from aztask.app import App
from aztask.errors import AztaskError, CapabilityError, QueueNotFound
from aztask.message.envelope import Envelope
from aztask.queues.base import (
    Broker,
    Delivery,
    QueueOptions,
    Receiver,
    Settled,
)
from aztask.settlement import Complete, Settlement
from aztask.stores.layout import SqlLayout, TablesLayout
from aztask.stores.rows import Kind, Rows
from aztask.support.clock import SYSTEM_CLOCK, monotonic
from aztask.support.late import install_command

if TYPE_CHECKING:
    from aztask.azure.trials import TrialContainer

PREFIX: Final = "aztask-verify-"
TABLE_PREFIX: Final = "aztaskverify"
"""A table's name has letters and digits only."""

MADE: Final = re.compile(rf"(?:{PREFIX}[0-9a-f]{{8}}-|{TABLE_PREFIX}[0-9a-f]{{8}})[a-z-]+")
"""The whole name of what a run makes: what only begins so may be yours."""

LOCK: Final = 6.0
"""Seconds of the lock: the service allows 5 at least, and requests to it take a part of that."""

WAIT: Final = 5.0
LATE: Final = 20.0
"""How long a message may take that is due."""


class Refuted(Exception):
    """What a check saw instead of what the rule says."""


class Skipped(Exception):
    """Why a check could not run."""


NUMBERS: Final = Kind({"number": int}, SqlLayout("numbers", "numbers"), TablesLayout("N", "n"))
"""The rows of the checks. They are in Azure Tables only."""


class Leftover(NamedTuple):
    """A queue, table or container that a run has made, and how it is deleted."""

    what: str
    name: str
    delete: Callable[[], None]


@dataclass(slots=True)
class Bench:
    """The queues of one check, its table and its container, and what it does with them."""

    app: App
    run: str
    check: str
    queues: list[str] = field(default_factory=list)
    receivers: list[Receiver] = field(default_factory=list)
    others: list[Leftover] = field(default_factory=list)
    outage: bool = False
    """Whether the check ended because nothing answered."""

    @property
    def broker(self) -> Broker:
        """The broker of the app."""
        return self.app.broker

    @property
    def name(self) -> str:
        """What a queue or a container of this check is called."""
        return f"{PREFIX}{self.run}-{self.check}"

    def rows(self) -> Rows:
        """The rows of a new table. Raises Skipped if the app has no result store in one."""
        address = tables_of_app(self.app)
        if address is None:
            raise Skipped("the app has no results in Azure Tables; AZTASK_RESULTS may name them")
        client = late_module("stores.tables.client", "tables")
        name = f"{TABLE_PREFIX}{self.run}{self.check}"
        requests = client.TableRequests(address, name)
        self.others.append(_table_left(client, requests, name))
        requests.create(client.TimeBudget())
        store = late_module("stores.tables.store", "tables").TablesStore(requests, SYSTEM_CLOCK)
        rows: Rows = store.of(NUMBERS)
        return rows

    def container(self) -> tuple[TrialContainer, BlobAddress]:
        """A new container, and where it is. Raises Skipped if the app names no account for it."""
        address = _blobs(self.app)
        if address is None:
            raise Skipped("the app names no storage account: see events_container, AZTASK_RESULTS")
        address = replace(address, container=self.name)
        made: TrialContainer = late_module("azure.trials", "blob").TrialContainer(address)
        self.others.append(Leftover("container", self.name, made.delete))
        made.create()
        return made, address

    def queue(self, **options: Any) -> str:
        """A new queue with a lock of `LOCK` seconds. Raises Skipped if the service lacks it."""
        name = self.name
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

    def one(self, receiver: Receiver, wait: float | None = None) -> Delivery:
        """The next message, within `LATE` seconds by default. Raises Refuted if none comes."""
        wait = LATE if wait is None else wait
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

    def close(self, *, keep: bool = False) -> str:
        """Close what was opened, and delete what was made. Returns what is left, "" usually.

        * `keep`: delete nothing.
        """
        for receiver in self.receivers:
            with suppress(AztaskError):  # its messages go with the queue
                receiver.close()
        self.receivers.clear()
        if keep:
            return ""
        left = []
        for each in (*(_queue_left(self.app, name) for name in self.queues), *self.others):
            try:
                each.delete()
            except QueueNotFound:
                continue
            except Exception:  # noqa: BLE001  # as in the check; it is named, and --clean finds it
                left.append(each.name)
        return f"; what may be left: {', '.join(left)}" if left else ""


def _queue_left(app: App, name: str) -> Leftover:
    return Leftover("queue", name, lambda: app.broker.delete(name))


def _table_left(client: Any, requests: Any, name: str) -> Leftover:
    def delete() -> None:
        try:
            requests.drop(client.TimeBudget())
        finally:
            requests.close()

    return Leftover("table", name, delete)


# -- the storage account: its libraries are imported only if the app names one ---------------------


def tables_of_app(app: App) -> TablesAddress | None:
    """The account of the result store, if that is in Azure Tables."""
    address = getattr(app.results, "address", None)
    return address if isinstance(address, TablesAddress) else None


def _blobs(app: App) -> BlobAddress | None:
    """The account of the events' container, else that of the result store; with no container."""
    if (events := app.settings.events_target) is not None:
        return replace(events, container="", prefix="")
    if (tables := tables_of_app(app)) is None:
        return None
    return BlobAddress(tables.account, tables.blob_endpoint, "", "", tables.key, tables.signature)


def late_module(name: str, extra: str) -> Any:
    """A module of aztask that needs an extra. Raises Skipped if its library is missing."""
    try:
        return import_module(f"aztask.{name}")
    except ImportError as error:
        raise Skipped(f"{error.name} is missing: {install_command(extra)}") from None


# -- what killed runs have left --------------------------------------------------------------------


def leftovers(app: App) -> Iterator[Leftover]:
    """The queues, tables and containers that runs have left, also one that goes on now."""
    for name in app.broker.queues():
        if MADE.fullmatch(name):
            yield _queue_left(app, name)
    for others in (_tables_left, _containers_left):
        with suppress(Skipped):  # without the library, no run has made any
            yield from others(app)


def _tables_left(app: App) -> Iterator[Leftover]:
    if (address := tables_of_app(app)) is not None:
        client = late_module("stores.tables.client", "tables")
        for name in filter(MADE.fullmatch, client.tables_of(address, TABLE_PREFIX)):
            yield _table_left(client, client.TableRequests(address, name), name)


def _containers_left(app: App) -> Iterator[Leftover]:
    if (address := _blobs(app)) is not None:
        trials = late_module("azure.trials", "blob")
        for name in filter(MADE.fullmatch, trials.containers_of(address, PREFIX)):
            container = trials.TrialContainer(replace(address, container=name))
            yield Leftover("container", name, container.delete)
