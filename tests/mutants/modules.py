"""The core modules, by import path. This is the only list: change it when a module moves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

MODULES = (
    "aztask.queues.lease.bounds",
    "aztask.queues.lease.held",
    "aztask.queues.lease.state",
    "aztask.queues.lease.keeper",
    "aztask.retry",
    "aztask.settlement",
    "aztask.message.codec",
    "aztask.message.signatures",
    "aztask.message.message",
    "aztask.message.headers",
    "aztask.message.envelope",
    "aztask.queues.engine.messages",
    "aztask.queues.engine.queues",
    "aztask.queues.engine.receiving",
    "aztask.queues.engine.sessions",
    "aztask.queues.engine.settling",
    "aztask.stores.records.local.store",
    "aztask.stores.records.controls",
    "aztask.stores.records.deadindex",
    "aztask.stores.records.uniques",
    "aztask.stores.rows",
    "aztask.stores.local.rows",
    "aztask.stores.tables.rows",
    "aztask.queues.local.receiver",
    "aztask.queues.storagequeue.receiver",
    "aztask.queues.storagequeue.settling",
    "aztask.queues.servicebus.control",
    "aztask.queues.servicebus.receiver",
    "aztask.queues.servicebus.session",
    "aztask.worker.pipeline.deliveries",
    "aztask.worker.pipeline.settling",
    "aztask.worker.pipeline.pipeline",
    "aztask.worker.pipeline.pointers",
    "aztask.worker.pipeline.redelivery",
    "aztask.worker.pipeline.decisions",
    "aztask.worker.pipeline.work",
    "aztask.worker.pool.dispatcher",
    "aztask.worker.pool.requests",
    "aztask.worker.pool.timelimits",
    "aztask.worker.lane",
    "aztask.worker.core",
    "aztask.worker.limiting.slots",
    "aztask.worker.limiting.stage",
    "aztask.worker.pipeline.workflowends",
    "aztask.worker.pipeline.uniquekeys",
    "aztask.limits.breakers",
    "aztask.limits.claiming",
    "aztask.limits.control",
    "aztask.worker.breaking",
    "aztask.limits.holders",
    "aztask.limits.permits",
    "aztask.limits.rates",
    "aztask.limits.slots",
    "aztask.limits.storeclock",
    "aztask.schedules.view",
    "aztask.schedules.rules",
    "aztask.schedules.engine",
    "aztask.schedules.runner",
    "aztask.schedules.schedules",
    "aztask.schedules.states",
    "aztask.schedules.stored",
    "aztask.schedules.template",
    "aztask.schedules.triggers",
    "aztask.uniqueness.engine",
    "aztask.uniqueness.rules",
    "aztask.workflows.bits",
    "aztask.workflows.documents",
    "aztask.workflows.edits",
    "aztask.workflows.engine",
    "aztask.workflows.result",
    "aztask.workflows.graph",
    "aztask.workflows.inputs",
    "aztask.workflows.joins",
    "aztask.workflows.mailing",
    "aztask.workflows.packing",
    "aztask.workflows.repair",
    "aztask.workflows.rows",
    "aztask.workflows.starting",
    "aztask.operate.workflows",
    "aztask.stores.payloads.holders",
    "aztask.stores.payloads.opening",
    "aztask.stores.payloads.store",
    "aztask.stores.payloads.payloads",
    "aztask.sending.asyncsend",
    "aztask.app.workflows",
    "aztask.support.chance",
    "aztask.sending.publisher",
    "aztask.sending.queueplan",
    "aztask.sending.send",
    "aztask.sending.sent",
    "aztask.sending.sessionrules",
    "aztask.sending.unique",
)

TESTS = (
    "tests/contract",
    "tests/unit/queues",
    "tests/unit/workflows",
    "tests/unit/queues/engine",
    "tests/unit/explain",
    "tests/unit/queues/lease",
    "tests/unit/limits",
    "tests/unit/message",
    "tests/unit/stores/payloads",
    "tests/unit/stores/records",
    "tests/unit/schedules",
    "tests/unit/sending",
    "tests/unit/testing",
    "tests/unit/uniqueness",
    "tests/unit/worker",
    "tests/unit/workflows",
    "tests/unit/test_breaker.py",
    "tests/unit/test_retry.py",
    "tests/unit/test_settlement.py",
)
"""What a mutant is tried with: the core's own unit tests, and of the contract tests those of the
local broker and store. Other tests may notice it too, but seldom what these do not, and to find out
which of them reach it would take as long as to try the mutants."""


@dataclass(frozen=True)
class Source:
    """A module of the core: its import path, where its file lies, and what is in it."""

    name: str
    path: Path
    text: str

    @property
    def short(self) -> str:
        """Its name with its package, by which marks call it: ``servicebus.receiver``."""
        return ".".join(self.name.split(".")[1:][-2:])

    @property
    def relative(self) -> Path:
        """Its path in the tree."""
        return self.path.relative_to(ROOT) if self.path.is_absolute() else self.path


def find(names: tuple[str, ...] | list[str]) -> list[Source]:
    """The sources, found without importing them. Raises SystemExit for an unknown module."""
    found = []
    for name in names:
        path = _path(name)
        if path is None:
            raise SystemExit(f"{name} does not exist; correct tests/mutants/modules.py")
        found.append(Source(name, path, path.read_text(encoding="utf-8")))
    return found


def _path(name: str) -> Path | None:
    """The file of a module, which is not imported: the mutant must come first."""
    path = ROOT.joinpath(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate.resolve()
    return None
