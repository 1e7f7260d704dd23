"""What an app needs on Azure, as one value, and how that differs from what there is.

Rules
1. The queues are those of `App.queue_names`, with the settings that ``aztask queues create`` gives
   to a new queue. What holds for them on the chosen service holds whatever broker the app has now.
2. A difference is a missing part, a setting that the service changes in place, or one that it
   cannot change. The last is a new queue that takes over, never a change.
3. Nothing here changes anything, or names a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from aztask.app import App
from aztask.errors import AztaskError, BrokerUnavailable, ConfigurationError, QueueNotFound
from aztask.operate.queuechecks import TOLERANCE
from aztask.operate.resharding import refuse_several
from aztask.queues.base import Inspectable, QueueFacts
from aztask.queues.kinds import BrokerKind
from aztask.queues.servicebus.kind import KIND as SERVICE_BUS
from aztask.queues.storagequeue.kind import KIND as STORAGE_QUEUE
from aztask.stores.records.base import Provisioned

Service = Literal["servicebus", "storagequeue"]
SERVICES: Final[tuple[Service, ...]] = ("servicebus", "storagequeue")

KINDS: Final[Mapping[Service, BrokerKind]] = {
    "servicebus": SERVICE_BUS,
    "storagequeue": STORAGE_QUEUE,
}

RESULTS_TABLE: Final = "aztaskresults"
RESULTS_CONTAINER: Final = "aztask-results"
PAYLOADS_CONTAINER: Final = "aztask-payloads"
EVENTS_CONTAINER: Final = "aztask-events"
POISON: Final = "-poison"

LONGEST_GRACE: Final = 600.0
"""Seconds that Container Apps lets a replica finish, at most (its documentation; read). A task that
may take longer belongs into a job, which no scale-down ends."""


@dataclass(frozen=True, slots=True)
class PlannedQueue:
    """One queue. All durations are in seconds; those of a Storage queue, which has none, are None.

    * `duplicate_window`: 0 if duplicate detection is off.
    * `partitioned`: None leaves it to the service.
    * `long`: a job serves it, because its tasks may run longer than a replica is given to end.
    """

    name: str
    lock: float | None = None
    duplicate_window: float | None = None
    max_deliveries: int | None = None
    time_to_live: float | None = None
    sessions: bool | None = None
    partitioned: bool | None = None
    long: bool = False


@dataclass(frozen=True, slots=True)
class AzurePlan:
    """Everything that the generated files make.

    * `app`: the app's name; `spec`: where it is, ``module:app``.
    * `queues`: without the queues for dead letters, which a Storage queue has beside it.
    * `namespace`, `account`: existing names that the app's addresses have; "" for new ones.
    """

    app: str
    spec: str
    service: Service
    queues: tuple[PlannedQueue, ...]
    events: bool
    namespace: str = ""
    account: str = ""

    @property
    def containers(self) -> tuple[str, ...]:
        """Blob containers: for large results, for payloads, and for events if there are any."""
        events = (EVENTS_CONTAINER,) if self.events else ()
        return (RESULTS_CONTAINER, PAYLOADS_CONTAINER, *events)

    @property
    def storage_queues(self) -> tuple[str, ...]:
        """The queues of the storage account, those for dead letters included."""
        if self.service == "servicebus":
            return ()
        return tuple(name for each in self.queues for name in (each.name, each.name + POISON))

    @property
    def served(self) -> tuple[PlannedQueue, ...]:
        """The queues of the worker app."""
        return tuple(each for each in self.queues if not each.long)

    @property
    def slug(self) -> str:
        """The app's name as resources may have it: 1 to 20 lower-case letters, digits, hyphens."""
        found = re.sub(r"[^a-z0-9]+", "-", self.app.lower()).strip("-")[:20].strip("-")
        return found if found[:1].isalpha() else f"app-{found}"[:20].strip("-")


def plan_for_azure(
    app: App,
    spec: str,
    *,
    service: Service | None = None,
    jobs: tuple[str, ...] = (),
    partitioned: bool | None = None,
) -> AzurePlan:
    """The plan of an app.

    * `service`: None takes that of the app's broker, or Service Bus if it has a local one.
    * `jobs`: queues that a job serves, besides those whose tasks have a `time_limit` of more than
      ten minutes.
    * `partitioned`: whether Service Bus queues are partitioned; None leaves it to the service.

    Raises ConfigurationError if the service lacks what the app asks for, InvalidQueueName.
    """
    refuse_several(app, "aztask azure")
    scheme = getattr(type(app.broker_target), "scheme", "")
    chosen: Service = service or ("storagequeue" if scheme == "storagequeue" else "servicebus")
    names = app.queue_names()
    if unknown := [each for each in jobs if each not in names]:
        raise ConfigurationError(
            f"the app has no queue {', '.join(unknown)}; it has {', '.join(names)}"
        )
    kind = KINDS[chosen]
    queues = []
    for name in (shard for each in names for shard in app.queues.shards(each)):
        kind.check_name(name)
        asked = app.queue_plan(name, kind.capabilities)
        limits = [task.time_limit or 0.0 for task in asked.tasks]
        long = app.queues.whole(name) in jobs or max(limits, default=0.0) > LONGEST_GRACE
        queue = PlannedQueue(name, long=long)
        if chosen == "servicebus":
            options = asked.options(kind.capabilities)
            queue = replace(
                queue,
                lock=options.lease,
                duplicate_window=options.duplicate_window or 0.0,
                max_deliveries=options.max_deliveries,
                time_to_live=options.time_to_live,
                sessions=bool(options.sessions),
                partitioned=partitioned,
            )
        elif asked.own.sessions:
            raise ConfigurationError(f"queue {name}: Storage queues have no sessions")
        queues.append(queue)
    return AzurePlan(
        app=app.name,
        spec=spec,
        service=chosen,
        queues=tuple(queues),
        events=bool(app.settings.events or app.settings.events_container),
        namespace=_first_label(app.broker_target) if scheme == chosen == "servicebus" else "",
        account=str(getattr(app.broker_target, "account", "")) if scheme == chosen else "",
    )


