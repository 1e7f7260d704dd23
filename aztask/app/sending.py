"""The limits and queues of an app; and its sends: routed to a queue, sent, turned into results."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Unpack, cast

from aztask.address.priorities import NORMAL, priority_queue, queue_of_priority
from aztask.address.shards import UNSHARDED, ShardCount, read_shard_name, shard_names
from aztask.app.options import QueueOptionNames
from aztask.config import QueueSettings, Settings
from aztask.context import current_context
from aztask.errors import (
    AztaskError,
    ConfigurationError,
    InvalidQueueName,
    NotUnique,
    did_you_mean,
)
from aztask.leaseadvice.advisor import LeaseAdvisor
from aztask.limits.declaration import Limit, limit_of
from aztask.message.codec import Codec
from aztask.message.encryption import PLAIN_DIGESTS, KeyDigests
from aztask.queues.base import ANY_SESSION, Broker, Capabilities, Position, QueueOptions
from aztask.queues.lease.held import HeldLease, LeaseTerms
from aztask.result import AsyncResult
from aztask.sending.asyncsend import AsyncSender
from aztask.sending.queueplan import QueuePlan, plan_of
from aztask.sending.send import Sender
from aztask.steps.history import OpenStep
from aztask.steps.signals import TaskSignals
from aztask.stores.connections import Connections
from aztask.stores.events.event import Event
from aztask.support.durations import to_seconds
from aztask.support.interactive import interactive
from aztask.task import Invocation, Task
from aztask.taskoptions import SendOptions, check_options, name_text

# -- the limits of an app, and its queues: settings, leases, and how they are created --------------


class DeclaredLimits(dict[str, Limit]):
    """The limits that the code declares, by their names. `digests`: hide their keys."""

    digests: KeyDigests = PLAIN_DIGESTS

    def declare(
        self,
        name: str,
        *,
        rate: str | None = None,
        burst: int | None = None,
        concurrency: int | None = None,
        key: Callable[..., object] | None = None,
        cost: Callable[..., float] | None = None,
    ) -> None:
        """Add a limit, see `App.limit`. Raises ConfigurationError."""
        if name_text(name, "limit: the name") in self and not interactive():
            raise ConfigurationError(f"there is a limit {name!r} already")
        self[name] = limit_of(
            name,
            rate=rate,
            burst=burst,
            concurrency=concurrency,
            key=key,
            cost=cost,
            digests=self.digests,
        )

    def check_costs(self, task: Task[..., Any] | None, calls: Iterable[Invocation]) -> None:
        """Raise CostTooLarge if no worker could ever start one of these calls.

        Also raises what the functions for the costs raise.
        """
        if task is None or not task.limits:
            return
        limits = [limit for limit in self.of(task) if limit.cost is not None]
        for call in calls if limits else ():
            named = task.named_arguments(call.args, call.kwargs)
            for limit in limits:
                limit.cost_of(named)

    def of(self, task: Task[..., Any]) -> tuple[Limit, ...]:
        """The limits of a task. Raises ConfigurationError for a name that is not declared.

        A task may be declared before its limits, so its first send, a starting worker and ``aztask
        doctor`` find a wrong name.
        """
        for name in task.limits:
            if name not in self:
                raise ConfigurationError(
                    f"task {task.name!r}: there is no limit {name!r}; declare it with "
                    f"app.limit({name!r}, rate=...).{did_you_mean(name, tuple(self))}"
                )
        return tuple(self[name] for name in task.limits)


class DeclaredQueues:
    """The queues of an app: those that the code declares, and those that its tasks name."""

    def __init__(
        self,
        settings: Settings,
        connections: Connections,
        leases: LeaseAdvisor,
        tasks: Mapping[str, Task[..., Any]],
        limits: DeclaredLimits,
        *,
        given: Collection[str],
    ) -> None:
        """given: the names of the settings that the app's own options set."""
        self._settings = settings
        self._connections = connections
        self._leases = leases
        self._tasks = tasks
        self._limits = limits
        self._queues: dict[str, QueueSettings] = {}
        self._applied: dict[str, tuple[QueueSettings, Settings]] = {}
        self._by_priority: dict[str, str] = {}
        self._names: set[str] = set()  # those that the broker allows
        self._lease_given = "lease" in given
        self._default_named = "default_queue" in given
        self.check_name(settings.default_queue, "default_queue")

    @property
    def broker(self) -> Broker:
        """The broker, connected at the first use. Raises ConfigurationError, BrokerUnavailable."""
        return self._connections.broker()

    def declare(self, name: str, **options: Unpack[QueueOptionNames]) -> None:
        """Set options of one queue, see `App.queue`. Raises ConfigurationError."""
        check_options(options, QueueOptionNames, f"queue {name!r}")
        settings = QueueSettings.from_options(name, options)
        settings.over(self._settings)
        self._check_shards(name, settings)
        self._queues[name] = settings
        self._by_priority = {
            **{queue: home for queue, home in self._by_priority.items() if home != name},
            **{
                priority_queue(name, each): name
                for each in settings.priorities or ()
                if each != NORMAL
            },
        }

    def _check_shards(self, name: str, settings: QueueSettings) -> None:
        """Check the names of the queue, of its priorities and of their shards, and note these."""
        whole = self.whole(name)
        if whole != name:
            raise ConfigurationError(
                f"{name!r} is a shard of queue {whole!r} and has its settings; name the queue"
            )
        sent = settings.shards or 1
        read = max(sent, settings.old_shards or 1)
        shards = ShardCount(sent, read, declared=settings.shards is not None)
        queues = [priority_queue(name, each) for each in settings.priorities or (NORMAL,)]
        for each in queues:
            for shard in shard_names(each, shards.read):
                self.check_name(shard, f"queue {name!r}")
        self._connections.shard(dict.fromkeys(queues, shards))

    def check_name(self, queue: object, where: str) -> None:
        """Raise InvalidQueueName unless the broker allows the name, if the broker is known by now.

        * `queue`: None for no name.
        * `where`: who names it, for the error.
        """
        if queue is None or queue in self._names:
            return
        try:
            self._connections.check_queue_name(str(queue))
        except InvalidQueueName as error:
            raise InvalidQueueName(f"{where}: {error}") from None
        self._names.add(str(queue))

    def name_default(self) -> None:
        """Something names the default queue: it has to exist, whatever queues the tasks have."""
        self._default_named = True

    def route(self, task: Task[..., Any] | None, options: Mapping[str, Any]) -> str:
        """The queue of a send that is about to be made, see `queue_for`.

        Raises ConfigurationError if the task names a limit that is not declared: no worker would
        run it.
        """
        if task is not None and task.limits:
            self._limits.of(task)
        return self.queue_for(task, options)

    def queue_for(self, task: Task[..., Any] | None, options: Mapping[str, Any]) -> str:
        """The queue that an invocation is sent to.

        * `task`: None for a task that another program registers.
        * `options`: those of the send. A queue that they name has only the priority that they name.

        Raises ConfigurationError for a priority that the queue does not have.
        """
        queue, priority = options.get("queue"), options.get("priority")
        if task is not None and not queue:
            queue, priority = task.queue, priority or task.priority
        queue = queue or self._settings.default_queue
        if priority is None:
            return str(queue)
        own = self._queues.get(queue)
        return queue_of_priority(queue, priority, own.priorities if own else None)

    def whole(self, name: str) -> str:
        """The queue that a queue of the service is a shard of; by default itself."""
        known = self._connections.shards
        if not known:
            return name
        queue, number = read_shard_name(name)
        return queue if number < known.get(queue, UNSHARDED).read else name

    def wish(self, name: str) -> int:
        """How many shards the code says that the queue has; 1 for none."""
        return self._connections.shards.get(name, UNSHARDED).sent

    def shards(self, name: str) -> tuple[str, ...]:
        """The queues of the service that hold the messages of a queue."""
        return shard_names(name, self._connections.shards.get(name, UNSHARDED).read)

    def weights(self) -> dict[str, int]:
        """The declared weights of queues: of those with priorities, and of their priorities."""
        return {
            priority_queue(name, priority): weight
            for name, own in self._queues.items()
            for priority, weight in (own.priorities or {}).items()
        }

    def of_priorities(self, name: str) -> list[str]:
        """The queues that belong to `name`: the queue itself, and one for each other priority."""
        own = self._queues.get(name)
        return [
            priority_queue(name, each) for each in (own.priorities if own else None) or (NORMAL,)
        ]

    def unserved(self, queues: Collection[str]) -> list[str]:
        """Warnings about the priorities of these queues that are not among them.

        * `queues`: those that a worker is told to serve; empty for all.
        """
        if not queues:
            return []
        named = {self._by_priority.get(name, name) for name in queues}
        left = {name: set(self.of_priorities(name)) - set(queues) for name in sorted(named)}
        return [
            f"this worker does not serve {', '.join(sorted(missing))}, which "
            f"{'belongs' if len(missing) == 1 else 'belong'} to the priorities of queue {name}: "
            "add it to -Q, unless other workers serve it"
            for name, missing in left.items()
            if missing
        ]

    def _own(self, name: str) -> QueueSettings | None:
        """The settings of the queue alone; a priority and a shard have those of their queue."""
        name = self.whole(name)
        own = self._queues.get(name)
        if own is None and name in self._by_priority:
            return replace(self._queues[self._by_priority[name]], name=name, priorities=None)
        return own

    def settings_of(self, name: str) -> Settings:
        """The settings that apply to the queue: its own where it has any, else the app's."""
        own = self._own(name)
        if own is None:
            return self._settings
        # Each message that is verified asks for them, and `over` checks every setting anew.
        known = self._applied.get(own.name)
        if known is None or known[0] != own:
            known = self._applied[own.name] = (own, own.over(self._settings))
        return known[1]

    def lease_seconds(self, name: str, can: Capabilities | None = None) -> float:
        """The lease duration to request for the queue, in seconds.

        It is the queue's setting, else the app's, else the default of the broker, or of `can`.
        """
        settings = self.settings_of(name)
        if self._lease_asked(name):
            return settings.lease_seconds
        default = (can or self.broker.capabilities).default_lease_seconds
        return min(default, settings.max_lease_seconds / 2)

    def lease_now(self, name: str) -> float:
        """The lease duration to request now, in seconds.

        With ``lease_advice`` it is the learned one, otherwise `lease_seconds`.
        """
        if not self._leases.enabled:
            return self.lease_seconds(name)
        settings, capabilities = self.settings_of(name), self.broker.capabilities
        return self._leases.lease_now(name, self.lease_seconds(name), settings, capabilities)

    def _lease_asked(self, name: str) -> bool:
        own = self._own(name)
        return self._lease_given or (own is not None and own.lease_seconds is not None)

    def plan(self, name: str, can: Capabilities | None = None) -> QueuePlan:
        """What the app requires of a queue, see `App.queue_plan`."""
        return plan_of(
            name,
            self._own(name),
            self.settings_of(name),
            self._tasks.values(),
            home=self._by_priority.get(self.whole(name), self.whole(name)),
            lease=self.lease_seconds(name, can),
            lease_asked=self._lease_asked(name),
        )

    def options(self, name: str) -> QueueOptions:
        """The options to create the queue with.

        Raises ConfigurationError if the service lacks one of them.
        """
        return self.plan(name).options(self.broker.capabilities)

    def has_sessions(self, name: str) -> bool:
        """True if the app configured the queue with ``sessions=True``."""
        own = self._own(name)
        return bool(own and own.sessions)

    def held(
        self,
        queue: str,
        wait: float | timedelta,
        lease: float | timedelta | None,
        session: str | None,
        deferred: Position | None,
        stop: threading.Event | None = None,
    ) -> HeldLease:
        """The lease for these options of `App.receive`; it receives when its block is entered.

        * `stop`: once it is set, the wait for a message ends within a second.

        Raises ConfigurationError for a lease that the queue's settings do not allow.
        """
        settings = self.settings_of(queue)
        if lease is not None:
            settings = replace(settings, lease_seconds=to_seconds(lease, "lease"))
        return HeldLease(
            self.broker,
            queue,
            LeaseTerms(
                self.lease_now(queue) if lease is None else settings.lease_seconds,
                settings.max_lease_seconds,
                settings.renew_at,
            ),
            wait=to_seconds(wait, "wait"),
            session=session or (ANY_SESSION if self.has_sessions(queue) else None),
            deferred=deferred,
            stop=stop,
        )

    def names(self) -> list[str]:
        """The queues that the app's tasks and settings name, sorted.

        The default queue is one of them, unless nothing names it and every task has a queue of its
        own: then it need not exist.
        """
        default = self._settings.default_queue
        names = {task.queue or default for task in self._tasks.values()}
        names |= {*self._queues, *self._by_priority}
        if self._default_named or not self._tasks:
            names.add(default)
        return sorted(names)


