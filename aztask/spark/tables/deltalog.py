"""The logs of the Delta tables, which the driver reads and appends to: nothing else imports
``deltalake``.

Rules
1. What a table holds and what is added to it are read and committed from one snapshot. The library
   refuses a commit if another writer was faster; then everything is read again.
2. Each unit of work has a transaction in the log: (its name, a version). A unit with an equal or a
   higher version in the snapshot is skipped. The library itself accepts a repeated and a lower
   version [measured with 1.6.6], so only this rule keeps them out.
3. So whenever a writer dies, or two write the same, each unit is in the table once. Files that
   were not committed stay until VACUUM.
4. A unit may continue another: it is added only to a snapshot in which its transaction has the
   version from which the unit was made. So of two writers that continue one position, one does.
5. A column that a table lacks is added to it before the first file that has it. A table with more
   columns, of a newer release, is appended to as it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from aztask.azure.access import default_credential
from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.spark.events.files import Directory
from aztask.spark.events.places import EventPlace
from aztask.spark.tables.tablefiles import TableKind, WrittenFile
from aztask.support import chance
from aztask.support.clock import sleep, wall
from aztask.support.display import mask, one_line, safe_str
from aztask.support.private import make_directory, refuse_exposed

if TYPE_CHECKING:
    from aztask.address.addresses import BlobAddress

ATTEMPTS: Final = 50
"""Commits that are refused, one after the other, before a writer gives up."""
STORAGE_SCOPE: Final = "https://storage.azure.com/.default"


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file of a table. path: relative to the table. value: of the partition column."""

    path: str
    value: str


@dataclass(frozen=True, slots=True)
class Unit:
    """What is added at once or not at all. name, version: of its transaction in the log.

    files: may be empty. value: None to append; otherwise the value of the partition that `files`
    replace. after: the version that its transaction must have in the snapshot; None: any lower one.
    marks: further transactions, which are written with it.
    """

    name: str
    version: int
    files: Sequence[WrittenFile]
    value: str | None = None
    after: int | None = None
    marks: Mapping[str, int] = field(default_factory=dict)

    def follows(self, version: int | None) -> bool:
        """Whether it is added to a table whose transaction of this name has this version."""
        if version is None:
            return not self.after
        return version < self.version and self.after in (None, version)


def table_uri(tables: EventPlace, name: str) -> tuple[str, dict[str, str]]:
    """(the address of a table for ``deltalake``, the credentials that it needs there)."""
    if isinstance(tables, Directory):
        return str(Path(tables.path, name)), {}
    address = tables.address()
    return f"az://{address.container}/{address.name_of(name)}", _credentials(address)


def _credentials(address: BlobAddress) -> dict[str, str]:
    options = {"account_name": address.account, "azure_endpoint": address.endpoint}
    if address.endpoint.startswith("http://"):
        options["allow_http"] = "true"
    if (server := address.endpoint.removesuffix(f"/{address.account}")) != address.endpoint:
        # Azurite, which has the account in the path. It passes over "startFrom" in a listing, and
        # the library, which trusts in it, then refuses the third commit to a table ("Invalid table
        # version: 1"). To an emulator it lists without; where that is, it takes from here alone.
        options["use_emulator"] = "true"
        os.environ["AZURITE_BLOB_STORAGE_URL"] = server
    if address.key is not None:
        options["account_key"] = address.key.reveal()
    elif address.signature is not None:
        options["sas_key"] = address.signature.reveal()
    else:
        options["bearer_token"] = default_credential().get_token(STORAGE_SCOPE).token
    return options


def open_table(tables: EventPlace, name: str) -> DeltaTable | None:
    """The newest version of a table; None if it does not exist yet. Raises BrokerUnavailable."""
    uri, options = table_uri(tables, name)
    try:
        return DeltaTable(uri, storage_options=options)
    except TableNotFoundError:
        return None
    except DeltaError as error:
        raise _unavailable(tables, name, error) from error


def missing(table: DeltaTable | None, units: Sequence[Unit]) -> list[Unit]:
    """The units that the table does not hold in this version or a higher one."""
    return [unit for unit in units if unit.follows(version_of(table, unit.name))]


def version_of(table: DeltaTable | None, name: str) -> int | None:
    """The version of a transaction in the table; None without it."""
    return None if table is None else table.transaction_version(name)


def commit(
    tables: EventPlace, kind: TableKind, units: Sequence[Unit], *, unless: str | None = None
) -> tuple[int, list[Unit]]:
    """Add the units that the table lacks; returns its version and what was added.

    All units append, or all of them replace partitions. If the process dies here, the table holds
    all of these units or none. unless: a transaction; tables that have it are kept by others.
    Raises ConfigurationError if they are, or if a column has another type there, and
    BrokerUnavailable.
    """

    def once() -> tuple[int, list[Unit]]:
        table = _prepared(tables, kind)
        refuse_kept(table, tables, unless)
        fresh = missing(table, units)
        if fresh:
            _write(table, kind, fresh)
        return table.version() + bool(fresh), fresh

    return _repeated(tables, kind.name, once)


