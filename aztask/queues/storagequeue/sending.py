"""Puts messages into a Storage queue: one request for each, many of them in parallel.

Rules
1. A request that certainly had no effect is retried, for about two seconds. One that may have had
   an effect is not: a silent repetition would store the message twice.
2. The error names the messages that were not confirmed, so that the caller resends only those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aztask.errors import BrokerUnavailable, SendUnconfirmed
from aztask.message.envelope import Envelope
from aztask.queues.storagequeue.delivery import FailedRequest, QueueRequests
from aztask.queues.storagequeue.errors import Effect, Failure
from aztask.support.threadpool import ThreadPool

SEND_SECONDS: Final = 10.0
SEND_PAUSES: Final = (0.1, 0.4, 1.0)
MAX_RETRY_AFTER: Final = 2.0
"""Seconds. If the service asks for a longer pause, the caller has to wait and resend."""


class MessageSender:
    """Puts messages into one queue."""

    def __init__(self, requests: QueueRequests, thread_pool: ThreadPool) -> None:
        """thread_pool: for transports that cannot run several requests in parallel."""
        self._requests = requests
        self._thread_pool = thread_pool

    def put_all(self, texts: Sequence[tuple[str, float]]) -> list[Failure | None]:
        """Put messages, each with its delay in seconds; returns the failure of each, or None.

        Crash window: if the process dies, some messages are stored, and the caller does not learn
        which. If they are sent again under the same ids, some are stored twice; with a result store
        each of them still runs once.
        """
        failures = self._put_once(texts)
        for pause in SEND_PAUSES:
            again = [n for n, failure in enumerate(failures) if failure and _is_retryable(failure)]
            if not again:
                break
            self._requests.clock.sleep(max(pause, *(_retry_after(failures[n]) for n in again)))
            tried = self._put_once([texts[n] for n in again])
            for n, failure in zip(again, tried, strict=True):
                failures[n] = failure
        return failures

    def _put_once(self, texts: Sequence[tuple[str, float]]) -> list[Failure | None]:
        if len(texts) > 1:
            failures = self._requests.put_all(texts, SEND_SECONDS)
            if failures is not None:
                return failures
        return self._thread_pool.map(self._put, texts)

    def _put(self, text: tuple[str, float]) -> Failure | None:
        try:
            self._requests.put(*text, SEND_SECONDS)
        except FailedRequest as failed:
            return failed.failure
        return None


def _is_retryable(failure: Failure) -> bool:
    """Whether a retry within this call may succeed and cannot store the message twice."""
    return failure.effect is Effect.NONE and _retry_after(failure) <= MAX_RETRY_AFTER


def _retry_after(failure: Failure | None) -> float:
    """The pause in seconds that the service asks for; 0 without one."""
    return getattr(failure.error, "retry_after", None) or 0.0 if failure else 0.0


def judge(queue: str, envelopes: Sequence[Envelope], failures: Sequence[Failure | None]) -> None:
    """Raise the error for a batch with these failures, if any; see `Broker.send`."""
    failed = [(envelope, each) for envelope, each in zip(envelopes, failures, strict=True) if each]
    if not failed:
        return
    error = failed[0][1].error
    unsure = sum(each.effect is Effect.UNSURE for _, each in failed)
    if not unsure and len(failed) == len(envelopes):
        raise error
    raise SendUnconfirmed(
        f"{len(failed)} of {len(envelopes)} messages for queue {queue!r} were not confirmed "
        f"({error}); send those again under the same ids",
        [envelope for envelope, _ in failed],
    ) from (error if isinstance(error, BrokerUnavailable) else None)
