"""A result backend for Celery over the result stores of aztask: Azure Tables or a local file.

::

    app = Celery("shop", broker=..., backend="aztask+tables://ACCOUNT")

Celery finds it by its entry point, ``celery.result_backends``. Only this module imports Celery.

Addresses: ``aztask+tables://ACCOUNT``, ``aztask+local:///path/results.db``, or ``aztask://`` with
the address in ``result_backend_transport_options={"results": ...}`` or in ``AZTASK_RESULTS``.

Rules
1. A success is never overwritten. Every write is compare-and-set.
2. The members of a chord count themselves, see `aztask.celery.embedded.chords`. The last one sends
   the body: there is no ``chord_unlock``. Members on aztask workers count in the same place.
3. The results of tasks that ran on aztask workers are read from their records. The ends of tasks
   that aztask sent are recorded for aztask, so that ``app.result(id).get()`` sees them and a
   redelivery to an aztask worker does not run them again.
4. Results are deleted `result_expires` after their task ended, by Celery's ``backend_cleanup``, or
   after `result_retention` by the workers of an aztask app that has the same store.

Crash windows: as in Celery, a result is stored before the message is acknowledged. With
`task_acks_late`, the task runs again if its worker dies in between. The body of a chord is sent
before that is noted. If the worker dies in between, the redelivery of the last member sends it once
more, under the same task id.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from celery import states
from celery.backends.base import KeyValueStoreBackend
from celery.canvas import maybe_signature
from celery.exceptions import ChordError, ImproperlyConfigured

from aztask.celery.embedded.chords import ChordPart, Chords, ChordState, place_of
from aztask.celery.transport.options import results_address
from aztask.errors import (
    BrokerUnavailable,
    ConfigurationError,
    EncodeError,
    KeyMissing,
    QueueNotFound,
)
from aztask.message.codec import Codec
from aztask.message.headers import VERSION
from aztask.message.message import COUNTER_LIMIT
from aztask.settlement import Complete
from aztask.stores.connections import Connections
from aztask.stores.records.base import Outcome, ResultStore, RunKey, RunRecord, State
from aztask.stores.records.workflows import (
    DocumentChange,
    ListedWorkflow,
    WorkflowStore,
    workflows_of,
)

# -- The record of a run on an aztask worker as Celery's result of a task, and the reverse.

_STATES: Final = {
    State.STARTED: states.STARTED,
    State.RETRYING: states.RETRY,
    State.SNOOZED: states.RETRY,
    State.SUCCEEDED: states.SUCCESS,
    State.FAILED: states.FAILURE,
    State.CANCELLED: states.REVOKED,
    State.EXPIRED: states.REVOKED,
}


_ENDS: Final = {
    states.SUCCESS: State.SUCCEEDED,
    states.FAILURE: State.FAILED,
    states.REVOKED: State.CANCELLED,
}


def record_of(
    request: Any, result: Any, state: str, traceback: str, encode: Callable[[Any], bytes]
) -> RunRecord | None:
    """The record of a task that a Celery worker ran; None if aztask did not send it.

    * `result`: the value, or for an error the map that Celery stores.
    """
    end = _ENDS.get(state)
    headers = getattr(request, "headers", None) or {}
    if end is None or VERSION not in headers:
        return None
    error = result if isinstance(result, dict) and end is not State.SUCCEEDED else {}
    message = error.get("exc_message", "")
    text = " ".join(map(str, message)) if isinstance(message, list | tuple) else str(message)
    outcome = Outcome(
        end,
        Complete(),
        encode(result) if end is State.SUCCEEDED else None,
        str(error.get("exc_type", "")),
        text,
        traceback,
        at=time.time(),
    )
    key = RunKey(str(request.id), *(_count(headers.get(name)) for name in _COUNTS))
    queue = (request.delivery_info or {}).get("routing_key") or ""
    return RunRecord(key, str(request.task), queue, end, str(request.hostname), outcome=outcome)


_COUNTS: Final = ("aztask-generation", "aztask-hop")


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value <= COUNTER_LIMIT else 0


def meta_of(record: RunRecord, codec: Codec) -> dict[str, Any]:
    """What Celery stores for a task: status, result, traceback and the time of its end.

    Raises KeyMissing for a result that is encrypted.
    """
    outcome = record.outcome
    state = _STATES.get(record.state, states.PENDING)
    result: Any = None
    if state == states.SUCCESS and outcome is not None and outcome.value is not None:
        try:
            result = codec.decode_value(outcome.value)
        except KeyMissing:
            raise KeyMissing(
                f"the result of task {record.key.task_id} is encrypted, and Celery's backend has no"
                " key for it: read it with aztask's App.result"
            ) from None
    elif state in states.EXCEPTION_STATES:
        name = outcome.error_type if outcome is not None else ""
        revoked = state == states.REVOKED
        result = {
            "exc_type": "TaskRevokedError" if revoked else name or "Exception",
            "exc_message": [outcome.error if outcome is not None else record.state.value],
            "exc_module": "celery.exceptions" if revoked else "builtins",
        }
    return {
        "task_id": record.key.task_id,
        "status": state,
        "result": result,
        "traceback": outcome.traceback if outcome is not None else None,
        "children": [],
        "date_done": (
            datetime.fromtimestamp(outcome.at, UTC).isoformat()
            if outcome is not None and state in states.READY_STATES
            else None
        ),
    }


logger = logging.getLogger(__name__)

DOCUMENT: Final = "celery"
PREFIX: Final = "celery-"
"""How the names of Celery's documents begin among those of the store."""

