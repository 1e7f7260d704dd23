"""A Celery application as the commands see it: its queues, its results, and what its settings mean.

``aztask -A proj.celery:app`` names either an `App` or a Celery application. Of the latter an `App`
is made here, with its addresses, leases and queues, for the commands that read and repair: queues,
result, dlq, schedule, migrate schedules and doctor. Its workers are Celery's.

Rules
1. Celery is not imported here: if the module that ``-A`` names makes a Celery application, that
   module has imported it.
2. A queue is one that `task_queues`, `task_routes`, a task or an entry of beat's schedule names.
   A function in `task_routes` is asked about each registered task, without arguments.
3. A Celery worker takes a queue's lease and sessions as they are, where the transport's options do
   not say otherwise. So nothing else is required of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from aztask.app import App
from aztask.celery.transport.names import translated_name
from aztask.celery.transport.options import ALIAS, TransportOptions, broker_of, results_address
from aztask.config import mask
from aztask.errors import (
    BrokerUnavailable,
    ConfigurationError,
    InvalidQueueName,
    NotFound,
    QueueNotFound,
)
from aztask.operate.celeryschedules import CelerySchedules, beat_name
from aztask.operate.doctor import examine
from aztask.operate.queues import oldest_waiting
from aztask.operate.tasks import RecentRuns, TaskResult
from aztask.settlement import Complete
from aztask.stores.connections import Connections
from aztask.stores.records.base import Outcome, RunKey, RunRecord, State
from aztask.stores.records.workflows import ListedWorkflow, workflows_of
from aztask.support.display import plural, safe_str
from aztask.support.finding import Finding, Level, fine, problem, warning

NAMELESS: Final = "celery"

RESULT_KEY: Final = "celery-task-meta-"
"""How the names of Celery's results begin in a store."""

UNREAD_SECONDS: Final = 60.0

_DANGEROUS: Final = ("pickle", "yaml", "application/x-python-serialize", "application/x-yaml")

_OTHER_OPTIONS: Final = {
    "visibility_timeout": "write lease, or leases for single queues",
    "queue_name_prefix": "give the queues their full names",
    "polling_interval": "remove it: how often to poll follows from what comes",
    "wait_time_seconds": "remove it: how long to wait follows from what comes",
    "sep": "write priorities",
    "priority_steps": "write priorities",
    "queue_order_strategy": "write priorities",
    "global_keyprefix": "use another namespace, account or file",
    "predefined_queues": "write declare: False, and create the queues with aztask queues create",
}
"""Options of other transports that this one has something else for, and what."""

_OF_AZTASK: Final = frozenset(
    {"app", "deliveries", "duplicates", "id-key", "environment", "unsigned", "events"}
)
"""Checks of `aztask doctor`, or what they are about, that concern aztask's own workers alone."""

_STATES: Final = {
    "RETRY": State.RETRYING,
    "SUCCESS": State.SUCCEEDED,
    "FAILURE": State.FAILED,
    "REVOKED": State.CANCELLED,
}
_UNKNOWN: Final = "PENDING"


