"""The core modules, by import path. This is the only list: change it when a module moves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODULES = (
    "aztask.lease.bounds",
    "aztask.lease.held",
    "aztask.lease.state",
    "aztask.lease.keeper",
    "aztask.retry",
    "aztask.settlement",
    "aztask.message.codec",
    "aztask.message.signatures",
    "aztask.message.signing",
    "aztask.message.message",
    "aztask.message.headers",
    "aztask.message.envelope",
    "aztask.engine.leases",
    "aztask.engine.messages",
    "aztask.engine.queues",
    "aztask.engine.sessions",
    "aztask.results.local.store",
    "aztask.brokers.local.receiver",
    "aztask.brokers.storagequeue.receiver",
    "aztask.brokers.storagequeue.renewal",
    "aztask.brokers.storagequeue.settling",
    "aztask.brokers.servicebus.control",
    "aztask.brokers.servicebus.receiver",
    "aztask.brokers.servicebus.session",
    "aztask.worker.pipeline.deliveries",
    "aztask.worker.pipeline.isolation",
    "aztask.worker.pipeline.pipeline",
    "aztask.worker.pipeline.pointers",
    "aztask.worker.pipeline.redelivery",
    "aztask.worker.pipeline.refusals",
    "aztask.worker.pipeline.settling",
    "aztask.worker.pipeline.verdict",
    "aztask.worker.pipeline.work",
    "aztask.worker.pool.dispatcher",
    "aztask.worker.pool.requests",
    "aztask.worker.pool.timelimits",
)

TESTS = (
    "tests/contract",
    "tests/unit/brokers",
    "tests/unit/engine",
    "tests/unit/lease",
    "tests/unit/message",
    "tests/unit/results",
    "tests/unit/worker",
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
    """The file of a module. A package's parent is not imported: the mutant must come first."""
    path = Path(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate.resolve()
    return None
