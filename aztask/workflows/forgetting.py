"""Deletes a workflow that has ended, with the results of its tasks.

If the process dies in between, the workflow is still there, some of its tasks' results are not:
call it again. Housekeeping deletes the rest a retention time later in any case.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

from aztask.canvas.plan import task_id_of
from aztask.results.workflows import Listed
from aztask.workflows.engine import WorkflowEngine

THREADS: Final = 16
"""Requests at a time to a store that is reached over a network."""


def forget(engine: WorkflowEngine, workflow: str) -> bool:
    """Delete the workflow; False if it is unknown or has not ended.

    Raises Damaged and BrokerUnavailable.
    """
    root = engine.graphs.root(workflow)
    plan = None if root is None else engine.graphs.plan(workflow, root)
    if root is None or plan is None or root.ended_at is None:
        return False
    tasks = [task_id_of(workflow, node.number) for node in plan.nodes if node.task]
    if engine.results.remote:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(engine.results.forget, tasks))
    else:
        for task in tasks:
            engine.results.forget(task)
    engine.store.delete_workflow(Listed(workflow, root.at, root.ended_at))
    engine.graphs.forget(workflow)
    return True
