"""What a running task knows of its session, and the state that the session keeps.

Rules
1. The state belongs to the session, not to a message: it outlives tasks and workers.
2. Only whoever holds the session's lease reads or writes it: a task that lost it gets LeaseLost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Session:
    """``context.session`` of a task that was sent ``with_options(session=...)``."""

    def __init__(self, name: str, *, load: Callable[[], Any], store: Callable[[Any], None]) -> None:
        """load, store: how to ask the worker for the state."""
        self._name = name
        self._load = load
        self._store = store

    def __repr__(self) -> str:
        return f"<Session {self._name}>"

    @property
    def id(self) -> str:
        """What the sender named it."""
        return self._name

    @property
    def state(self) -> Any:
        """The value that was last assigned, by any task of the session; None at first.

        Reading asks the broker. Raises LeaseLost, CapabilityError, and DecodeError where another
        program stored something that is not msgpack.
        """
        return self._load()

    @state.setter
    def state(self, value: Any) -> None:
        """Store any value that a result may be; None removes the state.

        On return it is stored. If the process dies before that, the former state stands; if it
        dies after that and before its message is settled, the message runs again and finds this
        state. Raises LeaseLost, EncodeError, CapabilityError (too large, or nowhere to keep it).
        """
        self._store(value)
