"""The options of a worker, from the command line or a caller, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aztask.address.priorities import check_weight
from aztask.app import App
from aztask.errors import ConfigurationError, did_you_mean
from aztask.support.display import printable
from aztask.worker.logs import LOG_TASKS
from aztask.worker.platform import cores

POOLS = ("processes", "threads", "asyncio", "solo")
SOLO = "solo"
"""One task at a time, in the main thread of one pool process in the foreground: for a debugger."""

MOST_CONCURRENCY = 10_000
MOST_SESSIONS = 1_000
PREFETCH_BYTES = 64 << 20
SMALLEST_MEMORY = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What `aztask worker` runs with. Raises ConfigurationError for values that make no sense.

    * queues: the queues to receive from.
    * concurrency: tasks that run at the same time.
    * pool: "processes", "threads", "asyncio", or "solo", which runs one task at a time.
    * prefetch: deliveries held beyond those that run. None: adapts to the measured speed. 0: none.
    * burst: end when the queues are empty, delayed messages included.
    * max_tasks: end after this many tasks.
    * shutdown_timeout: seconds that running tasks get to finish after SIGTERM.
    * shutdown_grace: seconds that a task gets to clean up once it is told to stop, and that
      lifespans then get to close.
    * max_tasks_per_child, max_memory_per_child: a pool process is replaced after this many tasks,
      or once it uses this many bytes; None: never.
    * prefetch_bytes: bytes of messages beyond which no more are received than can run.
    * lease, max_lease: seconds, instead of the settings of queues and tasks.
    * name: the worker's name. "": made of host name and process id.
    * poll_ceiling: longest pause, in seconds, between polls of an empty Storage queue. None: the
      app's setting.
    * max_sessions: sessions of one queue that are served at the same time. None: the concurrency,
      at most 32.
    * session_share: seconds after which a session is given up while other sessions may wait.
    * log_tasks: log a line for each task that ends: "auto" (up to 50 a second, above that a
      summary each minute), "all" or "off". Failures are always logged.
    * schedules: make occurrences of schedules.
    * weights: by queue, how many tasks are taken from it while others have messages, too. Queues
      that are missing have their declared weight, else 1.
    """

    queues: tuple[str, ...] = ("default",)
    concurrency: int = 8
    pool: str = "processes"
    prefetch: int | None = None
    burst: bool = False
    max_tasks: int | None = None
    shutdown_timeout: float = 30.0
    shutdown_grace: float = 10.0
    max_tasks_per_child: int | None = None
    max_memory_per_child: int | None = None
    prefetch_bytes: int = PREFETCH_BYTES
    lease: float | None = None
    max_lease: float | None = None
    name: str = ""
    poll_ceiling: float | None = None
    max_sessions: int | None = None
    session_share: float = 5.0
    log_tasks: str = LOG_TASKS[0]
    schedules: bool = True
    weights: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.queues:
            raise ConfigurationError("a worker needs at least one queue; name it with -Q")
        if not self.name.isprintable():
            raise ConfigurationError(
                f"the worker name {printable(self.name, 60)} holds unprintable characters"
            )
        if self.pool not in POOLS:
            raise ConfigurationError(
                f"there is no pool {self.pool!r}; pools are {', '.join(POOLS)}."
                f"{did_you_mean(self.pool, POOLS)}"
            )
        if self.log_tasks not in LOG_TASKS:
            raise ConfigurationError(
                f"log_tasks takes {', '.join(LOG_TASKS)}, not {self.log_tasks!r}."
                f"{did_you_mean(self.log_tasks, LOG_TASKS)}"
            )
        for queue, weight in self.weights.items():
            check_weight(f"the weight of queue {queue!r}", weight)
        _whole(self.concurrency, "concurrency", 1, MOST_CONCURRENCY)
        if self.pool == SOLO and self.concurrency != 1:
            raise ConfigurationError(
                f"the pool solo runs one task at a time: its concurrency is 1, not "
                f"{self.concurrency}; for more, choose another pool"
            )
        if self.prefetch is not None:
            _whole(self.prefetch, "prefetch", 0, 100_000)
        if self.max_sessions is not None:
            _whole(self.max_sessions, "max-sessions", 1, MOST_SESSIONS)
        if self.max_tasks_per_child is not None:
            _whole(self.max_tasks_per_child, "max-tasks-per-child", 1, 2**53)
        if self.max_memory_per_child is not None:
            _whole(self.max_memory_per_child, "max-memory-per-child", SMALLEST_MEMORY, 2**53)
        _whole(self.prefetch_bytes, "prefetch-bytes", 0, 2**53)
        if self.max_tasks is not None:
            _whole(self.max_tasks, "max-tasks", 1, 2**53)
        if self.lease is not None and self.max_lease is not None and self.max_lease <= self.lease:
            raise ConfigurationError(
                f"--max-lease ({self.max_lease:g} s) must be longer than --lease "
                f"({self.lease:g} s): it caps the lease, renewals included"
            )

    @property
    def processes(self) -> int:
        """The number of pool processes."""
        return self.concurrency if self.pool == "processes" else 1

    @property
    def slots(self) -> int:
        """The number of tasks that run at the same time in each pool process."""
        return self.concurrency // self.processes


def weights_of(app: App, options: WorkerOptions) -> dict[str, int]:
    """The weights of a worker's queues: those of ``-Q``, else the declared ones, else 1.

    Empty if it has one queue, or none of them has a weight: then it receives from each as fast as
    it can.
    """
    if len(options.queues) == 1:
        return {}
    declared = app.queue_weights()
    found = {
        queue: weight
        for queue in options.queues
        if (weight := options.weights.get(queue, declared.get(queue))) is not None
    }
    return {queue: found.get(queue, 1) for queue in options.queues} if found else {}


# -- several supervisors -------------------------------------------------------------------
#
# The numbers of the command line hold for all of them together: more supervisors use more cores,
# but neither run more tasks at a time nor need more memory or more connections of a task's own.


DIVIDED = ("concurrency", "max_tasks", "max_sessions")
"""What each supervisor has at least one of."""

MOST_SUPERVISORS = 64
LOCAL_SUPERVISORS = 2
"""What is advised for workers on one file, see ``docs/performance.md``."""


def most_supervisors(options: Mapping[str, Any]) -> tuple[int, str]:
    """How many supervisors these options of a worker have work for, and the option that says so."""
    given = ((options[name], name) for name in DIVIDED if options[name] is not None)
    most, name = min(given)
    return most, f"--{name.replace('_', '-')}"


def advised_supervisors(options: Mapping[str, Any], *, remote: bool) -> int:
    """How many supervisors ``auto`` starts. remote: whether the broker is a service."""
    advised = cores() if remote else min(cores(), LOCAL_SUPERVISORS)
    return min(advised, MOST_SUPERVISORS, most_supervisors(options)[0])


def divided(options: WorkerOptions, number: int, total: int, name: str) -> WorkerOptions:
    """The options of one of several supervisors. number: 1 to `total`; name: its own."""
    names = (*DIVIDED, "prefetch", "prefetch_bytes")
    found = {each: getattr(options, each) for each in names}
    parts = {
        each: value // total + (number <= value % total)
        for each, value in found.items()
        if value is not None
    }
    return replace(options, name=name, **parts)


def _whole(value: int, what: str, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigurationError(f"{what} takes a whole number from {least} to {most}, not {value}")
