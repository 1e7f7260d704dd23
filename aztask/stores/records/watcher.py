"""Waits for results on behalf of coroutines, with a few threads that all of them share.

Rules
1. The thread runs only while a coroutine waits. It looks at every awaited task after each change
   that the store reports, and at least once a second.
2. A task that is new to the thread is looked at once by another shared thread, because the first
   one may wait for a change. Stores across a network are asked for several tasks at the same time.
3. The thread waits for a change only when it has looked at all tasks that are awaited: a change
   that came before is not reported, and in inline mode nothing may be left to run.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from aztask.errors import BrokerError, ForeignId
from aztask.stores.records.base import ResultStore, RunRecord
from aztask.support.forks import fork_safe_lock
from aztask.support.parts import Part
from aztask.support.threadpool import ThreadPool

T = TypeVar("T")

LONGEST_WAIT: Final = 1.0
ASKING: Final = 4

Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[RunRecord]"]


class ResultWatcher:
    """Waits for the ends of tasks in one result store."""

    def __init__(self, store: ResultStore) -> None:
        self._ref = weakref.ref(store)  # the watchers are kept for as long as their stores
        self._lock = fork_safe_lock()
        self._waiters: dict[str, list[Waiter]] = {}
        self._running = False
        self._unseen = False
        self._part = Part("results")
        self._pid = os.getpid()

    async def ended(self, task_id: str) -> RunRecord:
        """Wait until the task has ended; returns its record. Raises what the store raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[RunRecord] = loop.create_future()
        waiter = (loop, future)
        with self._lock:
            self._waiters.setdefault(task_id, []).append(waiter)
            self._unseen = True
            if not self._running:
                self._part.thread(self._watch, "aztask-results").start()
                self._running = True
        _shared.threads().submit(lambda: self._tell([task_id], self._look))
        try:
            return await future
        finally:
            with self._lock:
                self._leave(task_id, waiter)

    @property
    def _store(self) -> ResultStore:
        store = self._ref()
        if store is None:
            raise BrokerError("the result store was closed")
        return store

    @property
    def forked(self) -> bool:
        """True in a process that was forked since: the thread did not survive that."""
        return self._pid != os.getpid()

    def _leave(self, task_id: str, waiter: Waiter) -> None:
        waiters = self._waiters.get(task_id, [])
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            self._waiters.pop(task_id, None)

    def _watch(self) -> None:
        version = 0
        while True:
            with self._lock:
                task_ids = list(self._waiters)
                self._unseen = False
                if not task_ids:
                    self._running = False
                    return
            self._tell(task_ids, self._look)
            with self._lock:
                task_ids = [] if self._unseen else list(self._waiters)
            if task_ids:
                version = self._tell(task_ids, partial(self._wait, version)) or 0

    def _wait(self, version: int, _: list[str]) -> int:
        return self._store.wait_changed(version, LONGEST_WAIT)

    def _tell(self, task_ids: list[str], call: Callable[[list[str]], T]) -> T | None:
        """Call it; an error goes to the coroutines that wait for these tasks."""
        try:
            return call(task_ids)
        except BaseException as error:  # noqa: BLE001  # the coroutines raise it
            for task_id in task_ids:
                self._answer(task_id, error)
            return None

    def _look(self, task_ids: list[str]) -> None:
        get = partial(_found, self._store.get)
        found = _shared.threads().map(get, task_ids) if self._store.remote else map(get, task_ids)
        for task_id, record in zip(task_ids, found, strict=True):
            if isinstance(record, ForeignId) or (record is not None and record.state.final):
                self._answer(task_id, record)

    def _answer(self, task_id: str, answer: RunRecord | BaseException) -> None:
        with self._lock:
            waiters = self._waiters.pop(task_id, [])
        for loop, future in waiters:
            try:
                loop.call_soon_threadsafe(_settle, future, answer)
            except RuntimeError:  # the loop was closed: no coroutine waits
                continue


def _found(get: Callable[[str], RunRecord | None], task_id: str) -> RunRecord | ForeignId | None:
    """The record. The error of an id that another owner uses concerns this task alone."""
    try:
        return get(task_id)
    except ForeignId as error:
        return error


def _settle(future: asyncio.Future[RunRecord], answer: RunRecord | BaseException) -> None:
    if future.done():  # it was cancelled, or timed out
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class _Shared:
    """The threads that all watchers of this process share."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._pid = 0
        self._threads: ThreadPool | None = None

    def threads(self) -> ThreadPool:
        """The shared threads; new ones after a fork, which no thread survives."""
        with self._lock:
            if self._threads is None or self._pid != os.getpid():
                self._pid, self._threads = os.getpid(), ThreadPool("awaiting", ASKING)
            return self._threads


_shared = _Shared()
_watchers: WeakKeyDictionary[Any, ResultWatcher] = WeakKeyDictionary()
_lock = fork_safe_lock()


def watcher_of(store: ResultStore) -> ResultWatcher:
    """The watcher of this store, made when it is first needed in this process."""
    with _lock:
        watcher = _watchers.get(store)
        if watcher is None or watcher.forked:
            watcher = _watchers[store] = ResultWatcher(store)
        return watcher