def refuse_kept(table: DeltaTable | None, tables: EventPlace, name: str | None) -> None:
    """Raise ConfigurationError if the table has this transaction."""
    if name is not None and version_of(table, name) is not None:
        raise ConfigurationError(
            f"the tables in {tables} are kept by aztask spark follow, which reads compacted files, "
            "too: compact without --tables"
        )


def _repeated(
    tables: EventPlace, name: str, once: Callable[[], tuple[int, list[Unit]]]
) -> tuple[int, list[Unit]]:
    """Call `once` until no other writer comes first."""
    for attempt in range(ATTEMPTS):
        try:
            return once()
        except CommitFailedError as error:
            refused = error
            sleep(chance.share() * min(1.0, 0.01 * 2**attempt))
        except DeltaError as error:
            raise _unavailable(tables, name, error) from error
    raise _unavailable(tables, name, refused)


def _prepared(tables: EventPlace, kind: TableKind) -> DeltaTable:
    """The table in its newest version, created and with all columns of `kind`."""
    uri, options = table_uri(tables, kind.name)
    table = open_table(tables, kind.name)
    if table is None:
        if isinstance(tables, Directory):
            make_directory(Path(uri))  # private, as the events are; deltalake would open it
            refuse_exposed(Path(tables.path))
        DeltaTable.create(
            uri,
            kind.schema,
            mode="ignore",
            partition_by=[kind.partition],
            name=f"aztask {kind.name}",
            storage_options=options,
        )
        table = DeltaTable(uri, storage_options=options)
    if lacking := _lacking(table, kind):
        table.alter.add_columns(lacking)
        table = DeltaTable(uri, storage_options=options)
    return table


def _lacking(table: DeltaTable, kind: TableKind) -> list[Any]:
    """The columns that the table lacks. Raises ConfigurationError if one has another type."""
    there = {each.name: each for each in table.schema().fields}
    ours = Schema.from_arrow(kind.schema).fields
    for each in ours:
        if each.name in there and there[each.name].type != each.type:
            raise ConfigurationError(
                f"the column {each.name!r} of the table {kind.name!r} is "
                f"{there[each.name].type.type}, not {each.type.type}: "
                "name another folder for the tables"
            )
    return [each for each in ours if each.name not in there]


def _write(table: DeltaTable, kind: TableKind, units: Sequence[Unit]) -> None:
    """One commit, from the snapshot that `table` is. Raises CommitFailedError."""
    replaced = [unit.value for unit in units if unit.value is not None]
    table.create_write_transaction(
        [_action(kind, file) for unit in units for file in unit.files],
        mode="overwrite" if replaced else "append",
        schema=table.schema(),
        partition_by=[kind.partition],
        partition_filters=[(kind.partition, "in", replaced)] if replaced else None,
        commit_properties=CommitProperties(
            app_transactions=[
                Transaction(name, version)
                for unit in units
                for name, version in {unit.name: unit.version, **unit.marks}.items()
            ],
            # With retries the library would commit what was decided from an older snapshot.
            max_commit_retries=0,
        ),
    )


def _action(kind: TableKind, file: WrittenFile) -> AddAction:
    if file.path is None or file.stats is None:
        raise ValueError(f"{file} names no file")
    values: Mapping[str, str | None] = {kind.partition: file.value}
    now = int(wall() * 1000)
    return AddAction(file.path, file.size, values, now, True, file.stats)


def _unavailable(tables: EventPlace, name: str, error: Exception) -> BrokerUnavailable:
    text = mask(one_line(safe_str(error)))
    return BrokerUnavailable(f"the table {name!r} of {tables}: {text}")


# -- What is new -----------------------------------------------------------------------------------


def files_of(
    table: DeltaTable, tables: EventPlace, name: str, since: int | None
) -> list[TableFile]:
    """The files of this version of the table, or those with rows that came after version `since`.

    OPTIMIZE rewrites rows that are there already: what it writes is not new, and a new file that it
    replaced is still named, since it exists until VACUUM. A partition that was replaced twice is
    named once. Raises ConfigurationError if the log begins later.
    """
    if since is None:
        actions = pa.table(table.get_add_actions(flatten=True))
        (values,) = (each for each in actions.column_names if each.startswith("partition."))
        paths, its = actions["path"].to_pylist(), actions[values].to_pylist()
        return [TableFile(unquote(path), str(v)) for path, v in zip(paths, its, strict=True)]
    found: dict[str, TableFile] = {}
    for version in range(since + 1, table.version() + 1):
        for action in _log_entry(tables, name, version):
            if "add" in action and action["add"]["dataChange"]:
                path = unquote(action["add"]["path"])
                (value,) = action["add"]["partitionValues"].values()
                found[path] = TableFile(path, value)
            elif "remove" in action and action["remove"]["dataChange"]:
                found.pop(unquote(action["remove"]["path"]), None)
    return list(found.values())


def _log_entry(tables: EventPlace, name: str, version: int) -> list[dict[str, Any]]:
    try:
        with tables.open(f"{name}/_delta_log/{version:020d}.json") as stream:
            return [json.loads(line) for line in stream]
    except FileNotFoundError:
        raise ConfigurationError(
            f"the log of the table {name!r} of {tables} begins after version {version}: read the "
            "whole table"
        ) from None
