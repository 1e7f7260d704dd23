"""A running task's view of its session, and the state that the session keeps.

Rules
1. The state belongs to the session, not to a message: it outlives tasks and workers.
2. Only the holder of the session's lease reads or writes the state: after losing it, a task gets
   LeaseLost.
3. With encryption, the state is encrypted for its queue and session: copied to another session, it
   is not read. One that was stored before encryption was switched on is read as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from aztask.message.codec import Codec


class StateKeeper(Protocol):
    """Where a running task's session has its state."""

    def load(self) -> Any:
        """The state; None if there is none."""
        ...

    def store(self, value: Any) -> None:
        """Store a state before this returns; None removes it."""
        ...


class MemoryState:
    """A state that is not kept: for contexts without a worker."""

    def __init__(self) -> None:
        self._value: Any = None

    def load(self) -> Any:
        return self._value

    def store(self, value: Any) -> None:
        self._value = value


@dataclass(frozen=True, slots=True)
class StateCodec:
    """The state of one session as its service keeps it: rule 3."""

    codec: Codec
    queue: str
    session: str

    def encode(self, value: Any) -> bytes | None:
        """The bytes to keep, None for None. Raises EncodeError."""
        if value is None:
            return None
        data, codec = self.codec.encode_value(value), self.codec
        return codec.cipher.encrypt(data, *self._place) if codec.encrypts else data

    def decode(self, data: bytes | None) -> Any:
        """The value of what `encode` made. Raises DecodeError, KeyMissing."""
        if data is None:
            return None
        return self.codec.decode_value(self.codec.cipher.decrypt(data, *self._place))

    @property
    def _place(self) -> tuple[str, str, str]:
        return "session", self.queue, self.session


class Session:
    """The session of a task sent ``with_options(session=...)``, as ``context.session``.

    ::

        context.session.state = (context.session.state or 0) + 1
    """

    def __init__(self, name: str, keeper: StateKeeper) -> None:
        """Called by aztask. `keeper`: reads and writes the state, through the worker."""
        self._name = name
        self._keeper = keeper

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
        return self._keeper.load()

    @state.setter
    def state(self, value: Any) -> None:
        """Store any value that a task could return; None removes the state.

        When the assignment returns, the state is stored. If the process dies before that, the
        previous state stays. If it dies after that and before its message is settled, the message
        runs again and finds the new state. Raises LeaseLost, EncodeError, CapabilityError (too
        large, or the service has no place for it).
        """
        self._keeper.store(value)
