"""The payloads of an app: what is stored beside the queue, and how it is fetched again.

Rules
1. Making this does no I/O. The store opens when it is first used, once per process.
2. Of many large arguments, `PARALLEL` are stored at the same time, and no more are in memory.
3. With encryption, a payload is encrypted for its name. A reference has the size and the digest of
   what is stored.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from typing import Any, Final

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import BrokerError, ConfigurationError, DecodeError, PayloadDamaged
from aztask.message.codec import Codec
from aztask.message.encryption import NO_CIPHER, Cipher, is_encrypted
from aztask.message.message import TaskMessage
from aztask.message.payload import StoredValue
from aztask.stores.payloads.store import PayloadKind, PayloadStore, belongs, new_name
from aztask.support import clock
from aztask.support.durations import to_seconds
from aztask.support.failpoint import hit
from aztask.support.forks import fork_safe_lock
from aztask.support.threadpool import ThreadPool

logger = logging.getLogger(__name__)

_PAYLOAD: Final = "payload"
PARALLEL: Final = 4
HOUR: Final = 3600.0
WEEK: Final = 7 * 86400.0
LONGEST: Final = 3650 * 86400.0


class Payloads:
    """Stores what is larger than a threshold, and fetches it. Any thread may call.

    * `threshold`: bytes of encoded arguments.
    * `checkpoint_threshold`, `result_threshold`: bytes of an encoded checkpoint, and of a result.
    """

    def __init__(
        self,
        make: Callable[[], PayloadStore],
        *,
        threshold: int,
        checkpoint_threshold: int,
        result_threshold: int,
        owner: Callable[[], Owner] = lambda: NO_OWNER,
        cipher: Cipher = NO_CIPHER,
    ) -> None:
        """
        * `make`: opens the store. `owner`: whose payloads these are.
        * `cipher`: encrypts and decrypts them. The others are attributes.
        """
        self._cipher = cipher
        self._owner = owner
        self.threshold = threshold
        self.checkpoint_threshold = checkpoint_threshold
        self.result_threshold = result_threshold
        self._make = make
        self._lock = fork_safe_lock()
        self._store: PayloadStore | None = None
        self._pid = os.getpid()
        self._threads: ThreadPool | None = None

    @property
    def store(self) -> PayloadStore:
        """The store, opened at the first use. Raises ConfigurationError."""
        if self._store is None or self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._forget()
                if self._store is None:
                    self._store = self._make()
        return self._store

    @property
    def mark(self) -> str:
        """The mark of the owner, for names; "" without one."""
        return self._owner().of_broker.mark

    def replace(self, store: PayloadStore) -> Callable[[], None]:
        """Use `store` until the returned function is called. For tests."""
        before, self._store, self._pid = self._store, store, os.getpid()

        def back() -> None:
            self._store = before

        return back

    def close(self) -> None:
        """Close the store and the threads; they open again when needed."""
        if self._pid == os.getpid():
            if self._threads is not None:
                self._threads.close()
            if self._store is not None:
                self._store.close()
        self._forget()

    def _forget(self) -> None:
        self._store = self._threads = None
        self._pid = os.getpid()

    # -- messages ----------------------------------------------------------------------------

    def offload(self, messages: Iterable[TaskMessage]) -> list[TaskMessage]:
        """These messages; the bodies of large ones are stored, and replaced by references.

        Crash window: if the process dies after a body is stored and before its message is sent,
        no message refers to it, until ``aztask doctor --collect`` removes it. Raises
        BrokerUnavailable: then nothing that was stored here is kept.
        """
        done: list[TaskMessage] = []
        threshold, left = self.threshold, iter(messages)
        for message in left:
            if len(message.body) > threshold:
                return self._offload(done, chain((message,), left))
            done.append(message)
        return done

    def _offload(
        self, done: list[TaskMessage], messages: Iterable[TaskMessage]
    ) -> list[TaskMessage]:
        """Go on with `offload`, whose small messages so far are `done`."""
        pending: deque[tuple[int, Future[StoredValue]]] = deque()
        try:
            for message in messages:
                if len(message.body) > self.threshold:
                    while len(pending) >= PARALLEL:
                        self._await(done, pending)
                    pending.append((len(done), self._begin(message)))
                    done.append(replace(message, body=b""))
                else:
                    done.append(message)
            while pending:
                self._await(done, pending)
        except BaseException:
            self._drop_pending(pending)
            self.drop(done)
            raise
        return done

    def drop(self, messages: Sequence[TaskMessage]) -> None:
        """Remove the payloads of messages that were certainly not sent, as far as that works."""
        self.discard(
            name
            for message in messages
            if message.payload is not None
            for name in owned([message.payload], message.id)
        )

    def filled(self, message: TaskMessage) -> TaskMessage:
        """The message with its body, which is fetched if it is stored apart.

        Raises PayloadMissing, PayloadDamaged, BrokerUnavailable.
        """
        if message.payload is None:
            return message
        return replace(message, body=self.load(StoredValue.parse(message.payload)), payload=None)

    def _begin(self, message: TaskMessage) -> Future[StoredValue]:
        if self._pid != os.getpid():
            self._forget()
        if self._threads is None:
            self._threads = ThreadPool("payloads", PARALLEL)
        return self._threads.submit(lambda: self._upload(message))

    def _upload(self, message: TaskMessage) -> StoredValue:
        stored = self.keep(PayloadKind.ARGUMENTS, message.body, owner=message.id)
        hit("uploaded")
        return stored

    @staticmethod
    def _await(done: list[TaskMessage], pending: deque[tuple[int, Future[StoredValue]]]) -> None:
        index, future = pending[0]
        done[index] = replace(done[index], payload=str(future.result()))
        pending.popleft()

    def _drop_pending(self, pending: Iterable[tuple[int, Future[StoredValue]]]) -> None:
        """Remove what is being stored, once that has ended."""
        for _, future in pending:
            try:
                stored = future.result()
            except Exception:  # noqa: BLE001, S112  # the caller raises the first error
                continue
            self.discard([stored.name])

    # -- values ------------------------------------------------------------------------------

    def keep(
        self, kind: PayloadKind, data: bytes, at: float | None = None, *, owner: str = ""
    ) -> StoredValue:
        """Store `data` under a name with `at` and `owner`, see `new_name`.

        Raises BrokerUnavailable.
        """
        name = new_name(kind, at, owner, self.mark)
        if self._cipher.encrypts:
            data = self._cipher.encrypt(data, _PAYLOAD, name)
        stored = StoredValue.of(name, data)
        self.store.write(stored.name, data)
        return stored

    def put(self, codec: Codec, value: Any, keep: float | timedelta) -> StoredValue:
        """Store a value for many tasks, see `App.put`. Raises ConfigurationError too."""
        seconds = to_seconds(keep, "keep")
        if not 0 < seconds <= LONGEST:
            raise ConfigurationError(f"keep takes seconds above 0, at most ten years, not {keep!r}")
        data = codec.encode_value(value, large=True)
        return self.keep(PayloadKind.VALUE, data, clock.wall() + seconds + HOUR)

    def load(self, stored: StoredValue) -> bytes:
        """Fetch, verify and decrypt.

        Raises PayloadMissing, PayloadDamaged, KeyMissing, BrokerUnavailable.
        """
        data = self.store.read(stored)
        if not is_encrypted(data):
            return data
        try:
            return self._cipher.decrypt(data, _PAYLOAD, stored.name)
        except DecodeError as error:
            raise PayloadDamaged(f"the payload {stored.name}: {error}") from None

    def discard(self, removed: Iterable[str]) -> None:
        """Remove the payloads of these names; what cannot be removed now is collected later.

        Errors are logged only: the work that used the payloads is done.
        """
        names = list(removed)
        if not names:
            return
        try:
            self.store.remove(names)
        except BrokerError as error:
            logger.warning(
                "%d payloads could not be removed, aztask doctor --collect removes them: %s",
                len(names),
                error,
            )


def owned(references: Iterable[str], task_id: str) -> Iterator[str]:
    """The names of those payloads that the end of this task removes; see `belongs`."""
    for text in references:
        name = StoredValue.parse(text).name
        if belongs(name, task_id):
            yield name
