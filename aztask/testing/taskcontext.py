"""A `Context` for tasks that a test calls."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from aztask.context import Context, current_context, set_current_context, unsent_context


@contextmanager
def task_context(
    *,
    task_id: str | None = None,
    task: str = "test",
    queue: str | None = None,
    saved: Any = None,
    resubmit_count: int = 0,
    delivery_count: int = 1,
    session: str | None = None,
    lease: float | timedelta = math.inf,
) -> Iterator[Context]:
    """Make a `Context` the current one for the length of a ``with`` block, as in a running task.

    A task with a context that is called in the block gets it, and `aztask.current_context` returns
    it. Checkpoints are kept in ``context.saved``, and the state of the session in
    ``context.session.state``; an extension of the lease is always granted.

    * `task_id`: a new UUID by default.
    * `task`, `queue`: the names of task and queue: "test" and "default" by default.
    * `saved`: the checkpoint that an earlier run has left; none by default.
    * `resubmit_count`, `delivery_count`: 0 and 1 by default, as in a first run.
    * `session`: the name of the session; by default there is none.
    * `lease`: how long the lease lasts, in seconds or as a ``timedelta``; by default it does not
      end. 0 is a lease that is lost already.
    """
    seconds = lease.total_seconds() if isinstance(lease, timedelta) else lease
    context = unsent_context(
        task_id=task_id,
        task=task,
        queue=queue,
        saved=saved,
        resubmit_count=resubmit_count,
        delivery_count=delivery_count,
        session=session,
        lease=seconds,
    )
    before = current_context()
    set_current_context(context)
    try:
        yield context
    finally:
        set_current_context(before)
