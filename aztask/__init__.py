"""aztask: Python functions as background tasks on Azure queues, under auto-renewing leases.

A name is imported when you first use it (PEP 562), so ``aztask --help`` and the emulator start
without Kombu and without an Azure SDK.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aztask.support.formernames import install
from aztask.version import __version__

if TYPE_CHECKING:
    from aztask.app import App
    from aztask.breaker import CircuitBreaker
    from aztask.config import QueueSettings, Settings
    from aztask.context import Context, TaskLease, current_context
    from aztask.errors import (
        AlreadySettled,
        AztaskError,
        BrokerError,
        BrokerUnavailable,
        CapabilityError,
        CodecError,
        ConfigurationError,
        ContentRefused,
        CostTooLarge,
        DecodeError,
        DuplicateTask,
        EncodeError,
        InvalidQueueName,
        LeaseError,
        LeaseLost,
        MaxLeaseExceeded,
        MessageTooLarge,
        NotUnique,
        PayloadDamaged,
        PayloadMissing,
        QueueDisabled,
        QueueFull,
        QueueNotFound,
        Reject,
        ResultDamaged,
        ResultError,
        ResultTimeout,
        Retry,
        SendUnconfirmed,
        SignalRefused,
        Snooze,
        StepError,
        StepFailed,
        StepsDamaged,
        TaskCancelled,
        TaskControl,
        TaskError,
        TaskExpired,
        TaskFailed,
        TaskStopped,
        TimeLimitExceeded,
        UnknownTask,
        WaitTimeout,
        WorkerStopping,
    )
    from aztask.message.message import TaskMessage
    from aztask.message.payload import StoredValue
    from aztask.queues.lease.asyncheld import AsyncHeldLease
    from aztask.queues.lease.held import HeldLease
    from aztask.result import AsyncResult, as_completed
    from aztask.retry import RetryPolicy
    from aztask.steps.stream import StreamPart
    from aztask.support.display import Secret
    from aztask.task import ContextTask, Task
    from aztask.workflows.graphs import Signature, chain, chord, group
    from aztask.workflows.result import WorkflowResult

__all__ = [
    # Apps and tasks
    "App",
    "Task",
    "ContextTask",
    "AsyncResult",
    "StreamPart",
    "as_completed",
    "RetryPolicy",
    "CircuitBreaker",
    # Workflows
    "chain",
    "group",
    "chord",
    "Signature",
    "WorkflowResult",
    # In a running task
    "Context",
    "TaskLease",
    "current_context",
    "Retry",
    "Reject",
    "Snooze",
    # A message without a task
    "HeldLease",
    "AsyncHeldLease",
    # Values
    "TaskMessage",
    "StoredValue",
    "Secret",
    "Settings",
    "QueueSettings",
    # Errors
    "AztaskError",
    "ConfigurationError",
    "CapabilityError",
    "TaskError",
    "UnknownTask",
    "DuplicateTask",
    "NotUnique",
    "CostTooLarge",
    "TimeLimitExceeded",
    "TaskStopped",
    "StepError",
    "SignalRefused",
    "StepFailed",
    "WaitTimeout",
    "StepsDamaged",
    "WorkerStopping",
    "CodecError",
    "EncodeError",
    "DecodeError",
    "ContentRefused",
    "MaxLeaseExceeded",
    "MessageTooLarge",
    "PayloadMissing",
    "PayloadDamaged",
    "BrokerError",
    "BrokerUnavailable",
    "QueueDisabled",
    "QueueFull",
    "QueueNotFound",
    "InvalidQueueName",
    "SendUnconfirmed",
    "LeaseError",
    "AlreadySettled",
    "LeaseLost",
    "ResultError",
    "ResultTimeout",
    "ResultDamaged",
    "TaskFailed",
    "TaskCancelled",
    "TaskExpired",
    "TaskControl",
    "__version__",
]

_HOMES = {
    "App": "aztask.app",
    "CircuitBreaker": "aztask.breaker",
    "Signature": "aztask.workflows.graphs",
    "chain": "aztask.workflows.graphs",
    "chord": "aztask.workflows.graphs",
    "group": "aztask.workflows.graphs",
    "WorkflowResult": "aztask.workflows.result",
    "AsyncResult": "aztask.result",
    "StreamPart": "aztask.steps.stream",
    "as_completed": "aztask.result",
    "QueueSettings": "aztask.config",
    "Settings": "aztask.config",
    "Context": "aztask.context",
    "TaskLease": "aztask.context",
    "current_context": "aztask.context",
    "HeldLease": "aztask.queues.lease.held",
    "AsyncHeldLease": "aztask.queues.lease.asyncheld",
    "TaskMessage": "aztask.message.message",
    "StoredValue": "aztask.message.payload",
    "Secret": "aztask.support.display",
    "RetryPolicy": "aztask.retry",
    "Task": "aztask.task",
    "ContextTask": "aztask.task",
}

install()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'aztask' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "aztask.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