class CeleryApp(App):
    """The App for a Celery application.

    * `celery`: that application.
    * `options`: those of its transport.
    * `unusable`: names of queues that the service does not allow, and why.
    * `unrouted`: tasks whose route could not be found out, and why.
    * `schedules`: the entries of its beat, if that is aztask's (`aztask.operate.celerybeat`).
    """

    schedules: CelerySchedules

    def __init__(self, celery: Any, *, entries: str | None = None) -> None:
        """Read the application's settings. Connects to nothing.

        * `entries`: in place of `beat_schedule_filename`.

        Raises ConfigurationError if its broker is none of aztask's, or an option is wrong.
        """
        self.celery = celery
        transport = _transport(celery)
        if transport.split("+", 1)[0] != ALIAS:
            raise ConfigurationError(
                f"the broker of this Celery app is {transport}://: aztask's commands "
                "work on the queues of aztask+local://, aztask+servicebus:// and "
                "aztask+storagequeue://"
            )
        client = celery.connection_for_write()
        self.options = TransportOptions.read(
            client.transport_options, broker_of(client, os.environ)
        )
        self.several = len(client.alt) > 1
        given: dict[str, Any] = {} if self.options.lease is None else {"lease": self.options.lease}
        broker = self.options.broker
        super().__init__(
            str(celery.main or NAMELESS),
            broker=broker() if callable(broker) else broker,
            results=self._results_address(),
            **given,
        )
        self._entries_address = self._entries_in(entries or celery.conf.beat_schedule_filename)
        self.schedules = CelerySchedules(
            celery,
            self.name,
            Connections(
                self._connections.broker_text or self.options.broker,
                self._entries_address,
                app=beat_name(self.name),
            ),
            self.sends,
            self.codec,
            workflows=self.workflows,
        )
        self._declared: set[str] = set()
        self.unusable: dict[str, str] = {}
        self.unrouted: dict[str, str] = {}
        for name in sorted(self._named()):
            self._declare(name)

    @property
    def backend(self) -> str:
        """The result backend as its settings name it, without secrets; "" for none."""
        named = self.celery.conf.result_backend or ""
        return "" if str(named).startswith("disabled") else mask(str(named))

    def _results_address(self) -> str | None:
        named = str(self.celery.conf.result_backend or "")
        scheme, _, rest = named.partition("+")
        if named.startswith(f"{ALIAS}:"):
            rest = named
        elif scheme != ALIAS:
            return None
        return results_address(rest, self.celery.conf.result_backend_transport_options)

    def _entries_in(self, named: str | None) -> str | None:
        if named and "://" in named:
            return named.removeprefix(f"{ALIAS}+")
        options = self.celery.conf.result_backend_transport_options
        return self._results_address() or results_address(None, options)

    def entries_address(self) -> str:
        """Where beat's entries are kept. Raises ConfigurationError if nothing names a store."""
        if self._entries_address is None:
            raise ConfigurationError(
                "no store is named for the entries of beat: set result_backend or "
                "beat_schedule_filename to aztask+tables://ACCOUNT or "
                "aztask+local:///path/results.db, or set AZTASK_RESULTS"
            )
        return self._entries_address

    def close(self) -> None:
        """Close what this process has opened."""
        self.schedules.close()
        super().close()

    def queue_names(self) -> list[str]:
        """The queues that the application names, as the service calls them (rule 2)."""
        return sorted(each for name in self._declared for each in self.priority_queues(name))

    def _declare(self, name: str) -> None:
        checker = self.queues.check_name
        try:
            address = name
            if self.options.translate_names:
                address = translated_name(name, lambda each: checker(each, "translated"))
            own: dict[str, Any] = {}
            if name in self.options.leases:
                own["lease"] = self.options.leases[name]
            if name in self.options.sessions:
                own["sessions"] = True
            if self.options.priorities:
                own["priorities"] = dict(self.options.priorities)
            self.queue(address, **own)
        except InvalidQueueName as error:
            self.unusable[name] = str(error)
        else:
            self._declared.add(address)

    # -- queues ------------------------------------------------------------------------------

    def _named(self) -> set[str]:
        """The names of its queues; temporary ones of a broadcast are mailboxes, not queues."""
        conf, amqp = self.celery.conf, self.celery.amqp
        self.celery.finalize(auto=True)
        found = {
            queue.name
            for queue in amqp.queues.values()
            if getattr(queue.exchange, "type", None) != "fanout"
        }
        found |= set(_queues_in(conf.task_routes))
        found |= {
            str(entry["options"]["queue"])
            for entry in _entries(conf.beat_schedule)
            if isinstance(entry.get("options"), Mapping) and entry["options"].get("queue")
        }
        for name, task in self.celery.tasks.items():
            if queue := getattr(task, "queue", None):
                found.add(_name_of(queue))
            if name.startswith("celery."):
                continue
            try:
                route = amqp.router.route({}, name)
            except Exception as error:  # noqa: BLE001  # a function of the user's, or no such queue
                self.unrouted[name] = f"{type(error).__name__}: {safe_str(error)}"
                continue
            if queue := route.get("queue"):
                found.add(_name_of(queue))
        return {name for name in found if name}


