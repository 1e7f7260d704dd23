"""Locks that a child of a fork may need are unlocked there."""

from __future__ import annotations

import ast
import os
import threading
from pathlib import Path

import aztask
from aztask.support.forks import fork_safe_lock, fork_safe_rlock

ROOT = Path(aztask.__file__).parent
EXEMPT = {
    "worker": "pool processes are forked before these exist; the supervisor forks nothing else",
    "queues/engine": "a database is replaced in a child: aztask.queues.engine.forking",
    "queues": "Connections opens a new broker in a child",
    "queues/lease": "belongs to receivers, which a child makes anew",
    "limits": "permits are held by a worker's supervisor",
    "celery/transport": "a channel makes new boxes and consumers in a child",
    "testing": "tests and their services",
    "azure/transport.py": "belongs to a broker or a store, which a child opens anew",
    "context.py": "belongs to one run, in a pool process",
    "steps/history.py": "belongs to one run, in a pool process",
    "steps/emitting.py": "belongs to one run, in a pool process",
    "stores/events/sink.py": "a sink starts empty in a child, with a new lock",
    "sending/asyncsend.py": "starts anew in a child, with a new lock",
    "emulator/view.py": "only the emulator's command uses it",
    "support/threadpool.py": "its threads end with a fork; the loop is for tests",
    "support/forks.py": "makes the locks",
}
NAMES = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"}


def plain_locks():
    """The modules that make locks with `threading`."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in NAMES
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "threading"
            ):
                yield path.relative_to(ROOT)


def exemption(module):
    """The innermost place around a module, or itself, that has a reason; None without one."""
    return next((str(each) for each in (module, *module.parents) if str(each) in EXEMPT), None)


def test_every_lock_that_outlives_a_fork_is_fork_safe():
    found = set(plain_locks())
    assert [str(each) for each in found if exemption(each) is None] == []
    used = {exemption(each) for each in found}
    assert used == EXEMPT.keys(), "an exemption that nothing needs any more"


def test_a_lock_that_another_thread_holds_is_free_in_the_child():
    locks = [fork_safe_lock(), fork_safe_rlock()]
    held, done = threading.Event(), threading.Event()

    def hold():
        with locks[0], locks[1]:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        free = all(lock.acquire(timeout=5) for lock in locks)
        os._exit(0 if free else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    done.set()
    thread.join()