# -- the sends -------------------------------------------------------------------------------------


class Sends:
    """Sends the calls of one app, from threads and from coroutines.

    * `sender`: makes the messages and publishes them; `async_sender` does so for coroutines.
    * `on_sent`: called after each send while the app is inline, see `App.redirect`.
    """

    def __init__(
        self,
        connections: Connections,
        codec: Codec,
        queues: DeclaredQueues,
        tasks: Mapping[str, Task[..., Any]],
        limits: DeclaredLimits,
        sender: Sender,
    ) -> None:
        self._connections = connections
        self._codec = codec
        self._queues = queues
        self._tasks = tasks
        self._limits = limits
        self.sender = sender
        self.async_sender = AsyncSender(sender)
        self.signals = TaskSignals(connections, codec)
        self.on_sent: Callable[..., None] | None = None

    def send(
        self,
        name: str,
        task: Task[..., Any] | None,
        calls: Sequence[Invocation],
        options: SendOptions,
    ) -> list[AsyncResult[Any]]:
        """Send all calls as one batch. task: None for one that another program registers."""
        if (step := _step(options)) is not None:
            given = [cast("SendOptions", {**options, "task_id": step.next_id()}) for _ in calls]
            pairs = zip(calls, given, strict=True)
            return [each for call, own in pairs for each in self.send(name, task, (call,), own)]
        queue = self._queues.route(task, options)
        self._limits.check_costs(task, calls)
        sessions = self._queues.has_sessions(queue)
        ids = self.sender.send(name, task, queue, calls, options, sessions)
        if self.on_sent is not None:
            self.on_sent(name, queue, calls, ids, options)
        return self._results_of(ids)

    async def asend(
        self,
        name: str,
        task: Task[..., Any] | None,
        calls: Sequence[Invocation],
        options: SendOptions,
    ) -> list[AsyncResult[Any]]:
        """`send` for coroutines: it never blocks the event loop."""
        if self.on_sent is not None:  # inline: the tasks run where they are sent
            return await asyncio.to_thread(self.send, name, task, calls, options)
        if (step := _step(options)) is not None:
            given = [cast("SendOptions", {**options, "task_id": step.next_id()}) for _ in calls]
            pairs = zip(calls, given, strict=True)
            return [
                sent for call, own in pairs for sent in await self.asend(name, task, (call,), own)
            ]
        queue = self._queues.route(task, options)
        self._limits.check_costs(task, calls)
        sessions = self._queues.has_sessions(queue)
        steps = self.sender.steps(name, task, queue, calls, options, sessions)
        return self._results_of(await self.async_sender.send(queue, steps))

    def send_occurrence(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Mapping[str, Any],
        headers: Mapping[str, Any],
    ) -> None:
        """Send the task of an occurrence as any other task, with these headers."""
        queue, call = str(options["queue"]), Invocation(args, kwargs)
        known, sessions = self._tasks.get(name), self._queues.has_sessions(queue)
        if known is not None:
            call = Invocation(*known.conversion.peek(args, kwargs), (args, kwargs))
        given = cast("SendOptions", options)
        with suppress(NotUnique):  # another task of that key waits or runs: that is enough
            ids = self.sender.send(name, known, queue, (call,), given, sessions, headers)
            if self.on_sent is not None:
                self.on_sent(name, queue, (call,), ids, given)

    def route(self, task: Task[..., Any] | None, options: Mapping[str, Any]) -> str:
        """The queue of a send that is about to be made, see `DeclaredQueues.route`."""
        return self._queues.route(task, options)

    def report(self, event: Event) -> None:
        """Write an event that no message belongs to."""
        self.sender.events.report(event)

    def result(self, task_id: str) -> AsyncResult[Any]:
        """The `AsyncResult` of a task id. Asks no server."""
        return self._results_of([task_id])[0]

    def signal(self, task_id: str, name: str, value: Any) -> None:
        """Send a signal to a task; see `AsyncResult.signal`."""
        self.signals.signal(task_id, name, value)
        self._woken()

    def signal_all(self, task_ids: Iterable[str], name: str, value: Any) -> dict[str, AztaskError]:
        """Send one signal to each task; see `App.signal_all`."""
        refused = self.signals.signal_all(task_ids, name, value)
        self._woken()
        return refused

    def wake(self, task_id: str) -> None:
        """Wake a task that waits, so that it finds out that it was cancelled."""
        if self.signals.wake(task_id):
            self._woken()

    def _woken(self) -> None:
        if self.on_sent is not None:  # inline: the task runs now
            self.on_sent("", "", (), (), {})

    def close(self) -> None:
        """End the threads and close the event file. Sending again opens them again."""
        self.async_sender.close()
        self.sender.close()

    def _results_of(self, ids: Sequence[str]) -> list[AsyncResult[Any]]:
        results, decode = self._connections.results, self._codec.decode_value
        tasks, codec = self._tasks, self._codec
        return [AsyncResult(task_id, results, decode, tasks, codec, self) for task_id in ids]


def _step(options: SendOptions) -> OpenStep | None:
    """The step of a task that sends now, unless the send has an id of its own.

    Its sends get ids that derive from the step: if the step runs again, it sends nothing twice.
    """
    context = current_context()
    return None if context is None or options.get("task_id") else context.steps.current
