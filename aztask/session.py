"""A running task's view of its session, and the state that the session keeps.

Rules
1. The state belongs to the session, not to a message: it outlives tasks and workers.
2. Only the holder of the session's lease reads or writes the state: after losing it, a task gets
   LeaseLost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Session:
    """The session of a task sent ``with_options(session=...)``, as ``context.session``.

    ::

        context.session.state = (context.session.state or 0) + 1
    """

    def __init__(self, name: str, *, load: Callable[[], Any], store: Callable[[Any], None]) -> None:
        """Called by aztask. `load`, `store`: read and write the state through the worker."""
        self._name = name
        self._load = load
        self._store = store

    def __repr__(self) -> str:
        return f"<Session {self._name}>"

    @property
    def id(self) -> str:
        """The name that the sender gave the session."""
        return self._name

    @property
    def state(self) -> Any:
        """The value last assigned by any task of the session; None at first.

        Reading it asks the broker. Raises LeaseLost, CapabilityError, and DecodeError if another
        program stored something that is not msgpack.
        """
        return self._load()

    @state.setter
    def state(self, value: Any) -> None:
        """Store any value that a task could return; None removes the state.

        When the assignment returns, the state is stored. If the process dies before that, the
        previous state stays. If it dies after that and before its message is settled, the message
        runs again and finds the new state. Raises LeaseLost, EncodeError, CapabilityError (too
        large, or the service has no place for it).
        """
        self._store(value)
