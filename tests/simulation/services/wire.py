"""The one place where a request meets the world.

A request goes there, is carried out, and its answer comes back. For each one a `Fate` decides how
long both ways take and which fault strikes it. The three errors that a caller can see are those
that a network has: it was never sent (`Unconnected`), the service refused it (`Refused`), or no
answer came (`Unanswered`), and then it may have been carried out, now or later.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import count
from math import inf
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar, cast

from aztask.support.clock import Clock

Answer = TypeVar("Answer")


class Service(StrEnum):
    """The modelled services."""

    QUEUES = "storage queues"
    BUS = "service bus"
    TABLES = "tables"
    BLOBS = "blobs"


class Fault(Enum):
    """What may strike a request."""

    UNCONNECTED = "no connection: it was certainly not sent"
    NOT_ARRIVED = "it was lost on the way there: no answer"
    ANSWER_LOST = "carried out, and its answer was lost"
    THROTTLED = "refused: the service is busy"
    FORBIDDEN = "refused: the credential"
    FAILED = "refused: an error of the service, which did nothing"
    FAILED_LATE = "an error of the service, which carried it out"
    TIMED_OUT = "refused: the service ran out of time, and did nothing"
    CONFLICT = "another writer has touched the row meanwhile, without changing its values"


REFUSALS: Final[dict[Fault, tuple[int, str]]] = {
    Fault.THROTTLED: (503, "ServerBusy"),
    Fault.FORBIDDEN: (403, "AuthorizationPermissionMismatch"),
    Fault.FAILED: (500, "InternalError"),
    Fault.FAILED_LATE: (500, "InternalError"),
    Fault.TIMED_OUT: (500, "OperationTimedOut"),
}
"""The status and the error code of each fault that the service answers with."""


class Request(NamedTuple):
    """A request that is about to be sent.

    * `number`: of all requests of this world, from 1.
    * `sender`: the name of the program that sends it.
    * `place`: the queue, table or container.
    * `patience`: how many seconds the sender waits for the answer.
    * `conditional`: it names the version of a row, so that `Fault.CONFLICT` means something.
    """

    number: int
    sender: str
    service: Service
    operation: str
    place: str
    patience: float
    conditional: bool = False

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults that may strike it, in an order that never changes."""
        return tuple(each for each in Fault if self.conditional or each is not Fault.CONFLICT)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of a request.

    * `there`, `back`: the seconds until it arrives, and then until its answer is back. Together
      more than the sender's patience, and the sender sees no answer.
    """

    fault: Fault | None = None
    there: float = 0.0
    back: float = 0.0


FINE: Final = Outcome()


class Fate(Protocol):
    """Decides what becomes of each request."""

    def of(self, request: Request) -> Outcome:
        """The outcome of this request, which is about to be sent."""
        ...


class Calm:
    """The fate of a world without faults: everything at once."""

    def of(self, request: Request) -> Outcome:
        """All goes well."""
        return FINE


class Refused(Exception):
    """The service answered with an error."""

    def __init__(self, status: int, code: str, text: str = "") -> None:
        super().__init__(text or code)
        self.status = status
        self.code = code


class Unconnected(Exception):
    """The request was certainly not sent."""


class Unanswered(Exception):
    """No answer came: it may have been carried out, or will be."""


class HasTime(Protocol):
    """The time of the world, such as `stepped.Time`."""

    now: float


class Wire:
    """All requests of one world.

    * `served`: how many requests were carried out, by service and operation.
    * `struck`: how many were struck, by fault.
    """

    def __init__(self, time: HasTime, fate: Fate = Calm()) -> None:
        self.time = time
        self.fate = fate
        self.served: Counter[tuple[Service, str]] = Counter()
        self.struck: Counter[Fault] = Counter()
        self._numbers = count(1)
        self._coming: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()

    def line(self, sender: str, clock: Clock) -> Line:
        """The way of one program to the services. clock: that program's."""
        return Line(self, sender, clock)

    @property
    def next_at(self) -> float:
        """When something arrives for which no program waits; infinite if nothing does."""
        return self._coming[0][0] if self._coming else inf

    def arrive(self) -> None:
        """Carry out what has arrived by now, each at its own time.

        No request was carried out since then, for each one calls this first.
        """
        now = self.time.now
        try:
            while self._coming and self._coming[0][0] <= now:
                self.time.now, _, call = heapq.heappop(self._coming)
                call()
        finally:
            self.time.now = now

    def later(self, at: float, call: Callable[[], object]) -> None:
        """Have this call made at this time."""
        heapq.heappush(self._coming, (at, next(self._order), call))

    def next_number(self) -> int:
        """The number of the next request."""
        return next(self._numbers)


