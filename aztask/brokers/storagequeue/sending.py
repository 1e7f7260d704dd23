"""Putting messages into a Storage queue: a request for each, many of them side by side.

Rules
1. What certainly did not happen is tried again, for about two seconds. What is in doubt is not: a
   silent repetition would store the message twice.
2. The caller is told which messages were not confirmed, so that those alone are sent again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from aztask.brokers.storagequeue.delivery import FailedRequest, QueueRequests
from aztask.brokers.storagequeue.errors import Effect, Failure
from aztask.errors import BrokerUnavailable, SendUnconfirmed
from aztask.message.envelope import Envelope
from aztask.support.threadpool import ThreadPool

SEND_SECONDS: Final = 10.0
SEND_PAUSES: Final = (0.1, 0.4, 1.0)
MOST_ASKED: Final = 2.0
"""Seconds: a service that asks for a longer pause than this gets it from the caller."""


class MessageSender:
    """Puts messages into one queue."""

    def __init__(self, requests: QueueRequests, thread_pool: ThreadPool) -> None:
        """thread_pool: for transports that cannot have several requests under way."""
        self._requests = requests
        self._thread_pool = thread_pool

    def put_all(self, texts: Sequence[tuple[str, float]]) -> list[Failure | None]:
        """Put these messages, each with its delay in seconds: what went wrong with each.

        Crash window: a process that dies meanwhile has stored some of them, and nobody is told
        which. Sent again under the same ids, those are there twice, and run once where results are
        kept.
        """
        failures = self._put_once(texts)
        for pause in SEND_PAUSES:
            again = [n for n, failure in enumerate(failures) if failure and _passing(failure)]
            if not again:
                break
            time.sleep(max(pause, *(_asked(failures[n]) for n in again)))
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


def _passing(failure: Failure) -> bool:
    """Whether another try within this call may succeed, and cannot store the message twice."""
    return failure.effect is Effect.NONE and _asked(failure) <= MOST_ASKED


def _asked(failure: Failure | None) -> float:
    """Seconds that the service asks to wait."""
    return getattr(failure.error, "retry_after", None) or 0.0 if failure else 0.0


def judge(queue: str, envelopes: Sequence[Envelope], failures: Sequence[Failure | None]) -> None:
    """Raise what became of a batch; see `Broker.send`."""
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
