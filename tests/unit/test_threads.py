"""Each thread that aztask starts belongs to a part, which logs its errors and tries again.

The checker reads the source with `ast`: it finds what starts a thread in any other way than through
`aztask.support.parts.Part`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "aztask"

STARTERS = {
    "Thread",
    "Timer",
    "ThreadPoolExecutor",
    "start_new_thread",
    "start_joinable_thread",
    "PartThread",
    "Alarm",
}
"""Calls and base classes, by the last part of their names."""

REASONS = {
    "support/parts.py": "the parts themselves",
    "steps/engine.py": "the branches of a task; gather waits for them and raises their errors",
    "emulator/view.py": "the output of aztask top: it ends when its reader has gone",
    "support/threadpool.py": "runs an event loop; errors of its coroutines belong to their callers",
    "celery/transport/looped.py": "kombu's receiver: Celery's loop gets the error and reconnects",
    "celery/transport/scheduled.py": "one command's; it waits, and the errors are logged there",
    "queues/lease/asyncheld.py": "one call at a time; the coroutine that waits gets its error",
    "azure/transport.py": "opens connections in parallel; the caller waits and gets the errors",
    "workflows/result.py": "deletes rows in parallel; the chore waits and gets the errors",
    "worker/pool/watcher.py": "the watching process, a script: it imports nothing of aztask",
    "worker/pool/poolprocess.py": "plain tasks of the asyncio pool: a part adopts each thread",
    "testing/servicebus.py": "the emulator is for tests and runs in no worker",
    "spark/events/compactfiles.py": "a command's; it waits and gets the errors",
    "spark/kind.py": "a command's: it stops the Spark job when the terminal has gone",
}
"""Files that start threads which no part watches, and why that is right."""


def starters(source: str) -> list[str]:
    """What a module starts threads with, apart from the methods of `Part`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        used = node.bases if isinstance(node, ast.ClassDef) else []
        if isinstance(node, ast.Call):
            used = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
        names = [ast.unparse(each) for each in used if isinstance(each, ast.Name | ast.Attribute)]
        found += [name for name in names if name.rpartition(".")[2] in STARTERS]
    return found


def renamed(source: str) -> list[str]:
    """The names under which a starter is imported, other than its own."""
    return [
        alias.asname
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
        if alias.asname and alias.name.rpartition(".")[2] in {*STARTERS, "threading", "_thread"}
    ]


def test_each_thread_belongs_to_a_part_or_has_a_reason() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    found = {name for name, path in files.items() if starters(path.read_text())}
    assert found - REASONS.keys() == set(), "start it with Part.thread, once or alarm"
    assert REASONS.keys() - found == set(), "these start none any more"
    assert [name for name, path in files.items() if renamed(path.read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        "threading.Thread(target=f).start()",
        "Thread(target=f)",
        "x = threading.Timer(1, f)",
        "class A(threading.Thread): pass",
        "with ThreadPoolExecutor(2) as pool: pass",
        "_thread.start_new_thread(f, ())",
        "PartThread(part, 'name', f)",
        "make(threading.Thread)",
        "make(kind=futures.ThreadPoolExecutor)",
    ],
)
def test_the_checker_sees_what_starts_a_thread(source: str) -> None:
    assert starters(source)


def test_the_checker_sees_other_names_and_no_methods_of_parts() -> None:
    assert renamed("from threading import Thread as T") == ["T"]
    assert renamed("import threading as t") == ["t"]
    assert starters("self.part.thread(f, 'name')\nPart('a').once(f, 'b')\npart.alarm(1, f)") == []
