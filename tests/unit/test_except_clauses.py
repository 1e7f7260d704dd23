"""Which clauses of the adapters catch errors that a bug raises, too, and why each one may."""

from __future__ import annotations

import ast
import importlib
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TALKING = (
    *("queues", "azure", "stores", "telemetry", "operate"),
    "worker/upkeep/uploader.py",
)
"""The parts that talk to a service, or that judge what a service answered."""

SILENT = ("queues/engine", "queues/lease", "operate/cli", "operate/top")
"""Their own parts that do neither."""

BUGS = (ValueError, TypeError, AttributeError, LookupError, RuntimeError, ArithmeticError)
"""What a bug raises. A clause that catches one of them could take a bug for an outage."""


class Clause(NamedTuple):
    """An except clause, or a ``suppress``. where: module and function."""

    where: str
    line: int
    caught: str


def clauses_of(tree: ast.Module, module: str, names: Mapping[str, Any]) -> Iterator[Clause]:
    """The clauses that catch an error of `BUGS` and do not raise it again."""
    for function, node in _with_functions(tree, ""):
        if isinstance(node, ast.ExceptHandler):
            kinds, raised = node.type, _raises_again(node)
        elif _is_suppress(node):
            assert isinstance(node, ast.Call)
            kinds, raised = ast.Tuple(node.args, ast.Load()), False
        else:
            continue
        if not raised and _catches_bugs(kinds, names):
            caught = ast.unparse(kinds) if kinds is not None else "everything"
            yield Clause(f"{module}:{function}", node.lineno, caught)