def _first_label(address: Any) -> str:
    return "" if address.emulator else str(address.host).partition(".")[0]


# -- how it differs from what there is -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between the plan and what there is.

    * `kind`: ``add``, ``change`` (in place), ``replace`` (the service cannot change it), or
      ``unknown`` if it could not be read. Nothing is ever removed.
    * `subject`: such as ``queue orders``.
    * `settings`: {name: (what there is, what is planned)}.
    * `commands`: what to run, in order.
    """

    kind: Literal["add", "change", "replace", "unknown"]
    subject: str
    text: str
    settings: Mapping[str, tuple[Any, Any]]
    commands: tuple[str, ...] = ()


IN_PLACE: Final = {
    "lock": "--lease {:g}s",
    "duplicate_window": "--duplicate-window {:g}s",
    "max_deliveries": "--max-deliveries {}",
}
FIXED: Final = ("sessions", "duplicate_detection", "partitioned")
"""What Service Bus decides when a queue is created (its documentation, "entity properties"; read,
and so on the emulator)."""


def differences(app: App, plan: AzurePlan) -> Iterator[Difference]:
    """What to do so that what there is fits the plan, one for each queue or store.

    Raises BrokerUnavailable if nothing answers.
    """
    broker = app.broker
    if broker.capabilities.name != plan.service or not isinstance(broker, Inspectable):
        raise ConfigurationError(
            f"the app's broker is {app.address}, and the plan is for {plan.service}: name the "
            "namespace or account in AZTASK_BROKER"
        )
    inspector = broker.inspector()
    for queue in plan.queues:
        found = _of_queue(queue, inspector.facts(queue.name))
        if found is not None:
            yield found
    yield from _of_results(app)


def _of_queue(queue: PlannedQueue, facts: QueueFacts) -> Difference | None:
    subject = f"queue {queue.name}"
    create = f"aztask queues create {queue.name}"
    if facts.exists is False:
        return Difference("add", subject, "it does not exist", {}, (create,))
    if facts.dead_letters is False:
        return Difference("add", subject, "it has no queue for its dead letters", {}, (create,))
    if facts.unread:
        return Difference("unknown", subject, facts.unread, {})
    there = {
        "lock": facts.lease_seconds,
        "duplicate_window": facts.duplicate_window or None,
        "max_deliveries": facts.max_deliveries,
        "sessions": facts.sessions,
        "duplicate_detection": _on(facts.duplicate_window),
        "partitioned": facts.partitioned,
    }
    planned = {
        "lock": queue.lock,
        "duplicate_window": queue.duplicate_window or None,
        "max_deliveries": queue.max_deliveries,
        "sessions": queue.sessions,
        "duplicate_detection": _on(queue.duplicate_window),
        "partitioned": queue.partitioned,
    }
    differing = {
        name: (there[name], wanted)
        for name, wanted in planned.items()
        if wanted is not None and there[name] is not None and not _same(there[name], wanted)
    }
    fixed = {name: each for name, each in differing.items() if name in FIXED}
    if fixed:
        names = " and ".join(name.replace("_", " ") for name in fixed)
        text = f"the service cannot change {names} of an existing queue: new queue, drain, switch"
        return Difference("replace", subject, text, fixed, switch_commands(queue))
    if differing:
        options = " ".join(IN_PLACE[name].format(differing[name][1]) for name in differing)
        text = "the service changes this in place"
        return Difference("change", subject, text, differing, (f"{create} {options}",))
    return None


def _on(window: float | None) -> bool | None:
    return None if window is None else window > 0


def _same(there: Any, planned: Any) -> bool:
    if isinstance(planned, bool):
        return bool(there) == planned
    return abs(float(there) - float(planned)) <= TOLERANCE


def switch_commands(queue: PlannedQueue) -> tuple[str, ...]:
    """How a new queue takes over from one that cannot be changed, without losing a message."""
    old, new = queue.name, f"{queue.name}-2"
    return (
        f"# 1. name the queue {new} in the code instead of {old}, then make it:",
        f"aztask queues create {new}",
        f"# 2. deploy workers that serve both, -Q {old},{new}; then the senders;",
        "# 3. wait until nothing is left, scheduled messages and retries included:",
        "aztask queues list --watch",
        f"aztask dlq list -Q {old}",
        f"# 4. deploy workers without {old}, then remove it:",
        f"aztask queues delete {old}",
    )


def _of_results(app: App) -> Iterator[Difference]:
    try:
        store = app.results
        if not isinstance(store, Provisioned):
            return
        store.check()
    except BrokerUnavailable:
        raise
    except QueueNotFound as error:
        create = ("aztask queues create --all",)
        yield Difference("add", "results", str(error), {}, create)
    except AztaskError as error:  # such as a refused credential: what is there is not known
        yield Difference("unknown", "results", str(error), {})
