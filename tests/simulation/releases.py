"""Two releases on one queue: workers of the one before know neither steps nor waits.

Rules
1. The release before takes the name on the wire for the task's own. So it does not know the task of
   a message that continues a run, and puts it off.
2. It has a function under a flow's plain name, as an application has that was written before. A
   flow that has not waited yet may come there, which asks for another try. One that has waited
   must not: it would run from its first line.
3. Its workers are there for less than `unknown_task_grace`, and die and freeze as others do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.message.message import CONTINUE, TaskMessage, plain_name

FORMER: Final = 0
"""The version of a worker of the release before; those of this release have 1 and 2."""

GRACE: Final = 600.0
"""Seconds for which a message is put off that no worker can run."""

HANDED_OVER: Final = 7.0
"""Seconds until a flow comes again that the release before has received (rule 2)."""


class FormerCodec(Codec):
    """Reads and writes messages as the release before does (rule 1)."""

    def from_envelope(
        self, envelope: Envelope, queue: str, *, any_age: bool = False, stored: str = ""
    ) -> TaskMessage:
        """The message under the name that is on the wire."""
        message = super().from_envelope(envelope, queue, any_age=any_age, stored=stored)
        name = str(envelope.headers["task"])
        return message if name == message.task else replace(message, task=name, continued=False)

    def to_envelope(
        self, message: TaskMessage, *, delay: float = 0.0, stored: str = ""
    ) -> Envelope:
        """The envelope, with the name that was read."""
        if (name := plain_name(message.task)) != message.task:
            message = replace(message, task=name, continued=message.task.endswith(CONTINUE))
        return super().to_envelope(message, delay=delay, stored=stored)
