"""Requests to one table: each with time-outs, in parallel, none of them repeated by the SDK.

Rules
1. A call of the store ends in time: its requests share one `TimeBudget`, whose remainder limits
   each of them. When one request gives up, those that have not begun are not made.
2. The SDK retries nothing. A request that was certainly not carried out (the service is busy, or no
   connection was made) is repeated after a short pause. Reads are always repeated. A write whose
   answer is lost raises `OutcomeUnknown`, and the caller reads the row.
3. Requests of one call run on a pool of threads; no request waits for another one of that pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from azure.core import MatchConditions
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential, TokenCredential
from azure.core.exceptions import AzureError
from azure.core.pipeline.transport import HttpTransport, RequestsTransport
from azure.data.tables import TableClient, TableServiceClient, UpdateMode

from aztask.address.addresses import TablesAddress
from aztask.azure.access import default_credential, filter_secrets
from aztask.azure.transport import LeanTransport
from aztask.errors import AztaskError, BrokerUnavailable, ConfigurationError
from aztask.stores.tables.errors import (
    TABLE_ROLE,
    AlreadyExists,
    NotExecuted,
    OutcomeUnknown,
    RowConflict,
    RowFull,
    RowNotFound,
    verdict,
)
from aztask.support.clock import monotonic, sleep
from aztask.support.threadpool import ThreadPool
from aztask.version import __version__

CONNECTIONS: Final = 16
CALL_SECONDS: Final = 20.0
CONNECT_SECONDS: Final = 5.0
READ_SECONDS: Final = 10.0
PAGE: Final = 1000
"""The most rows that the service puts into one answer."""

PAUSES: Final = (0.1, 0.4, 1.0)

Entity = dict[str, Any]
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class TimeBudget:
    """The time for one call of the store, shared by its requests."""

    def __init__(self, seconds: float = CALL_SECONDS) -> None:
        self._until = monotonic() + seconds
        self.stopped: AztaskError | None = None

    @property
    def remaining(self) -> float:
        """The seconds that remain for this call."""
        return self._until - monotonic()

    def stop(self, error: AztaskError) -> AztaskError:
        """Make the requests that have not begun fail with `error`, too; returns it."""
        self.stopped = error
        return error

    def unavailable(self, place: str) -> AztaskError:
        """The error for a row that other writers changed at every try."""
        return self.stop(BrokerUnavailable(f"other writers keep changing {place}; try again"))

    def timeouts(self, place: str) -> dict[str, float]:
        """The time-outs of the next request. Raises BrokerUnavailable if no time remains."""
        if self.stopped is not None:
            raise self.stopped
        remaining = self.remaining
        if remaining <= 0:
            raise self.stop(BrokerUnavailable(f"{place} does not answer in time; try again"))
        return {
            "connection_timeout": min(CONNECT_SECONDS, remaining),
            "read_timeout": min(READ_SECONDS, remaining),
        }

    def request(
        self, make: Callable[..., Answer], place: str, role: str, *, again: bool = False
    ) -> Answer:
        """Carry out one request, which gets its time-outs as keywords; see rule 2.

        * `again`: True if carrying it out twice does no harm.

        Raises RowNotFound, AlreadyExists, RowConflict, OutcomeUnknown, and the errors for the
        caller.
        """
        pauses = iter(PAUSES)
        while True:
            try:
                return make(**self.timeouts(place))
            except AzureError as error:
                found = verdict(error, place, role)
                if isinstance(found, AztaskError):
                    raise self.stop(found) from error
                if not isinstance(found, NotExecuted) and not (
                    again and isinstance(found, OutcomeUnknown)
                ):
                    raise found from error
                pause = next(pauses, None)
                if pause is None or pause >= self.remaining:
                    raise self.stop(found.error) from error
                sleep(pause)


class TableRequests:
    """The requests to one table. Any thread may call; another process makes its own."""

    def __init__(
        self, address: TablesAddress, table: str, credential: TokenCredential | None = None
    ) -> None:
        """Connects at the first request. Raises ConfigurationError without a credential."""
        filter_secrets()
        self.place = f"the table {table!r} of {address}"
        self._transport = _transport(address.endpoint)
        known = _credential_of(address, credential)

        def client(transport: HttpTransport[Any, Any]) -> TableClient:
            return TableClient(
                address.endpoint,
                table,
                credential=known,
                transport=transport,
                retry_total=0,
                user_agent=f"aztask/{__version__}",
            )

        self._table = client(self._transport)
        # The lean transport cannot read multipart answers.
        self._batches = client(RequestsTransport())
        self._thread_pool = ThreadPool("tables", CONNECTIONS)

    def each(
        self, call: TimeBudget, work: Callable[[TimeBudget, Item], Answer], items: Iterable[Item]
    ) -> list[Answer]:
        """`work` of each item, in parallel; the answers are in order. Waits for all, then raises.

        Of several errors a refused credential is raised rather than an unreachable service, else
        the first.
        """
        todo = list(items)
        if len(todo) == 1:
            return [work(call, todo[0])]
        futures: list[Future[Answer]] = [
            self._thread_pool.submit(partial(work, call, item)) for item in todo
        ]
        errors = [error for each in futures if (error := each.exception()) is not None]
        for error in errors:
            if isinstance(error, ConfigurationError):
                raise error
        if errors:
            raise errors[0]
        return [each.result() for each in futures]

    def read(
        self, call: TimeBudget, partition: str, row: str, select: Sequence[str] | None = None
    ) -> Entity | None:
        """One row, or some properties of it; None if it does not exist."""
        names = list(select) if select else None
        try:
            return call.request(
                lambda **times: self._table.get_entity(partition, row, select=names, **times),
                self.place,
                TABLE_ROLE,
                again=True,
            )
        except RowNotFound:
            return None

    def query(
        self,
        call: TimeBudget,
        text: str,
        values: Mapping[str, Any],
        limit: int,
        select: Sequence[str] | None = None,
    ) -> list[Entity]:
        """The first `limit` rows of a filter, in the order of their keys."""

        def ask(**times: float) -> list[Entity]:
            found = self._table.query_entities(
                text,
                parameters=dict(values),
                results_per_page=min(limit, PAGE),
                select=list(select) if select else None,
                **times,
            )
            return list(islice(found, limit))

        return call.request(ask, self.place, TABLE_ROLE, again=True)

    def page(
        self,
        call: TimeBudget,
        text: str,
        values: Mapping[str, Any],
        select: Sequence[str] | None,
        after: Any = None,
    ) -> tuple[list[Entity], Any]:
        """One page of a filter's rows: one request, however many rows do not match.

        * `select`: the properties; None for all.
        * `after`: where the page before ended, None for the first page.

        Returns the page, and where it ended; None if it was the last.
        """

        def ask(**times: float) -> tuple[list[Entity], Any]:
            found = self._table.query_entities(
                text,
                parameters=dict(values),
                results_per_page=PAGE,
                select=None if select is None else list(select),
                **times,
            )
            pages: Any = found.by_page(after)
            return list(next(pages, ())), pages.continuation_token

        return call.request(ask, self.place, TABLE_ROLE, again=True)

    def insert(self, call: TimeBudget, entity: Mapping[str, Any]) -> str | None:
        """Insert a row and return its ETag; None if the row exists. Raises OutcomeUnknown."""
        try:
            answer = call.request(
                lambda **times: self._table.create_entity(dict(entity), **times),
                self.place,
                TABLE_ROLE,
            )
        except AlreadyExists:
            return None
        return str(answer["etag"])

    def replace(self, call: TimeBudget, entity: Mapping[str, Any], tag: str) -> str | None:
        """Replace a row and return its new ETag; None if it changed since `tag`.

        Raises OutcomeUnknown.
        """
        try:
            answer = call.request(
                lambda **times: self._table.update_entity(
                    dict(entity),
                    mode=UpdateMode.REPLACE,
                    etag=tag,
                    match_condition=MatchConditions.IfNotModified,
                    **times,
                ),
                self.place,
                TABLE_ROLE,
            )
        except (RowConflict, RowNotFound):
            return None
        return str(answer["etag"])

    def merge(self, call: TimeBudget, entity: Mapping[str, Any], tag: str) -> bool:
        """Set these properties and keep the others.

        False if the row was changed or deleted since `tag`, or an answer was lost.
        """
        try:
            call.request(
                lambda **times: self._table.update_entity(
                    dict(entity),
                    mode=UpdateMode.MERGE,
                    etag=tag,
                    match_condition=MatchConditions.IfNotModified,
                    **times,
                ),
                self.place,
                TABLE_ROLE,
            )
        except (RowConflict, RowNotFound, OutcomeUnknown):
            return False
        return True

    def add(self, call: TimeBudget, entity: Mapping[str, Any]) -> bool:
        """Set these properties, whatever else the row has; False if it does not exist or is full.

        If the answer is lost, they are set again.
        """
        try:
            call.request(
                lambda **times: self._table.update_entity(
                    dict(entity), mode=UpdateMode.MERGE, **times
                ),
                self.place,
                TABLE_ROLE,
                again=True,
            )
        except (RowNotFound, RowFull):
            return False
        return True

    def put(self, call: TimeBudget, entity: Mapping[str, Any]) -> None:
        """Write a row, whatever exists there. If the answer is lost, it is written again."""
        call.request(
            lambda **times: self._table.upsert_entity(
                dict(entity), mode=UpdateMode.REPLACE, **times
            ),
            self.place,
            TABLE_ROLE,
            again=True,
        )

    def ensure(self, call: TimeBudget, entity: Mapping[str, Any]) -> bool:
        """Write a row unless it exists; True if it did not. Repeated if an answer is lost."""
        while True:
            try:
                return self.insert(call, entity) is not None
            except OutcomeUnknown as lost:
                if call.remaining <= PAUSES[0]:
                    raise call.stop(lost.error) from lost
                sleep(PAUSES[0])

    def delete(
        self, call: TimeBudget, partition: str, row: str, tag: str = "", *, again: bool = True
    ) -> bool:
        """Delete a row; False if it did not exist, or an answer was lost.

        * `tag`: delete it only if it is unchanged since. Raises RowConflict.
        * `again`: False: do not repeat it if an answer is lost. Raises OutcomeUnknown.
        """
        condition: dict[str, Any] = {}
        if tag:
            condition = {"etag": tag, "match_condition": MatchConditions.IfNotModified}
        missing: list[int] = []

        def note(response: Any) -> None:
            if response.http_response.status_code == 404:  # the SDK ignores it silently
                missing.append(404)

        call.request(
            lambda **times: self._table.delete_entity(
                partition, row, raw_response_hook=note, **condition, **times
            ),
            self.place,
            TABLE_ROLE,
            again=again,
        )
        return not missing

    def together(self, call: TimeBudget, changes: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Change several rows of one partition, all or nothing; returns the answer for each.

        Each change is ("create" | "update" | "delete", row), perhaps with a dict of options.
        Raises AlreadyExists, RowConflict, RowNotFound, OutcomeUnknown.
        """
        answers = call.request(
            lambda **times: self._batches.submit_transaction(list(changes), **times),
            self.place,
            TABLE_ROLE,
        )
        return list(answers)

    def date(self, call: TimeBudget, partition: str, row: str) -> str | None:
        """The ``Date`` of the answer to a read of this row, which need not exist."""
        dates: list[str] = []

        def note(response: Any) -> None:
            dates.append(str(response.http_response.headers.get("Date", "")))

        with suppress(RowNotFound):
            call.request(
                lambda **times: self._table.get_entity(
                    partition, row, raw_response_hook=note, **times
                ),
                self.place,
                TABLE_ROLE,
                again=True,
            )
        return (dates[-1] or None) if dates else None

    def create(self, call: TimeBudget) -> bool:
        """Create the table; False if it exists."""
        try:
            call.request(
                self._table.create_table,
                self.place,
                TABLE_ROLE,
                again=True,
            )
        except AlreadyExists:
            return False
        return True

    def drop(self, call: TimeBudget) -> None:
        """Delete the table with its rows, if it exists."""
        call.request(self._table.delete_table, self.place, TABLE_ROLE, again=True)

    def close(self) -> None:
        """Close idle connections; running requests go on."""
        self._thread_pool.close()
        self._transport.close()
        self._batches.close()


def tables_of(address: TablesAddress, beginning: str) -> list[str]:
    """The tables of the account whose names begin like this."""
    filter_secrets()
    with TableServiceClient(
        address.endpoint,
        credential=_credential_of(address, None),
        retry_total=0,
        user_agent=f"aztask/{__version__}",
    ) as service:

        def ask(**times: Any) -> list[str]:
            return [each.name for each in service.list_tables(**times)]

        names = TimeBudget().request(ask, str(address), TABLE_ROLE, again=True)
    return [each for each in names if each.startswith(beginning)]


def _credential_of(address: TablesAddress, given: TokenCredential | None) -> Any:
    if address.key is not None:
        return AzureNamedKeyCredential(address.account, address.key.reveal())
    if address.signature is not None:
        return AzureSasCredential(address.signature.reveal().lstrip("?"))
    return given or default_credential()


def _transport(endpoint: str) -> HttpTransport[Any, Any]:
    """The lean transport, which takes half the CPU time, unless an HTTP proxy is configured."""
    parts = urlsplit(endpoint)
    if parts.scheme in getproxies() and not proxy_bypass(parts.hostname or ""):
        transport: HttpTransport[Any, Any] = RequestsTransport()
        return transport
    return LeanTransport()