class Journey(Generic[Answer]):
    """One request with its outcome: when it arrives, and when its sender knows.

    * `arrives_at`: None if it never does. It may be later than `ends_at`.
    * `ends_at`: when the sender has the answer, or has given up.
    """

    def __init__(
        self,
        wire: Wire,
        request: Request,
        outcome: Outcome,
        execute: Callable[[], Answer],
        touch: Callable[[], object] | None,
    ) -> None:
        fault, patience, now = outcome.fault, request.patience, wire.time.now
        if fault is not None:
            wire.struck[fault] += 1
        self._wire = wire
        self._request = request
        self._fault = fault
        self._execute = execute
        self._touch = touch
        self._answer: list[Answer] = []
        self._error: Exception | None = None
        self._refused = fault in REFUSALS and fault is not Fault.FAILED_LATE
        takes = outcome.there + outcome.back
        if fault is Fault.UNCONNECTED:
            takes = outcome.there
        comes = fault not in (Fault.UNCONNECTED, Fault.NOT_ARRIVED)
        if self._refused and outcome.there > patience:
            comes = False
        self.arrives_at = now + outcome.there if comes else None
        self.ends_at = now + min(takes, patience)
        self._unseen = takes > patience or fault in (Fault.NOT_ARRIVED, Fault.ANSWER_LOST)

    @property
    def arrives_in_time(self) -> bool:
        """Whether it arrives while its sender still waits."""
        return self.arrives_at is not None and self.arrives_at <= self.ends_at

    def arrive(self) -> None:
        """It is at the service, which carries it out or refuses it."""
        fault = self._fault
        if not self._refused:
            self._wire.served[self._request.service, self._request.operation] += 1
            if fault is Fault.CONFLICT and self._touch is not None:
                self._touch()
            try:
                self._answer.append(self._execute())
            except Refused as refused:
                self._error = refused
        if self._error is None and fault in REFUSALS:
            self._error = Refused(*REFUSALS[fault])

    def answer(self) -> Answer:
        """What its sender gets, at `ends_at`."""
        if self._fault is Fault.UNCONNECTED:
            raise Unconnected("no connection")
        if self._unseen:
            raise Unanswered("no answer came")
        if self._error is not None:
            raise self._error
        return self._answer[0]


class _Sent(BaseException):
    """A request was sent whose answer is not waited for here."""

    def __init__(self, journey: Journey[Any]) -> None:
        super().__init__()
        self.journey = journey


class Pending(Future[Answer]):
    """The result of a call that waits for a request, on this line."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self.line = line


class Line:
    """The way of one program to all services."""

    def __init__(self, wire: Wire, sender: str, clock: Clock) -> None:
        self.wire = wire
        self.sender = sender
        self.clock = clock
        self._posting = False
        self._ended: Journey[Any] | None = None

    def request(
        self,
        service: Service,
        operation: str,
        execute: Callable[[], Answer],
        *,
        place: str = "",
        patience: float = inf,
        touch: Callable[[], object] | None = None,
    ) -> Answer:
        """Send one request; returns what `execute` returns at the service.

        * `touch`: writes the row again as it is; the request is conditional.

        Raises Refused (also what `execute` raises), Unconnected and Unanswered.
        """
        if self._ended is not None:
            ended, self._ended = self._ended, None
            return cast("Answer", ended.answer())
        posting, self._posting = self._posting, False
        wire = self.wire
        wire.arrive()
        request = Request(
            wire.next_number(),
            self.sender,
            service,
            operation,
            place,
            patience,
            touch is not None,
        )
        outcome = wire.fate.of(request)
        if outcome is FINE:
            wire.served[service, operation] += 1
            return execute()
        journey = Journey(wire, request, outcome, execute, touch)
        if posting:
            raise _Sent(journey)
        if journey.arrives_at is not None:
            wire.later(journey.arrives_at, journey.arrive)
        if journey.arrives_in_time:
            self._wait_until(journey.arrives_at)
            wire.arrive()
        self._wait_until(journey.ends_at)
        return journey.answer()

    def _wait_until(self, at: float | None) -> None:
        """Sleep until this time; again if a rounded sum is a little less."""
        while at is not None and at > self.wire.time.now:
            self.clock.sleep(at - self.wire.time.now)

    # -- requests whose answers are not waited for -------------------------------------------

    def post(self, call: Callable[[], Answer]) -> Pending[Answer]:
        """Begin a call that makes one request, and go on.

        The call is made again when its request has ended, and is given the answer then.
        """
        future: Pending[Answer] = Pending(self)
        self._posting = True
        try:
            self._settle(future, call)
        except _Sent as sent:
            journey = sent.journey
        else:
            return future
        finally:
            self._posting = False
        if journey.arrives_at is not None:
            self.wire.later(journey.arrives_at, journey.arrive)
        self.wire.later(journey.ends_at, lambda: self._end(future, call, journey))
        self.wire.arrive()
        return future

    def _end(
        self, future: Pending[Answer], call: Callable[[], Answer], journey: Journey[Any]
    ) -> None:
        self._ended = journey
        try:
            self._settle(future, call)
        finally:
            self._ended = None

    @staticmethod
    def _settle(future: Pending[Answer], call: Callable[[], Answer]) -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001  # it belongs to the reader of the future
            future.set_exception(error)

    def wait(self, futures: Sequence[Future[Any]], seconds: float) -> None:
        """Let time pass until one of these is done, for at most so many seconds."""
        until = self.wire.time.now + seconds
        while not any(each.done() for each in futures) and self.wire.time.now < until:
            self._wait_until(min(self.wire.next_at, until))
            self.wire.arrive()
