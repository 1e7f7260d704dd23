"""The parts of the workflow engine over one result store, one broker and one codec."""

from __future__ import annotations

from aztask.message.codec import Codec
from aztask.stores.records.base import ResultStore
from aztask.stores.records.workflows import WorkflowStore, workflows_of
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.workflows.documents import Documents
from aztask.workflows.graph import Graphs
from aztask.workflows.inputs import Inputs
from aztask.workflows.joins import Joins
from aztask.workflows.mailing import Mailer, Outlet


class WorkflowEngine:
    """Runs the workflows of one result store. Any thread may call; a forked child makes its own.

    Attributes: `store`, `results`, `documents`, `graphs`, `joins`, `inputs`.
    """

    def __init__(
        self,
        results: ResultStore,
        store: WorkflowStore,
        outlet: Outlet,
        codec: Codec,
        clock: Clock,
    ) -> None:
        """store: the workflows of `results`."""
        self.results = results
        self.store = store
        self.documents = Documents(store, remote=results.remote, clock=clock)
        self.graphs = Graphs(store, clock)
        self.mailer = Mailer(outlet, codec, self.graphs, clock)
        self.joins = Joins(self.documents, self.graphs, self.mailer, results, clock)
        self.inputs = Inputs(self.documents, self.graphs, results)


def engine_for(
    results: ResultStore | None,
    outlet: Outlet,
    codec: Codec,
    clock: Clock = SYSTEM_CLOCK,
) -> WorkflowEngine | None:
    """The engine; None without a result store, or if it keeps no workflows."""
    store = workflows_of(results)
    if results is None or store is None:
        return None
    return WorkflowEngine(results, store, outlet, codec, clock)
