"""The SDK's client of one table, as far as `aztask.stores.tables.client.TableRequests` uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any, Final, TypeVar, cast

from azure.data.tables import TableEntity, UpdateMode

from .azureerrors import ask
from .tablefilter import filter_of
from .tables import ANY_TAG, PAGE, Action, RowChange, StoredRow, Tables, written_at
from .wire import Line, Refused, Service

Answer = TypeVar("Answer")
Hook = Callable[[Any], None]

DEFAULT_READ: Final = 60.0


class ModelTable:
    """One table. Every method is a request; a listing is one for each of its pages."""

    def __init__(self, service: Tables, line: Line, table: str) -> None:
        self._service = service
        self._line = line
        self._table = table

    def create_table(self, **options: Any) -> None:
        self._ask("create table", lambda: self._service.create(self._table), options)

    def get_entity(
        self,
        partition: str,
        row: str,
        select: Sequence[str] | None = None,
        raw_response_hook: Hook | None = None,
        **options: Any,
    ) -> TableEntity:
        def execute() -> StoredRow:
            try:
                return self._service.get(self._table, partition, row)
            finally:
                if raw_response_hook is not None:
                    dates.append(formatdate(int(self._service.clock.wall()), usegmt=True))

        dates: list[str] = []
        try:
            return _entity(self._ask("get", execute, options), select)
        finally:
            if raw_response_hook is not None and dates:
                raw_response_hook(_answered(200, {"Date": dates[0]}))

    def query_entities(
        self,
        text: str,
        parameters: Mapping[str, Any],
        results_per_page: int = PAGE,
        select: Sequence[str] | None = None,
        **options: Any,
    ) -> Pages:
        condition = filter_of(text)
        # The SDK writes every value that equals True or False as such ([seen] 12.7).
        given = {
            name: value if type(value) is str else _as_sent(value)
            for name, value in parameters.items()
        }

        def ask_page(after: Any) -> tuple[list[Any], Any]:
            found, rest = self._ask(
                "query",
                lambda: self._service.query(self._table, condition, given, results_per_page, after),
                options,
            )
            return [_entity(each, select) for each in found], rest

        return Pages(ask_page)

    def create_entity(self, entity: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        return self._change("insert", RowChange(Action.CREATE, entity), options)

    def update_entity(
        self,
        entity: Mapping[str, Any],
        mode: UpdateMode = UpdateMode.MERGE,
        etag: str = ANY_TAG,
        match_condition: Any = None,
        **options: Any,
    ) -> dict[str, Any]:
        action = Action.MERGE if mode is UpdateMode.MERGE else Action.REPLACE
        return self._change(action.value, RowChange(action, entity, etag), options)

    def upsert_entity(
        self, entity: Mapping[str, Any], mode: UpdateMode = UpdateMode.MERGE, **options: Any
    ) -> dict[str, Any]:
        return self._change("put", RowChange(_upserting(mode), entity), options)

    def delete_entity(
        self,
        partition: str,
        row: str,
        etag: str = ANY_TAG,
        match_condition: Any = None,
        raw_response_hook: Hook | None = None,
        **options: Any,
    ) -> None:
        keys = {"PartitionKey": partition, "RowKey": row}
        change, status = RowChange(Action.DELETE, keys, etag), 204

        def execute() -> int:
            try:
                self._service.change(self._table, change)
            except Refused as refused:
                if refused.status != 404:
                    raise
                return refused.status  # the SDK ignores it
            return 204

        status = self._ask("delete", execute, options, self._touch([change]))
        if raw_response_hook is not None:
            raw_response_hook(_answered(status, {}))

    def submit_transaction(
        self, changes: Sequence[tuple[Any, ...]], **options: Any
    ) -> list[dict[str, Any]]:
        prepared = [_change_of(*each) for each in changes]
        tags = self._ask(
            "transaction",
            lambda: self._service.together(self._table, prepared),
            options,
            self._touch(prepared),
        )
        return [{"etag": tag} if tag else {} for tag in tags]

    def close(self) -> None:
        """There are no connections."""

    def _change(
        self, operation: str, change: RowChange, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        tag = self._ask(
            operation,
            lambda: self._service.change(self._table, change),
            options,
            self._touch([change]),
        )
        return {"etag": tag}

    def _touch(self, changes: Sequence[RowChange]) -> Callable[[], object] | None:
        places = [each.keys for each in changes if each.tag != ANY_TAG]
        return (lambda: self._service.touch(self._table, places)) if places else None

    def _ask(
        self,
        operation: str,
        execute: Callable[[], Answer],
        options: Mapping[str, Any],
        touch: Callable[[], object] | None = None,
    ) -> Answer:
        patience = options.get("read_timeout", DEFAULT_READ)
        return ask(self._line, Service.TABLES, operation, execute, self._table, patience, touch)


class Pages:
    """An answer in pages, each of which is asked for when it is read; as azure-core's ItemPaged.

    * `continuation_token`: where the page that was read last ended.
    """

    def __init__(self, ask_page: Callable[[Any], tuple[list[Any], Any]], after: Any = None) -> None:
        self._ask_page = ask_page
        self.continuation_token = after
        self._begun = False

    def by_page(self, continuation_token: Any = None) -> Pages:
        return Pages(self._ask_page, continuation_token)

    def __next__(self) -> list[Any]:
        if self._begun and self.continuation_token is None:
            raise StopIteration
        found, self.continuation_token = self._ask_page(self.continuation_token)
        self._begun = True
        return found

    def __iter__(self) -> Iterator[Any]:
        """Its items. The pages themselves are read with ``next``."""
        after, begun = self.continuation_token, False
        while after is not None or not begun:
            page, after = self._ask_page(after)
            begun = True
            yield from page


def _entity(row: StoredRow, select: Sequence[str] | None) -> TableEntity:
    names = row.values if select is None else [name for name in select if name in row.values]
    entity = TableEntity({name: row.values[name] for name in names})
    shows_time = select is None or "Timestamp" in select
    metadata = {"etag": row.tag, "timestamp": written_at(row) if shows_time else None}
    entity._metadata = cast("Any", metadata)
    return entity


def _as_sent(value: Any) -> Any:
    return bool(value) if value in (True, False) else value


def _answered(status: int, headers: dict[str, str]) -> Any:
    return SimpleNamespace(http_response=SimpleNamespace(status_code=status, headers=headers))


def _upserting(mode: UpdateMode) -> Action:
    return Action.PUT if mode is UpdateMode.REPLACE else Action.PUT_MERGED


def _change_of(what: str, entity: Mapping[str, Any], options: Mapping[str, Any] = {}) -> RowChange:
    """One step of a transaction, as the SDK takes it."""
    mode = options.get("mode", UpdateMode.MERGE)
    actions = {
        "create": Action.CREATE,
        "delete": Action.DELETE,
        "update": Action.REPLACE if mode is UpdateMode.REPLACE else Action.MERGE,
        "upsert": _upserting(mode),
    }
    return RowChange(actions[what], entity, options.get("etag", ANY_TAG))