def _transport(celery: Any) -> str:
    """The name of the broker's transport, as Kombu finds it out.

    Kombu itself is not asked: it imports the transport, which fails in a way of its own where the
    library of another broker is not installed.
    """
    named = celery.conf.broker_write_url or ""
    first = (named if isinstance(named, str) else named[0]).split(";", 1)[0]
    scheme = first.partition("://")[0] if "://" in first else ""
    if "+" in scheme:
        return str(scheme.split("+", 1)[0])
    return str(celery.conf.broker_transport or scheme or "amqp")


def _name_of(queue: Any) -> str:
    return str(getattr(queue, "name", queue))


def _entries(schedule: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(schedule, Mapping):
        yield from (each for each in schedule.values() if isinstance(each, Mapping))


def _queues_in(routes: Any) -> Iterator[str]:
    """The queues that `task_routes` names, without its functions."""
    if isinstance(routes, Mapping):
        for route in routes.values():
            queue = route.get("queue") if isinstance(route, Mapping) else route
            if isinstance(queue, str) or getattr(queue, "name", None):
                yield _name_of(queue)
    elif isinstance(routes, list | tuple):
        for each in routes:
            if isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str):
                yield from _queues_in(dict([each]))
            else:
                yield from _queues_in(each)


# -- results ---------------------------------------------------------------------------------


def celery_result(app: CeleryApp, task_id: str) -> TaskResult:
    """What the application's result backend, of whatever kind, knows of a task.

    Raises NotFound if it knows nothing, ConfigurationError if results are disabled, or if the
    library of the backend is not installed.
    """
    if not app.backend:
        raise ConfigurationError("this Celery app keeps no results: it sets no result_backend")
    meta = _open_backend(app).get_task_meta(task_id)
    if meta.get("status", _UNKNOWN) == _UNKNOWN:
        raise NotFound(f"the result backend has no task {task_id!r}; it may not have ended yet")
    record = _record(task_id, meta)
    over = record.state.final
    return TaskResult(
        record,
        [record],
        meta.get("result") if record.state is State.SUCCEEDED else None,
        None if over or isinstance(meta.get("result"), Exception) else meta.get("result"),
    )


def _open_backend(app: CeleryApp) -> Any:
    """Celery's result backend. Raises ConfigurationError if Celery cannot make it."""
    try:
        return app.celery.backend
    except Exception as error:  # a missing library is an error of its own in each backend
        raise ConfigurationError(
            f"Celery cannot open the result backend {app.backend}: {safe_str(error)}; install here "
            "what its workers have installed for it"
        ) from error


def celery_recent(app: CeleryApp, state: str | None, limit: int) -> RecentRuns:
    """Up to `limit` tasks that ended last, or that started and have not ended.

    Raises ConfigurationError if the application's results are not in a store of aztask.
    """
    documents = None if app.results is None else workflows_of(app.results)
    if documents is None:
        raise ConfigurationError(
            f"the results of this Celery app are in {app.backend or 'no result backend'}, which "
            "cannot be listed; name a task: aztask result ID"
        )
    listed = [
        each for each in documents.all_workflows(10 * limit) if each.workflow.startswith(RESULT_KEY)
    ]
    listed.sort(key=_newest)
    found: list[RunRecord] = []
    for each in listed:
        task_id = each.workflow.removeprefix(RESULT_KEY)
        meta = app.celery.backend.get_task_meta(task_id)
        if meta.get("status", _UNKNOWN) != _UNKNOWN:
            record = _record(task_id, meta)
            if state in (None, record.shown_state):
                found.append(record)
        if len(found) == limit:
            break
    return RecentRuns(found)


