"""Sending unique tasks: take the key, publish, note that it is sent."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from aztask.errors import BrokerError, CodecError, ConfigurationError, NotUnique, SendUnconfirmed
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.sending.publisher import Publication
from aztask.settlement import Complete
from aztask.stores.connections import Connections
from aztask.stores.records.base import Outcome, RunKey, RunRecord, State
from aztask.stores.records.uniques import uniques_of
from aztask.support import clock
from aztask.uniqueness.engine import Blocked, UniqueEngine
from aztask.uniqueness.rules import UniqueRules


@dataclass(frozen=True, slots=True)
class UniqueAnswer:
    """How a send ended: the id of the caller's task, and whether it was sent now."""

    task_id: str
    sent: bool


class UniqueSender:
    """The part of a sender for unique tasks. Any thread may call; a forked child reconnects."""

    def __init__(self, connections: Connections, codec: Codec) -> None:
        self._connections = connections
        self._codec = codec
        self._engine: UniqueEngine | None = None

    def engine(self, task: str) -> UniqueEngine:
        """The engine on this process's connections.

        * `task`: a unique task, for the error.

        Raises ConfigurationError without a result store that keeps unique tasks.
        """
        results = self._connections.results()
        if self._engine is None or self._engine.results is not results:
            store = uniques_of(results)
            if results is None or store is None:
                raise ConfigurationError(
                    f"task {task} is unique, which needs a result store that all senders share: "
                    'give the App results="local://" or another'
                )
            self._engine = UniqueEngine(results, store, self._codec, self._connections.broker)
        return self._engine

    def send(
        self,
        rules: UniqueRules,
        key: str,
        message: TaskMessage,
        delay: float,
    ) -> Generator[Publication, None, UniqueAnswer]:
        """The steps of one send, as those of `Sender.steps`.

        If the process dies between the key and the send, housekeeping sends the message.
        """
        engine = self.engine(message.task)
        answer = engine.take(rules, key, message, delay)
        if isinstance(answer, Blocked):
            engine.complete(answer)
            if rules.on_conflict == "replace":
                answer = engine.replace(
                    answer, lambda over: engine.take(rules, key, message, delay, over)
                )
        if isinstance(answer, Blocked):
            return UniqueAnswer(self._conflict(engine, rules, message, answer), sent=False)
        try:
            yield Publication(message.queue, [message], delay)
        except SendUnconfirmed:
            raise  # housekeeping sends it again under the same id
        except (BrokerError, CodecError):
            engine.give_up(answer)  # it was certainly not sent
            raise
        engine.confirm(answer)
        return UniqueAnswer(message.id, sent=True)

    @staticmethod
    def _conflict(
        engine: UniqueEngine, rules: UniqueRules, message: TaskMessage, blocked: Blocked
    ) -> str:
        """The id for a call whose key another task holds. Raises NotUnique."""
        holder = blocked.claim.task_id
        if rules.on_conflict == "return" or holder == message.id:
            return holder
        if rules.on_conflict == "drop":
            text = f"dropped, since task {holder} holds its key"
            outcome = Outcome(State.CANCELLED, Complete(), error=text, at=clock.wall())
            key, task, queue = RunKey(*message.key), message.task, message.queue
            engine.results.bury([RunRecord(key, task, queue, State.CANCELLED, outcome=outcome)])
            return message.id
        raise NotUnique(
            f"task {message.task} is unique, and task {holder} holds its key: wait for that one, "
            'or send with on_conflict="return"',
            task_id=holder,
        )
