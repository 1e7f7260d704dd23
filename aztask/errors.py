"""Every error that aztask raises.

::

    AztaskError
    ├ ConfigurationError            a setting, URL or option is wrong: nothing was attempted
    │ ├ CapabilityError             this broker lacks a feature that you use
    │ └ LeaseRefused                the queue holds its messages for another time than the lease
    ├ TaskError
    │ ├ UnknownTask                 no task is registered under that name
    │ ├ DuplicateTask               two functions were registered under one name
    │ ├ NotUnique                   another task holds the key of a unique task
    │ ├ CostTooLarge                the call costs more than its limit ever has at once
    │ ├ TimeLimitExceeded           raised in a task at its soft limit, recorded at its hard limit
    │ │ └ MaxLeaseExceeded          raised in a task shortly before its max_lease is used up
    │ ├ StepError                   a step is used in a way that a later run cannot repeat
    │ │ └ StepsDamaged              a recorded step cannot be read
    │ ├ SignalRefused               the task takes no such signal
    │ ├ WaitTimeout                 nothing came in the time of a wait
    │ ├ StepFailed                  a recorded error whose class the code no longer has
    │ ├ TaskStopped                 raised in a running task that you cancel
    │ └ WorkerStopping              raised in a running task whose worker stops
    ├ CodecError
    │ ├ EncodeError                 the arguments or the result cannot be written
    │ ├ DecodeError                 the bytes are damaged or in another format
    │ ├ ContentRefused              the content type, the signature or a limit is refused
    │ │ └ KeyMissing                it is encrypted with a key that this program does not have
    │ ├ MessageTooLarge             more bytes than the service accepts
    │ ├ PayloadMissing              the stored arguments or result are gone
    │ └ PayloadDamaged              they are not what was stored
    ├ NotFound                      nothing of that name or id exists
    ├ BrokerError
    │ ├ BrokerUnavailable           not reachable now: try again
    │ │ └ QueueDisabled             the queue is disabled in the service
    │ ├ QueueFull                   the broker has no room: nothing was stored
    │ ├ QueueNotFound
    │ ├ InvalidQueueName            a ConfigurationError, too
    │ ├ SendUnconfirmed             may or may not be stored: send again under the same id
    │ └ SubmitFailed                some rows of a table were not, or perhaps not, sent as tasks
    ├ LeaseError
    │ ├ AlreadySettled              a mistake of the caller: the lease was settled before
    │ └ LeaseLost                   the broker says so, or the deadline passed
    ├ ResultError
    │ ├ ResultTimeout
    │ ├ ResultDamaged               the stored row or value cannot be read
    │ ├ ForeignId                   another app on the same result store uses the id
    │ ├ TaskFailed                  carries the remote type, message and traceback text
    │ ├ TaskCancelled
    │ └ TaskExpired
    └ TaskControl                   raised by a task to decide what happens next
      ├ Retry
      ├ Reject
      └ Snooze

Rules: an error's text says what happened, to what, and what to do next, on one line. The first line
of a class's docstring is its default text. No error contains a secret.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from difflib import get_close_matches
from typing import Any


class AztaskError(Exception):
    """Something in aztask went wrong.

    The base class of all errors here. Without arguments, the text of an error is the first line of
    its class's docstring.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(args or ((type(self).__doc__ or "").partition("\n")[0],)))


class ConfigurationError(AztaskError):
    """A setting is wrong; correct it and start again.

    Raised before anything is sent or received.
    """


class CapabilityError(ConfigurationError):
    """This broker cannot do that; see docs/brokers.md for what each one can."""


class LeaseRefused(ConfigurationError):
    """The queue's lock duration is not the lease; set the lease to it, or change the queue.

    * `actual`: the lock duration in seconds, to about a second; None if it is not known so far.
    """

    def __init__(self, *args: object, actual: float | None = None) -> None:
        super().__init__(*args)
        self.actual = actual


class TaskError(AztaskError):
    """A task could not be found, registered or finished."""