def _newest(listed: ListedWorkflow) -> float:
    return -(listed.ended_at or listed.at)


def _record(task_id: str, meta: Mapping[str, Any]) -> RunRecord:
    status = str(meta["status"])
    state = _STATES.get(status, State.STARTED)
    outcome = None
    if state is not State.STARTED:
        result = meta.get("result")
        failed = isinstance(result, BaseException)
        outcome = Outcome(
            state,
            Complete(),
            error_type=type(result).__name__ if failed else "",
            error=str(result) if failed else "",
            traceback=str(meta.get("traceback") or ""),
            at=_seconds(meta.get("date_done")),
        )
    return RunRecord(
        RunKey(task_id),
        str(meta.get("name") or ""),
        str(meta.get("queue") or ""),
        state,
        str(meta.get("worker") or ""),
        outcome=outcome,
    )


def _seconds(done: Any) -> float:
    with suppress(TypeError, ValueError):
        return (done if isinstance(done, datetime) else datetime.fromisoformat(done)).timestamp()
    return 0.0


# -- doctor ----------------------------------------------------------------------------------


def examine_celery(
    app: CeleryApp, queues: Sequence[str], lease: float | None = None
) -> Iterator[Finding]:
    """The findings of `aztask doctor` about a Celery application: its settings, then its services.

    * `queues`: those to check, as the service calls them.
    * `lease`: compare the queues with this one instead of the transport's options.
    """
    yield from _of_names(app)
    yield from _of_settings(app)
    yield from _of_tasks(app)
    yield from _of_priorities(app, queues)
    for finding in examine(app, queues, lease=lease, adapts=True):
        if finding.level is Level.PROBLEM or not _of_aztask(finding):
            yield _in_words_of_celery(finding)


def _of_aztask(finding: Finding) -> bool:
    if finding.check == "results":  # Celery runs without a store
        return finding.level is Level.WARNING
    return finding.check in _OF_AZTASK or finding.subject in _OF_AZTASK


def _of_priorities(app: CeleryApp, queues: Sequence[str]) -> Iterator[Finding]:
    """Queues of priorities in which tasks wait as if no worker read them."""
    if not app.options.priorities or app.missing_file is not None:
        return
    for queue in queues:
        with suppress(QueueNotFound, BrokerUnavailable):  # said of the queue itself
            waits = oldest_waiting(app, queue).seconds
            if waits is not None and waits > UNREAD_SECONDS:
                yield warning(
                    f"queue {queue}",
                    "priorities",
                    f"its oldest task waits for {waits:.0f} s: perhaps no worker reads this "
                    "priority",
                    "give the workers the same priorities and order in broker_transport_options as "
                    "the senders, and restart them",
                )


def _in_words_of_celery(finding: Finding) -> Finding:
    if finding.check == "lease" and finding.level is Level.PROBLEM:
        queue = finding.subject.removeprefix("queue ")
        return replace(
            finding,
            advice="write the queue's lock as lease in broker_transport_options, or in its leases "
            f"for {queue} alone; or remove lease: a worker takes the queue's",
        )
    return finding


def _of_names(app: CeleryApp) -> Iterator[Finding]:
    for name, reason in app.unusable.items():
        yield problem(
            f"queue {name}",
            "name",
            reason,
            'write "translate_names": True into broker_transport_options, the same for all apps '
            "that share the queue, or give it another name",
            ConfigurationError(reason),
        )
    for name, reason in app.unrouted.items():
        yield warning(
            f"task {name}",
            "route",
            f"its queue cannot be found out without a call ({reason})",
            "check its queue with aztask doctor -Q, if it depends on the arguments; else a send "
            "raises this error, too",
        )
    if app.several:
        yield fine("broker", "failover", "several brokers are named; the first one is checked")


