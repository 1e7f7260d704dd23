"""Messages: one invocation of a task on its way, its headers, its encoding and its limits."""

from aztask.message.message import TaskMessage

__all__ = ["TaskMessage"]