class UnknownTask(TaskError):
    """No task is registered under that name; import the module that defines it."""


class DuplicateTask(TaskError):
    """Two functions are registered under one task name; give one of them name=..."""


class NotUnique(TaskError):
    """Another task holds the key of this unique task.

    `task_id` is the id of the other one.
    """

    def __init__(self, *args: object, task_id: str = "") -> None:
        super().__init__(*args)
        self.task_id = task_id


class CostTooLarge(TaskError):
    """The call costs more than its limit ever has at once; split it, or raise the limit's burst."""


class TimeLimitExceeded(TaskError):
    """The task ran longer than its time limit.

    Raised in the task at its soft limit. At its hard limit the process is killed, and the failure
    is recorded under this name.
    """


class MaxLeaseExceeded(TimeLimitExceeded):
    """The run held its message for max_lease; raise max_lease if the task needs longer.

    Raised in the task shortly before, so that the failure can still be recorded. It counts as a
    failed attempt, whether the task stops or is killed.
    """


class StepError(TaskError):
    """A step is used in a way that a later run cannot repeat; change the task's code.

    The task is dead-lettered without retries. After this error it can take no further step.
    """


class StepsDamaged(StepError):
    """A recorded step cannot be read, so the task does not know what it has done."""


class StepFailed(TaskError):
    """A recorded error of a step, if its class no longer exists where it was.

    * `error_type`: the name of that class.
    """

    def __init__(self, error_type: str, text: str) -> None:
        super().__init__(f"{error_type}: {text}" if text else error_type)
        self.error_type = error_type


class SignalRefused(TaskError):
    """The task takes no such signal: it has ended, or has too many; nothing was sent."""


class WaitTimeout(TaskError, TimeoutError):
    """What the task waited for did not come in time; catch it to go on without.

    Raised in the task by `Context.wait_for`. It is recorded: every later run gets it again.
    """


class TaskStopped(TaskError):
    """The task was cancelled while it ran; leave things tidy and stop now.

    Raised in a task that ``AsyncResult.cancel(running=True)`` stops.
    """


class WorkerStopping(TaskError):
    """The worker is stopping and its time-out has passed; clean up, save a checkpoint, and end.

    Raised in a task that still runs then; a coroutine is cancelled. Its message is given back and
    the run does not count. ``context.stopping`` says so earlier.
    """


class CodecError(AztaskError):
    """A message could not be written or read."""


class EncodeError(CodecError):
    """A value cannot be written in this format; pass plain data or choose another serializer."""


class DecodeError(CodecError):
    """The bytes are not a message that aztask understands."""


class ContentRefused(CodecError):
    """The message's content type, signature or size is not accepted here."""


class KeyMissing(ContentRefused):
    """It is encrypted with a key that this program does not have; add it to `encryption_keys`."""


class MessageTooLarge(CodecError):
    """The message is larger than the service takes; pass a reference to the data instead."""


class PayloadMissing(CodecError):
    """The stored payload is gone: it was removed, or it is older than its lifetime."""


class PayloadDamaged(CodecError):
    """The stored payload is not what was stored: its size or its digest is wrong."""


class NotFound(AztaskError):
    """Nothing of that name or id exists."""


class BrokerError(AztaskError):
    """The broker refused or failed."""


class BrokerUnavailable(BrokerError):
    """The broker cannot be reached now; try again.

    ``retry_after`` holds the seconds that the service asks you to wait, or None. ``busy`` is True
    if it answers, and takes no more for now.
    """

    retry_after: float | None = None
    busy: bool = False


class QueueDisabled(BrokerUnavailable):
    """The queue is switched off in the service; enable it there."""


class QueueFull(BrokerError):
    """The broker has no room left; nothing was stored."""


class QueueNotFound(BrokerError):
    """The queue does not exist; create it with: aztask queues create NAME"""


class InvalidQueueName(BrokerError, ConfigurationError):
    """The queue name is not allowed by this service."""


