"""The real result store of Azure Tables, and the real port of rows, over the modelled services.

All of aztask runs: the layout of rows, compare-and-set, budgets of time, doubts after lost answers,
marks, index, quarantine and sweeps. Replaced are the SDK's clients and the thread pool.
"""

from __future__ import annotations

from typing import Any, Final, cast

from aztask.address.addresses import TablesAddress
from aztask.address.owner import NO_OWNER, Owner
from aztask.message.rowsignatures import RowSignatures
from aztask.stores.records.tables.store import CONTAINER, TABLE, TablesResults
from aztask.stores.tables.client import TableRequests
from aztask.stores.tables.store import TablesStore
from aztask.support.display import Secret

from .blobs import Blobs, ModelContainer
from .inline import replaced
from .tableclient import ModelTable
from .tables import Tables
from .wire import Line

ADDRESS: Final = TablesAddress(
    "simulated", "https://simulated-tables", "https://simulated-blobs", Secret("a2V5a2V5a2V5")
)


def table_requests(service: Tables, line: Line, table: str) -> TableRequests:
    """The real requests to one table."""
    return _modelled(TableRequests(ADDRESS, table), service, line, table)


def _modelled(requests: TableRequests, service: Tables, line: Line, table: str) -> TableRequests:
    client = cast("Any", ModelTable(service, line, table))
    requests._table = requests._batches = client
    requests._thread_pool = replaced(requests._thread_pool)
    return requests


def rows_store(service: Tables, line: Line, table: str = TABLE) -> TablesStore:
    """The real port of rows on one table, which must exist."""
    return TablesStore(table_requests(service, line, table), line.clock)


def tables_results(
    service: Tables,
    blobs: Blobs,
    line: Line,
    *,
    owner: Owner = NO_OWNER,
    table: str = TABLE,
    container: str = CONTAINER,
    signatures: RowSignatures | None = None,
) -> TablesResults:
    """The real result store of one program, on its clock. Call its `create` once in a world."""
    results = TablesResults(
        ADDRESS,
        table=table,
        container=container,
        clock=line.clock,
        owner=owner,
        signatures=signatures,
    )
    _modelled(results._requests, service, line, table)
    results._blobs.__dict__["_container"] = ModelContainer(blobs, line, container)
    return results