def _with_functions(node: ast.AST, within: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        inner = within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{within}.{child.name}".lstrip(".")
        yield within, child
        yield from _with_functions(child, inner)


def _is_suppress(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress")


def _raises_again(handler: ast.ExceptHandler) -> bool:
    """Whether the clause ends with ``raise``, whatever it caught."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def _catches_bugs(kinds: ast.expr | None, names: Mapping[str, Any]) -> bool:
    if kinds is None:
        return True
    found = _flat(eval(compile(ast.Expression(_located(kinds)), "<types>", "eval"), {**names}))
    return any(issubclass(bug, kind) or kind in BUGS for kind in found for bug in BUGS)


def _located(kinds: ast.expr) -> ast.expr:
    return ast.fix_missing_locations(kinds)


def _flat(kinds: Any) -> list[type[BaseException]]:
    if isinstance(kinds, tuple):
        return [each for kind in kinds for each in _flat(kind)]
    return [kinds]


def found() -> list[Clause]:
    clauses: list[Clause] = []
    for part in TALKING:
        place = ROOT / "aztask" / part
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            if any(path.is_relative_to(ROOT / "aztask" / each) for each in SILENT):
                continue
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            names = vars(importlib.import_module(module.removesuffix(".__init__")))
            clauses += clauses_of(ast.parse(path.read_text()), module, names)
    return clauses


FROM_BYTES = "it reads bytes that anybody may have written, and says that they are damaged"
ENCODES = "it writes values of the user, and says that they cannot be written"
LOGGED = "it is logged with its traceback, and not as an outage"
PARSED = "it reads a text, and says what is wrong with it or does without"
SHOWN = "people see the error itself, beside what could be read"
PASSED_ON = "whoever asked gets the error itself"
POOL_CLOSED = "our thread pool raises it when it is closed, and nothing else is called"
GIVEN_UP = "the connection is given up already, and the error behind that was told"
TABLE = "the module tells by type and place what is a broken connection, and raises the rest"

ALLOWED = {
    "aztask.operate.celeryapp:CeleryApp._named": SHOWN,
    "aztask.operate.celeryapp:_open_backend": SHOWN,
    "aztask.operate.celeryapp:_seconds": PARSED,
    "aztask.operate.celerybeat:cron_of": PARSED,
    "aztask.operate.celeryschedules:CelerySends._is_known": "then the task is sent",
    "aztask.operate.celeryschedules:CelerySends.route": "the send raises it, too",
    "aztask.operate.celeryschedules:CelerySends.send_occurrence": SHOWN,
    "aztask.operate.stepcheck:main": SHOWN,
    "aztask.operate.stepcheck:replayed": SHOWN,
    "aztask.azure.access:_made": "azure-identity's constructor; told as configuration",
    "aztask.azure.connection:_number": PARSED,
    "aztask.queues.local.payload:envelope_of": FROM_BYTES,
    "aztask.queues.local.payload:payload_of": ENCODES,
    "aztask.queues.local.receiver:sequence_number": PARSED,
    "aztask.queues.servicebus.admin:_emulators_client": PARSED,
    "aztask.queues.servicebus.reading:read_message": FROM_BYTES,
    "aztask.azure.vaultkeys:VaultKey.unwrapped": "the SDK raises it if the host is no vault",
    "aztask.azure.vaultkeys:new_key": "the SDK raises it if the host is no vault",
    "aztask.azure.vaultkeys:_code": FROM_BYTES,
    "aztask.queues.servicebus.client:BusClient._in_background": POOL_CLOSED,
    "aztask.queues.servicebus.client:_close": LOGGED,
    "aztask.queues.servicebus.control:Control._call": PASSED_ON,
    "aztask.queues.servicebus.control:Control._do": LOGGED,
    "aztask.queues.servicebus.lock:LockWatch._search_once": LOGGED,
    "aztask.queues.servicebus.private:_translated": TABLE,
    "aztask.queues.servicebus.private:disconnect": GIVEN_UP,
    "aztask.queues.servicebus.private:keep_alive": "bugs are logged, see `is_symptom`",
    "aztask.queues.servicebus.reading:_build": FROM_BYTES,
    "aztask.queues.servicebus.symptoms:tell_apart.checked_live": TABLE,
    "aztask.queues.servicebus.symptoms:tell_apart.told_apart": GIVEN_UP,
    "aztask.queues.servicebus.values:pairs_of": FROM_BYTES,
    "aztask.queues.servicebus.wire:_application_properties": ENCODES,
    "aztask.queues.servicebus.wire:_body_of": FROM_BYTES,
    "aztask.queues.servicebus.wire:_headers_of": FROM_BYTES,
    "aztask.queues.servicebus.wire:envelope_of": FROM_BYTES,
    "aztask.queues.servicebus.wire:message_of": ENCODES,
    "aztask.queues.servicebus.wire:sequence_number": PARSED,
    "aztask.queues.storagequeue.inspection:StorageInspector.surroundings": PARSED,
    "aztask.queues.servicebus.mailboxes:_notes": FROM_BYTES,
    "aztask.queues.storagequeue.mailboxes:_notes": FROM_BYTES,
    "aztask.queues.storagequeue.mailboxes:_read": FROM_BYTES,
    "aztask.queues.storagequeue.messages:_messages_of": FROM_BYTES,
    "aztask.queues.storagequeue.messages:_shared_key": PARSED,
    "aztask.queues.storagequeue.wire:_pack": ENCODES,
    "aztask.queues.storagequeue.wire:read_text": FROM_BYTES,
    "aztask.stores.shardlayouts:LayoutRows.pinned": FROM_BYTES,
    "aztask.stores.shardlayouts:_layout_of": FROM_BYTES,
    "aztask.stores.connections:Connections.missing_file": "opening the file says what is wrong",
    "aztask.stores.events.event:from_line": FROM_BYTES,
    "aztask.stores.events.event:is_newer": FROM_BYTES,
    "aztask.operate.deadletters.actions:edit": "`inspect` raises it for arguments that do not fit",
    "aztask.operate.jobrunner:JobRunner._work": LOGGED,
    "aztask.operate.ledger:unpacked": FROM_BYTES,
    "aztask.operate.overview:Reader._heartbeats": SHOWN,
    "aztask.operate.overview:Reader._list_failures": SHOWN,
    "aztask.operate.overview:Reader._stats": SHOWN,
    "aztask.operate.verify:attempt": SHOWN,
    "aztask.operate.verifybench:Bench.close": SHOWN,
    "aztask.operate.verifylong:_read": PARSED,
    "aztask.operate.watch.rules:_checked": PARSED,
    "aztask.operate.watch.rules:_here": PARSED,
    "aztask.operate.requests:_json": PARSED,
    "aztask.operate.requests:_replay": PARSED,
    "aztask.stores.payloads.payloads:Payloads._drop_pending": "the caller raises the first error",
    "aztask.stores.payloads.store:listed": PARSED,
    "aztask.stores.records.damage:Columns.settlement": FROM_BYTES,
    "aztask.stores.records.damage:Columns.state": FROM_BYTES,
    "aztask.stores.records.damage:unpacked": FROM_BYTES,
    "aztask.stores.records.documentsigning:_entries": FROM_BYTES,
    "aztask.stores.records.tallysums:_check": FROM_BYTES,
    "aztask.stores.records.watcher:ResultWatcher._answer": "asyncio raises it if a loop is closed",
    "aztask.stores.records.watcher:ResultWatcher._tell": PASSED_ON,
    "aztask.stores.tables.errors:_code_in": FROM_BYTES,
    "aztask.stores.tables.rows:unpacked": FROM_BYTES,
    "aztask.telemetry.health:Contact.ask": LOGGED,
    "aztask.telemetry.http:PageMaker.make": LOGGED,
    "aztask.telemetry.prometheus.worker:Backlog.count": LOGGED,
    "aztask.telemetry.prometheus.exporter:QueueDepths._show_workers": LOGGED,
    "aztask.telemetry.prometheus.exporter:QueueDepths.refresh": LOGGED,
    "aztask.telemetry.prometheus.exporter:exporting.turn": LOGGED,
    "aztask.worker.upkeep.uploader:Uploader._guarded_upload": LOGGED,
}
"""Where such errors may be caught, and why no bug is taken for an outage there."""


def test_no_clause_takes_a_bug_for_an_outage() -> None:
    """A new one needs its reason here, or better the types that the service's client raises."""
    unknown = [each for each in found() if each.where not in ALLOWED]
    assert not unknown, "\n".join(map(str, unknown))


def test_the_list_of_reasons_is_not_longer_than_needed() -> None:
    assert ALLOWED.keys() <= {each.where for each in found()}


def test_the_errors_of_the_sdks_are_no_errors_of_python() -> None:
    """`SDK_ERRORS` and its like: no bug may be one of them."""
    for module, name in (("aztask.queues.servicebus.errors", "SDK_ERRORS"),):
        kinds = _flat(getattr(importlib.import_module(module), name))
        assert not [kind for kind in kinds for bug in BUGS if issubclass(bug, kind)]


def test_the_search_finds_what_it_should() -> None:
    source = textwrap.dedent(
        """
        def caught():
            try: pass
            except (OSError, ALL): return None

        class Part:
            def all(self):
                with contextlib.suppress(KeyError, Exception): pass
                try: pass
                except: pass

            def good(self):
                try: pass
                except ValueError: raise
                except OSError: pass
        """
    )
    names = {"ALL": (OSError, (TypeError,)), "contextlib": None}
    clauses = list(clauses_of(ast.parse(source), "m", names))
    assert [(each.where, each.line) for each in clauses] == [
        ("m:caught", 4),
        ("m:Part.all", 8),
        ("m:Part.all", 10),
    ]