class SendUnconfirmed(BrokerError):
    """The broker did not confirm the send: it may be stored or not; send again under the same id.

    ``unconfirmed`` holds the envelopes in question. Give them to ``Broker.send`` again: they keep
    their message ids, so duplicate detection and the result store count each one once.
    """

    def __init__(self, message: str | None = None, unconfirmed: Sequence[Any] = ()) -> None:
        super().__init__(*((message,) if message else ()))
        self.unconfirmed = tuple(unconfirmed)


class SubmitFailed(BrokerError):
    """Not all rows were sent; submit again under the same submission id.

    ``report`` holds the counts, if they are known.
    """

    def __init__(self, message: str | None = None, report: Any = None) -> None:
        super().__init__(*((message,) if message else ()))
        self.report = report


class LeaseError(AztaskError):
    """A lease could not be used."""


class AlreadySettled(LeaseError):
    """This delivery was settled before; settle each delivery once."""


class LeaseLost(LeaseError):
    """The lease is no longer ours: another worker may have the message; stop now."""


class ResultError(AztaskError):
    """There is no result, or it is not a success."""


class ResultTimeout(ResultError):
    """The result did not arrive in time; the task goes on.

    Ask again, or give ``get`` a longer timeout.
    """


class ResultDamaged(ResultError):
    """The result store's data about the task is damaged; send the task again with force=True."""


class ForeignId(ResultError):
    """Another owner on the same result store uses this id; use another one.

    Raised when you send under a `task_id` or start under a `workflow_id` that an app with another
    broker uses, or ask for its result. Nothing was sent, and nothing of the other app is shown.

    * `owner`: the broker of the other app.
    """

    def __init__(self, *args: object, owner: str = "") -> None:
        super().__init__(*args)
        self.owner = owner


class TaskFailed(ResultError):
    """The task failed.

    ``error_type`` and ``error`` are the remote exception's class name and text; ``traceback`` is
    its formatted traceback, "" if none was recorded.
    """

    def __init__(self, error_type: str, error: str, traceback: str = "") -> None:
        super().__init__(f"{error_type}: {error}" if error else error_type)
        self.error_type = error_type
        self.error = error
        self.traceback = traceback


class TaskCancelled(ResultError):
    """The task was cancelled before it ran."""


class TaskExpired(ResultError):
    """The task was not run: its expiry time had passed."""


class TaskControl(AztaskError):
    """Base class of the exceptions by which a task decides what happens to its message."""


class Retry(TaskControl):
    """Run the task again after `delay` seconds; this counts as a failure.

    ::

        raise Retry(delay=30, reason="the shop is closed")

    * `delay`: seconds or a ``timedelta``. None, the default: as the task's retry policy says.
    * `reason`: a text for events and dead letters.
    """

    def __init__(self, delay: float | timedelta | None = None, reason: str = "") -> None:
        super().__init__(reason or "the task asked to be retried")
        self.delay = delay


class Reject(TaskControl):
    """Dead-letter the message at once, with this reason; it is not retried.

    ::

        raise Reject("no such customer", "customer 12 was deleted in May")

    * `reason`: names the dead letter, and groups it with others.
    * `description`: what is special about this one. ``result.error`` has both.
    """

    def __init__(self, reason: str = "rejected", description: str = "") -> None:
        super().__init__(f"{reason}: {description}" if description else reason)
        self.reason = reason
        self.description = description


class Snooze(TaskControl):
    """Run the task again after `delay`, without counting a failure.

    * `delay`: seconds or a ``timedelta``.

    The retry policy's ``max_snoozes`` limits how often.
    """

    def __init__(self, delay: float | timedelta) -> None:
        after = delay if isinstance(delay, timedelta) else f"{delay} s"
        super().__init__(f"the task asked to run again in {after}")
        self.delay = delay


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """`` Did you mean 'x'?`` with a leading space, or "" if no known name is similar to `name`."""
    near = get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