TRIES: Final = 16
PAGE: Final = 500
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0
"""Seconds between two tries of a worker to store a result."""
OUTSIDE_SECONDS: Final = 10.0
"""Seconds for which what is no task tries to store one."""


class Backend(KeyValueStoreBackend):
    """Keeps the results of a Celery app in a result store of aztask."""

    key_t = str
    supports_native_join = True
    persistent = True

    def __init__(self, *args: Any, url: str | None = None, **kwargs: Any) -> None:
        """Called by Celery. Raises ImproperlyConfigured for a wrong address."""
        super().__init__(*args, url=url, **kwargs)
        address = results_address(url, self.app.conf.get("result_backend_transport_options"))
        if not address:
            raise ImproperlyConfigured(
                "result_backend aztask:// names no store: write aztask+tables://ACCOUNT or"
                " aztask+local:///path/results.db, or set AZTASK_RESULTS"
            )
        try:
            self._connections = Connections(None, address)
        except ConfigurationError as error:
            raise ImproperlyConfigured(f"result_backend: {error}") from None
        self._codec = Codec()

    # -- stores ------------------------------------------------------------------------------

    @property
    def results(self) -> ResultStore:
        """The result store of this process; a forked child opens its own."""
        store = self._connections.results()
        if store is None:
            raise ImproperlyConfigured("result_backend aztask:// names no store")
        return store

    @property
    def documents(self) -> WorkflowStore:
        """The documents of that store."""
        store = workflows_of(self.results)
        if store is None:
            raise ImproperlyConfigured("the result store of result_backend keeps no documents")
        return store

    @property
    def chords(self) -> Chords:
        """The chords of that store."""
        return Chords(self.documents)

    # -- keys and values ---------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        """The value of a key; for a task that aztask ran, what its record says."""
        found = self.documents.read([(key, DOCUMENT)])[0]
        if found is not None:
            return found.data
        if not key.startswith(self.task_keyprefix):
            return None
        record = self.results.get(key.removeprefix(self.task_keyprefix))
        if record is None:
            return None
        encoded: str | bytes = self.encode(meta_of(record, self._codec))
        return encoded.encode() if isinstance(encoded, str) else encoded

    def mget(self, keys: list[str]) -> list[bytes | None]:
        """The values of many keys."""
        found = self.documents.read([(key, DOCUMENT) for key in keys])
        return [
            self.get(key) if each is None else each.data
            for key, each in zip(keys, found, strict=True)
        ]

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value. Raises BrokerUnavailable if other writers come first at every try."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        tag: str | None = None
        for _ in range(TRIES):
            if self.documents.write([DocumentChange(key, DOCUMENT, data, tag)])[0] is not None:
                return
            found = self.documents.read([(key, DOCUMENT)])[0]
            tag = None if found is None else found.tag
        raise BrokerUnavailable(f"other workers keep changing {key}; try again")

    def _store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Store a result; the end of a task that aztask sent is recorded for aztask, too.

        If the process dies in between, the redelivered task runs again and stores both.

        A worker whose store is missing or unreachable waits for it: see `_when_there`.
        """

        def store() -> Any:
            stored = super(Backend, self)._store_result(
                task_id, result, state, traceback=traceback, request=request, **kwargs
            )
            record = record_of(request, result, state, str(traceback or ""), self._value)
            if record is not None:
                self.results.bury([record])
            return stored

        if request is None or getattr(request, "is_eager", False):
            return store()
        return self._when_there(store, request)

    def _when_there(self, action: Callable[[], Any], request: Any) -> Any:
        """Call `action` until the store is there, as Celery's workers do for their brokers.

        A task whose result cannot be stored has not ended: with `task_acks_late` its message stays
        leased. The reason is logged once, and that the store is back. A cold shutdown ends the
        wait, and a warm one of the worker whose own thread waits.

        Outside of a task, as with `update_state` in a web process, nothing stays leased: there it
        is tried for `OUTSIDE_SECONDS`, and then the store's error is raised.
        """
        left = OUTSIDE_SECONDS if request.id is None else math.inf
        pause, said = _FIRST_PAUSE, left < math.inf
        while True:
            try:
                done = action()
            except (QueueNotFound, BrokerUnavailable) as error:
                if _stops() or left <= 0.0:
                    raise
                if not said:
                    logger.error("results cannot be stored: %s; waiting until they can", error)
                    said = True
                pause = min(pause, left)
                time.sleep(pause)
                left -= pause
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                if said and left == math.inf:
                    logger.warning("results can be stored again")
                return done

    def _set_with_state(self, key: str, value: str | bytes, state: str) -> None:
        self.set(key, value)
        if state in states.READY_STATES:
            now = time.time()
            self.documents.close_workflow(key, now, now)  # so that `cleanup` finds it

    def delete(self, key: str) -> None:
        """Delete a value, whatever its age."""
        self.documents.delete_workflow(ListedWorkflow(key, 0.0))

    def _forget(self, task_id: str) -> None:
        """Delete the result of a task, and its record if an aztask worker ran it."""
        super()._forget(task_id)
        self.results.forget(task_id)

    def cleanup(self) -> None:
        """Delete what ended longer than `result_expires` ago; called by ``backend_cleanup``."""
        if not self.expires:
            return
        before = time.time() - self.expires
        for listed in self.documents.ended_workflows(PAGE, before):
            if listed.workflow.startswith(PREFIX):
                self.documents.delete_workflow(listed)

    # -- chords ------------------------------------------------------------------------------

    def apply_chord(self, header_result_args: Any, body: Any, **kwargs: Any) -> None:
        """Note a chord before its members are sent."""
        self.ensure_chords_allowed()
        self.chords.start(str(header_result_args[0]))

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        """Note how many members it has, before the last one is sent."""
        self.chords.start(str(group_id), chord_size)

    def add_to_chord(self, chord_id: str, result: Any) -> None:
        """Note a member that a running member of the chord sends next (`Task.add_to_chord`).

        If the process dies before that send, the chord waits for a member that never comes, as on
        Redis; the redelivered member adds another one.
        """
        self.chords.add(str(chord_id), str(result.id))

    def on_chord_part_return(self, request: Any, state: str, result: Any, **kwargs: Any) -> None:
        """Count a member; the last one sends the body, or fails the chord."""
        if request.group and request.chord:
            self._when_there(lambda: self._count_member(request, state, result), request)

    def _count_member(self, request: Any, state: str, result: Any) -> None:
        group, chords = str(request.group), self.chords
        index = request.group_index
        if index is None:
            index = place_of(str(request.id))
        if state == states.SUCCESS:
            part = ChordPart(int(index), str(request.id), self._value(result))
        else:
            part = ChordPart(int(index), str(request.id), None, _text(result))
        chord = chords.ended(group, part)
        if chord is None:
            chords.start(group)
            chord = chords.ended(group, part)
        if chord is not None and chord.full and not chord.sent:
            self._finish(request, chord)
            chords.note_sent(group)

    def _finish(self, request: Any, chord: ChordState) -> None:
        callback = maybe_signature(request.chord, app=self.app)
        failed = next((part for part in chord.parts if part.value is None), None)
        if failed is not None:
            try:  # a body that is in a chord itself needs an error with a traceback
                raise ChordError(f"Dependency {failed.task_id} raised {failed.error}")
            except ChordError as error:
                self.chord_error_from_stack(callback=callback, exc=error)
            return
        values = [self._codec.decode_value(part.value or b"\xc0") for part in chord.parts]
        self.app.amqp._retry_publish(callback.delay, values)

    def _value(self, result: Any) -> bytes:
        """A value as aztask stores it; what only Celery's serializer knows goes through that."""
        try:
            return self._codec.encode_value(result)
        except EncodeError:
            return self._codec.encode_value(self.decode(self.encode(result)))

    def __reduce__(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Pickle by the address alone."""
        return super().__reduce__(args, {**(kwargs or {}), "url": self.url})


def _stops() -> bool:
    """True if the worker of this process has been told to stop. A sender imports no worker."""
    state = sys.modules.get("celery.worker.state")
    return state is not None and (
        state.should_stop is not None or state.should_terminate is not None
    )


def _text(error: Any) -> str:
    """An error in a ChordError, as Celery's other backends write it."""
    return repr(error) if isinstance(error, BaseException) else str(error)
