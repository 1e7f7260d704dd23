"""Which content types a consumer gets: those that Kombu itself would decode for it.

Rules
1. A consumer of Kombu or Celery says it in its `accept` (Celery: ``accept_content``). One that says
   nothing gets every type except those that Kombu disables, pickle and yaml.
2. A program that consumes or fetches without a `kombu.Consumer` gets every type: nothing is decoded
   before it asks for that, and then Kombu applies the program's own rule.
3. Any other message is dead-lettered with a log line. Left to Kombu, it would end the consumer's
   loop, and Celery would delete it if it is no task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

from kombu import Consumer
from kombu.exceptions import ContentDisallowed
from kombu.serialization import loads

from aztask.errors import ContentRefused
from aztask.support.display import one_line


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one consumer gets.

    * `consumer`: the Kombu consumer; None if the program decodes for itself (rule 2).
    * `further`: content types that it gets whether it accepts them or not.
    """

    consumer: Consumer | None = None
    further: frozenset[str] = frozenset()

    @classmethod
    def by(cls, callback: Callable[[Any], Any], further: frozenset[str]) -> Self:
        """What the consumer gets that this callback belongs to."""
        consumer = getattr(callback, "__self__", None)
        return cls(consumer if isinstance(consumer, Consumer) else None, further)

    def check(self, content_type: str) -> None:
        """Raise ContentRefused for a type that the consumer does not get."""
        if self.consumer is None or content_type in self.further:
            return
        try:
            loads(b"", content_type, "binary", accept=self.consumer.accept)  # only checks
        except ContentDisallowed:
            raise ContentRefused(
                f"this consumer does not accept {one_line(repr(content_type), 60)}; Celery's"
                " setting accept_content, or accept of a kombu.Consumer, names what it accepts"
            ) from None


WHATEVER: Final = Accepted()
"""For a program that decodes for itself (rule 2)."""