def _of_settings(app: CeleryApp) -> Iterator[Finding]:
    conf = app.celery.conf
    serializer, accepted = conf.task_serializer, [str(each) for each in conf.accept_content]
    if dangerous := sorted(set(accepted) & set(_DANGEROUS)):
        yield warning(
            "app",
            "accept-content",
            f"workers read {', '.join(dangerous)}: any program that may send to a queue can run "
            "code in them",
            'set accept_content = ["json"], and before aztask workers share a queue '
            'task_serializer = "json"',
        )
    if not _accepts(accepted, serializer):
        text = (
            f"task_serializer is {serializer}, and accept_content {', '.join(accepted)}: workers "
            "with these settings refuse what this app sends"
        )
        advice = f"add {serializer} to accept_content, or change task_serializer"
        yield problem("app", "serializer", text, advice, ConfigurationError(text))
    given = conf.broker_transport_options or {}
    for name in sorted(_OTHER_OPTIONS.keys() & given.keys()):
        yield warning(
            "app",
            "transport-options",
            f"broker_transport_options has {name}, which has no effect here",
            _OTHER_OPTIONS[name],
        )
    if not app.backend:
        yield fine("results", "backend", "no result_backend is set: results are not kept")
    elif app.results is None:
        try:
            _open_backend(app)
        except ConfigurationError as error:
            text, _, advice = str(error).rpartition("; ")
            yield problem("results", "backend", text, advice, error)
            return
        yield fine(
            "results",
            "backend",
            f"results are in {app.backend}; chords are polled there, and aztask workers that share "
            "a queue keep their results elsewhere",
        )


def _accepts(accepted: list[str], serializer: str) -> bool:
    return any(
        serializer in (each, each.rpartition("/")[2].removeprefix("x-")) for each in accepted
    )


def _of_tasks(app: CeleryApp) -> Iterator[Finding]:
    """What the time limits and acknowledgements of its tasks mean under a lease."""
    conf = app.celery.conf
    tasks = {
        name: task for name, task in app.celery.tasks.items() if not name.startswith("celery.")
    }
    queues = ", ".join(app.queue_names())
    yield fine(
        "app", "app", f"{app.name}, a Celery app: {plural(len(tasks), 'task')}; queues {queues}"
    )
    early = sorted(name for name, task in tasks.items() if not task.acks_late)
    if early:
        yield warning(
            "tasks",
            "acks-early",
            f"{_some(early)} acknowledged before it runs: a worker that is killed loses it",
            "set task_acks_late=True, and make the tasks repeatable",
        )
    lost = sorted(
        name
        for name, task in tasks.items()
        if task.acks_late and not getattr(task, "reject_on_worker_lost", None)
    )
    if lost:
        yield warning(
            "tasks",
            "worker-lost",
            f"{_some(lost)} acknowledged if its pool process is killed, for lack of memory too",
            "set task_reject_on_worker_lost=True: the message is delivered again",
        )
    endless = sorted(name for name, task in tasks.items() if not _limit_of(task, conf))
    if endless:
        yield warning(
            "tasks",
            "time-limits",
            f"{_some(endless)} without a time limit: its lease is renewed for as long as it hangs",
            "set task_time_limit, or time_limit of the task",
        )
    limits = [limit for task in tasks.values() if (limit := _limit_of(task, conf))]
    if limits:
        yield fine(
            "tasks",
            "time-limits",
            f"the longest time limit is {max(limits):g} s; a lease is renewed while its task runs, "
            "so it may be shorter",
        )


def _limit_of(task: Any, conf: Any) -> float | None:
    limit: float | None = task.time_limit or task.soft_time_limit or conf.task_time_limit
    return limit


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    if len(names) == 1:
        return f"task {shown} is"
    return f"{len(names)} tasks ({shown}{', ...' if len(names) > 3 else ''}) are each"


def load_celery(found: Any) -> CeleryApp:
    """The App for a Celery application, with the tasks of its modules imported.

    Raises ConfigurationError, or whatever its modules raise.
    """
    found.loader.import_default_modules()
    return CeleryApp(found)
