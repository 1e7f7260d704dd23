"""A broker over several addresses of one kind: each queue of the service lives at one of them.

Rules
1. Which one, the layout of the queue says (`aztask.address.shards`): a shard never moves. All that
   is done with a queue of the service is done at its address.
2. An address that does not answer rests. Its failing is logged once, and a thread of its own asks
   it until it answers: no thread that receives or sends waits for that. The other addresses are
   used as before, and the ids of new tasks are drawn for them.
3. Only what is certain to be unsent is refused: a send to an address that rests is tried all the
   same, for another thread's failure says nothing about this one.
4. An address is opened when it is first used, so a damaged file does not keep the others closed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeVar

from aztask.address.shards import read_shard_name, shard_name
from aztask.errors import (
    AztaskError,
    BrokerUnavailable,
    CapabilityError,
    ConfigurationError,
    QueueDisabled,
    QueueNotFound,
    SendUnconfirmed,
)
from aztask.message.envelope import Envelope
from aztask.queues.base import (
    AnySession,
    Broker,
    Capabilities,
    Inspectable,
    Inspector,
    Listing,
    Networked,
    Peeked,
    Permission,
    Position,
    QueueFacts,
    QueueOptions,
    QueueStats,
    Receiver,
)
from aztask.queues.kinds import BrokerKind, Opening
from aztask.queues.sharded.layouts import ShardLayouts
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.finding import Finding, problem
from aztask.support.threadpool import ThreadPool

logger = logging.getLogger(__name__)

SHORTEST_REST: Final = 0.5
LONGEST_REST: Final = 15.0
"""Seconds for which an address or a shard that failed rests; they double with each failure."""

Answer = TypeVar("Answer")


def is_silent(error: BaseException | None) -> bool:
    """Whether the error is that of an address which does not answer, and not of one queue alone.

    A busy one answers, and its adapter slows down by itself.
    """
    alone = isinstance(error, QueueDisabled)
    return isinstance(error, BrokerUnavailable) and not error.busy and not alone


class Home:
    """One address: its name without credentials, and its broker, opened when it is first used."""

    def __init__(self, name: str, kind: BrokerKind, target: object, opening: Opening) -> None:
        self.name = name
        self.kind = kind
        self._target, self._opening = target, opening
        self._broker: Broker | None = None
        self._lock = threading.Lock()

    @property
    def broker(self) -> Broker:
        """Its broker. Raises what opening it raises, each time."""
        found = self._broker
        if found is None:
            with self._lock:
                found = self._broker = self._broker or self.kind.open(self._target, self._opening)
        return found

    def close(self) -> None:
        """Close its broker, if it was opened."""
        if self._broker is not None:
            self._broker.close()


class Outages:
    """Which addresses do not answer. Any thread may call."""

    def __init__(self, homes: Sequence[Home], clock: Clock = SYSTEM_CLOCK) -> None:
        self._homes = {each.name: each for each in homes}
        self._clock = clock
        self._lock = threading.Lock()
        self._down: dict[str, tuple[float, float, BrokerUnavailable]] = {}
        self._askers = ThreadPool("addresses", len(homes))
        self._closed = False

    def answers(self, name: str, queue: str) -> bool:
        """False while the address rests; a thread asks for one of its queues then and when."""
        found = self._down.get(name)
        if found is None:
            return True
        asks_at, seconds, error = found
        now = self._clock.monotonic()
        with self._lock:
            due = self._down.get(name) is found and now >= asks_at and not self._closed
            if due:  # no other thread asks until this answer is there
                self._down[name] = (float("inf"), seconds, error)
        if due:
            self._askers.submit(lambda: self._ask(name, queue))
        return False

    def failed(self, name: str, error: BaseException | None) -> None:
        """A call to the address raised an error; it rests if it does not answer."""
        if not isinstance(error, BrokerUnavailable) or not is_silent(error):
            return
        with self._lock:
            if name in self._down:
                return
            self._down[name] = (self._clock.monotonic() + SHORTEST_REST, SHORTEST_REST, error)
        logger.warning(
            "broker address %s does not answer; its shards rest, and the others go on: %s",
            name,
            error,
        )

    def error(self, name: str) -> BrokerUnavailable | None:
        """Why the address rests; None if it does not."""
        found = self._down.get(name)
        return None if found is None else found[2]

    def _ask(self, name: str, queue: str) -> None:
        """A peek goes where messages go; counts are the business of another part of Service Bus."""
        home, silent = self._homes[name], True
        try:
            if home.kind.capabilities.remote:
                home.broker.peek(queue, limit=1)
            else:
                home.broker.stats(queue)
            silent = False
        except AztaskError as error:
            silent = is_silent(error)  # else it answers, whatever it says
        finally:  # also after an error of an SDK
            if silent:
                with self._lock:
                    _, seconds, why = self._down.get(name, (0.0, SHORTEST_REST, None))
                    seconds = min(LONGEST_REST, 2.0 * seconds)
                    if why is not None:  # no send has come through in between
                        self._down[name] = (self._clock.monotonic() + seconds, seconds, why)
            else:
                self.works(name)

    def works(self, name: str) -> None:
        """A message went to the address, or could be read there."""
        if name not in self._down:
            return
        with self._lock:
            found = self._down.pop(name, None)
        if found is not None:
            logger.info("broker address %s answers again", name)

    def close(self) -> None:
        """End the threads; what they ask for now is not waited for."""
        self._closed = True
        self._askers.close()


class AddressBroker:
    """The broker of an app with several addresses, under a `ShardedBroker`. Any thread may call."""

    def __init__(
        self, homes: Sequence[Home], layouts: ShardLayouts, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """homes: of one kind, in the order of the code."""
        self.homes = {each.name: each for each in homes}
        self.layouts = layouts
        self.outages = Outages(homes, clock)
        first = homes[0].kind.capabilities
        # Calls may wait for one file while others are free, as for a service.
        self._capabilities = replace(first, remote=True)

    @property
    def capabilities(self) -> Capabilities:
        """What the service can do, and its limits."""
        return self._capabilities

    def home_of(self, name: str) -> str:
        """The address at which a queue of the service lives, if it exists."""
        queue, number = read_shard_name(name)
        return self.layouts.layout(queue).home(number, self.layouts.addresses)

    def has(self, queue: str, number: int) -> bool:
        """Whether the address of a shard is one of the app's."""
        return self.home_of(shard_name(queue, number)) in self.homes

    def _at(self, name: str) -> Broker:
        """Raises QueueNotFound for one that was left at an address that the app no longer has."""
        home = self.home_of(name)
        if home not in self.homes:
            raise QueueNotFound(f"queue {name!r} was at {home}, which this app no longer names")
        return self.homes[home].broker

    def check_name(self, queue: str) -> None:
        """Raise InvalidQueueName unless the service allows the name."""
        next(iter(self.homes.values())).kind.check_name(queue)

    # -- queues ------------------------------------------------------------------------------

    def declare(self, queue: str, options: QueueOptions = QueueOptions()) -> None:
        """Create the queue at its address, or apply the options to the existing one."""
        self._at(queue).declare(queue, options)

    def delete(self, queue: str) -> None:
        """Delete the queue. Raises QueueNotFound."""
        self._at(queue).delete(queue)

    def listing(self) -> Listing:
        """The queues of all addresses that answer."""
        found: list[Listing] = []
        errors: list[BrokerUnavailable] = []
        for home in self.homes.values():
            try:
                found.append(home.broker.listing())
            except BrokerUnavailable as error:
                self.outages.failed(home.name, error)
                errors.append(error)
        if not found:
            raise errors[0]
        names = {name for each in found for name in each.queues}
        foreign = {name for each in found for name in each.foreign}
        return Listing(tuple(sorted(names)), tuple(sorted(foreign - names)))

    def strays(self, queues: Collection[str]) -> Iterator[tuple[str, QueueStats]]:
        """What lies at an address in a queue of the service that is not read there, by address.

        queues: the names without the shards. Such messages come from a program that was refused
        too late, or from a list that began with another address.
        """
        for home in self.homes.values():
            names: list[str] = []
            with suppress(ConfigurationError):  # some may use their queues, but not list all
                names = home.broker.queues() if self.outages.error(home.name) is None else []
            for name in names:
                if read_shard_name(name)[0] in queues and self.home_of(name) != home.name:
                    yield home.name, home.broker.stats(name)

    def queues(self) -> list[str]:
        """The sorted names of the queues that aztask can use."""
        return list(self.listing().queues)

    def stats(self, queue: str) -> QueueStats:
        """The queue's counts. Raises QueueNotFound."""
        self.refuse_resting(queue)
        return self.watched(queue, lambda broker: broker.stats(queue))

    def peek(
        self,
        queue: str,
        *,
        dead_letter: bool = False,
        after: Position | None = None,
        limit: int = 100,
    ) -> list[Peeked]:
        """Read messages without leasing them, in order of position, starting behind `after`."""
        self.refuse_resting(queue)
        return self.watched(
            queue,
            lambda broker: broker.peek(queue, dead_letter=dead_letter, after=after, limit=limit),
        )

    def purge(self, queue: str, *, dead_letter: bool = False) -> int:
        """Delete the queue's messages, or its dead letters; returns how many were deleted."""
        return self._at(queue).purge(queue, dead_letter=dead_letter)

    # -- messages ----------------------------------------------------------------------------

    def send(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Store all envelopes at the queue's address; see `Broker.send`."""
        self.watched(queue, lambda broker: broker.send(queue, envelopes))
        self.outages.works(self.home_of(queue))

    def check(self, envelope: Envelope, *, reserve: int = 0) -> None:
        """Raise EncodeError or MessageTooLarge if the service could not store the envelope."""
        for home in self.homes.values():  # they have equal limits: one that can be opened says
            try:
                broker = home.broker
            except AztaskError:
                continue
            broker.check(envelope, reserve=reserve)
            return

    def cancel_scheduled(self, queue: str, message_ids: Sequence[str]) -> int:
        """Remove scheduled messages by message id; returns how many were removed."""
        return self._at(queue).cancel_scheduled(queue, message_ids)

    def send_timer(self, queue: str, envelope: Envelope) -> int:
        """Store one delayed message; returns the number by which `cancel_timer` removes it."""
        return self.watched(queue, lambda broker: broker.send_timer(queue, envelope))

    def cancel_timer(self, queue: str, number: int) -> bool:
        """Remove the scheduled message of this number: one request; False if it is not there."""
        return self._at(queue).cancel_timer(queue, number)

    def refuse_resting(self, queue: str) -> None:
        """Raise the error of an address that rests: pages and metrics do not wait for it."""
        home = self.home_of(queue)
        if not self.outages.answers(home, queue) and (error := self.outages.error(home)):
            raise BrokerUnavailable(str(error)) from error

    def watched(self, queue: str, call: Callable[[Broker], Answer]) -> Answer:
        """The answer of the queue's address; if there is none, the next ids avoid it."""
        home = self.home_of(queue)
        try:
            return call(self._at(queue))
        except (BrokerUnavailable, SendUnconfirmed) as error:
            why = error.__cause__ if isinstance(error, SendUnconfirmed) else error
            self.outages.failed(home, why)
            raise

    def receiver(
        self,
        queue: str,
        *,
        lease: float,
        prefetch: int = 0,
        session: str | AnySession | None = None,
        dead_letter: bool = False,
        delete: bool = False,
        poll_ceiling: float | None = None,
    ) -> Receiver:
        """A receiver of the queue at its address."""
        return self._at(queue).receiver(
            queue,
            lease=lease,
            prefetch=prefetch,
            session=session,
            dead_letter=dead_letter,
            delete=delete,
            poll_ceiling=poll_ceiling,
        )

    def inspector(self) -> Inspector:
        """The inspector of all addresses' queues. Raises CapabilityError if there is none."""
        return AddressInspector(self)

    def close(self) -> None:
        """Close the connections of all addresses."""
        self.outages.close()
        for home in self.homes.values():
            home.close()


class RemoteAddresses(AddressBroker):
    """One over services that are reached over a network."""

    @property
    def server(self) -> tuple[str, int | None]:
        """That of the first address: spans and metrics name one, wherever a shard is."""
        broker = next(iter(self.homes.values())).broker
        assert isinstance(broker, Networked)  # noqa: S101  # `over_addresses` has looked
        return broker.server


def over_addresses(homes: Sequence[Home], layouts: ShardLayouts) -> AddressBroker:
    """The broker over these addresses, none of which is opened yet."""
    kind = RemoteAddresses if homes[0].kind.capabilities.remote else AddressBroker
    return kind(homes, layouts)


class Resting:
    """The shards that failed, until when each rests, and why. Any thread may call."""

    def __init__(self, queue: str, clock: Clock, addresses: AddressBroker | None) -> None:
        """addresses: None for one, which rests with its shards."""
        self._queue = queue
        self._clock = clock
        self._addresses = addresses
        self._failures: dict[int, tuple[int, float, AztaskError]] = {}

    def awake(self, number: int) -> bool:
        """Whether the shard may be asked now."""
        found = self._failures.get(number)
        rested = found is None or found[1] <= self._clock.monotonic()
        return rested and self.answers(number)

    def answers(self, number: int) -> bool:
        """Whether the address of the shard answered when it was last asked."""
        if self._addresses is None:
            return True
        name = shard_name(self._queue, number)
        return self._addresses.outages.answers(self._addresses.home_of(name), name)

    def silent(self, number: int, error: AztaskError) -> bool:
        """Whether the error is that of an address; then all its shards rest."""
        if self._addresses is None or not is_silent(error):
            return False
        home = self._addresses.home_of(shard_name(self._queue, number))
        self._addresses.outages.failed(home, error)
        return True

    def failed(self, number: int, error: AztaskError) -> None:
        """A receive from the shard raised an error."""
        if self.silent(number, error):
            return
        before = self._failures.get(number)
        count = 0 if before is None else before[0] + 1
        seconds = min(LONGEST_REST, SHORTEST_REST * 2.0 ** min(count, 10))
        self._failures[number] = (count, self._clock.monotonic() + seconds, error)
        logger.warning(
            "shard %s: cannot receive, retry in %.1f s: %s",
            shard_name(self._queue, number),
            seconds,
            error,
        )

    def works(self, number: int) -> None:
        """A receive from the shard worked."""
        if self._failures and self._failures.pop(number, None) is not None:
            name = shard_name(self._queue, number)
            logger.info("shard %s: receiving works again", name)

    def raise_if_all(self, numbers: Sequence[int]) -> None:
        """Raise the newest error if none of these shards may be asked now."""
        if self._addresses is not None:
            self._raise_if_none_answers(numbers)
        if len(self._failures) < len(numbers):
            return
        found = [self._failures.get(number) for number in numbers]
        failed = sorted((each for each in found if each is not None), key=lambda each: each[1])
        if len(failed) == len(numbers) and failed[0][1] > self._clock.monotonic():
            raise failed[-1][2]

    def _raise_if_none_answers(self, numbers: Sequence[int]) -> None:
        assert self._addresses is not None  # noqa: S101  # the caller has looked
        names = [shard_name(self._queue, number) for number in numbers]
        errors = [self._addresses.outages.error(self._addresses.home_of(name)) for name in names]
        if errors and None not in errors:
            raise errors[0] or BrokerUnavailable("no address answers")


class AddressInspector:
    """Inspects each queue of the service at its address."""

    def __init__(self, broker: AddressBroker) -> None:
        self._broker = broker

    def _at(self, queue: str) -> Inspector:
        # One that has just not answered is not waited for again.
        self._broker.refuse_resting(queue)
        return _inspector_of(self._broker.homes[self._broker.home_of(queue)])

    def facts(self, queue: str) -> QueueFacts:
        """The settings at the queue's address, in at most two requests."""
        return self._broker.watched(queue, lambda _: self._at(queue).facts(queue))

    def rights(self, queue: str) -> Sequence[Permission]:
        """Which permissions we have on the queue."""
        return self._broker.watched(queue, lambda _: self._at(queue).rights(queue))

    def clock_offset(self, queue: str) -> float | None:
        """Seconds that the clock of the queue's service is ahead of ours; None if unknown."""
        return self._broker.watched(queue, lambda _: self._at(queue).clock_offset(queue))

    def surroundings(self) -> Sequence[Finding]:
        """The findings of each address, and which does not answer."""
        found: list[Finding] = []
        for home in self._broker.homes.values():
            try:
                around = _inspector_of(home).surroundings()
                found += [replace(each, text=f"{home.name}: {each.text}") for each in around]
                home.broker.listing()
            except BrokerUnavailable as error:
                text = f"{home.name} does not answer: {error}"
                advice = "check that address; messages for its shards wait, and those in it too"
                found.append(problem("broker", "address", text, advice, error))
                self._broker.outages.failed(home.name, error)
            except AztaskError:
                continue  # some may use their queues, but not list all
        return found


def _inspector_of(home: Home) -> Inspector:
    if not isinstance(home.broker, Inspectable):
        raise CapabilityError("the queues of this broker cannot be inspected")
    return home.broker.inspector()
