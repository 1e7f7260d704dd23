"""The ledger's app, with faults in the supervisor's process alone, which a hook brings in.

* FAULTY_LOOP: the loop raises as soon as the file of this name exists.
* FAULTY_STEP: handling of the delivery ``bad`` fails, once, at this step, see `STEPS`.
* FAULTY_PARTS: a folder. While it has a file ``receive`` or ``schedules``, that part fails.
* FAULTY_SILENCE: seconds after which a silent pool process is shown, and after twice as long one
  that runs nothing of what it has is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ledger_app import app, noop

from aztask.hooks import WorkerInfo
from aztask.queues.local.receiver import LocalReceiver
from aztask.telemetry import health
from aztask.worker.core import Core
from aztask.worker.pipeline.decisions import Decisions
from aztask.worker.pipeline.deliveries import Deliveries
from aztask.worker.pipeline.work import WorkItem
from aztask.worker.pool import dispatcher
from aztask.worker.upkeep.journal import Journal
from aztask.worker.upkeep.scheduling import Scheduling


class Injected(Exception):
    """The error that nobody expects."""


STEPS: dict[str, tuple[Any, str]] = {
    "received": (Journal, "received"),
    "claimed": (Deliveries, "swapped"),
    "sent": (dispatcher, "_packet"),
    "answered": (Decisions, "succeeded"),
}
"""Where the supervisor's loop handles one delivery: the owner of a function, and its name."""


def _before(owner: Any, name: str, check: Callable[..., None]) -> None:
    """Have `check` called first, with the arguments."""
    original = getattr(owner, name)

    def checked(*arguments: Any, **named: Any) -> Any:
        check(*arguments)
        return original(*arguments, **named)

    setattr(owner, name, checked)


def _fail_while(path: Path) -> Callable[..., None]:
    def check(*arguments: Any) -> None:
        if path.exists():
            raise Injected(path.name)

    return check


def _fail_once(task_id: str, step: str) -> Callable[..., None]:
    left = [step]

    def check(*arguments: Any) -> None:
        for each in arguments:
            items = each if isinstance(each, list) else [each]
            found = [one for one in items if isinstance(one, WorkItem)]
            if left and any(one.key.task_id == task_id for one in found):
                raise Injected(left.pop())

    return check


@app.around_worker
def faults(worker: WorkerInfo) -> Iterator[None]:
    if path := os.environ.get("FAULTY_LOOP"):
        _before(Core, "tick", _fail_while(Path(path)))
    if step := os.environ.get("FAULTY_STEP"):
        _before(*STEPS[step], _fail_once("bad", step))
    if folder := os.environ.get("FAULTY_PARTS"):
        _before(LocalReceiver, "receive", _fail_while(Path(folder) / "receive"))
        _before(Scheduling, "_turn", _fail_while(Path(folder) / "schedules"))
        health.UNREADY_SECONDS = 1.0  # type: ignore[misc]
    if seconds := float(os.environ.get("FAULTY_SILENCE", "0")):
        dispatcher.PING_SECONDS = seconds / 4  # type: ignore[misc]
        dispatcher.SILENT_SECONDS = seconds  # type: ignore[misc]
        dispatcher.IDLE_SECONDS = 2 * seconds  # type: ignore[misc]
    yield


if os.environ.get("FAULTY_PARTS"):
    app.schedule("yearly", noop.s(), cron="0 0 1 1 *")
