"""``aztask worker``: receive, run and settle tasks until stopped."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from aztask.address.addresses import MEMORY
from aztask.app import App
from aztask.errors import AztaskError, ConfigurationError, QueueFull, QueueNotFound, did_you_mean
from aztask.hooks import WorkerInfo
from aztask.operate.cli.failures import OK
from aztask.operate.cli.group import CliCommand, telemetry_module
from aztask.operate.cli.options import (
    LONGEST_LEASE,
    Duration,
    Listen,
    Size,
    Text,
    all_names,
    app_option,
    queues_option,
    split_weights,
)
from aztask.operate.cli.reload import Reloader, require_library
from aztask.operate.cli.target import app_spec, find_app
from aztask.operate.doctor import contradictions, handler_findings
from aztask.queues.base import ANY_SESSION
from aztask.stores.records.base import Provisioned
from aztask.support.display import plural, printable
from aztask.support.finding import Level
from aztask.support.garbage import collect_rarely
from aztask.support.late import install_command
from aztask.worker.firstprocess import become, stay_first
from aztask.worker.logs import FORMATS, LEVELS, LOG_TASKS, configure
from aztask.worker.options import (
    MOST_CONCURRENCY,
    MOST_SESSIONS,
    MOST_SUPERVISORS,
    POOLS,
    SMALLEST_MEMORY,
    SOLO,
    WorkerOptions,
    advised_supervisors,
    divided,
    most_supervisors,
    weights_of,
)
from aztask.worker.overseer import Overseer, OverseerLink
from aztask.worker.platform import lacks
from aztask.worker.shell import ThreadShell, first_shell
from aztask.worker.stopsignals import end, end_while_starting, ended
from aztask.worker.supervisor import Supervisor

logger = logging.getLogger("aztask.worker")

SHORTEST_LEASE = 0.1
SHOWN_TASKS = 10
POOL_TEXTS = {
    "processes": ("process", "processes"),
    "threads": ("thread in one process", "threads in one process"),
    "asyncio": ("task on one event loop", "tasks on one event loop"),
    SOLO: ("task at a time in the foreground", ""),
}
"""What a worker's slots are: one of them, and several."""

AUTO = 0
"""The number of supervisors is chosen by the first one."""

FULL_PAUSE = 5.0
"""Seconds between two tries to start while there is no room on the disk."""


class SupervisorCount(click.IntRange):
    """A number of supervisors, or ``auto``, which is `AUTO`."""

    name = "number or auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; fails with a usage error."""
        if value == "auto":
            return AUTO
        if not str(value).isdecimal():
            self.fail(f"{printable(value, 40)} is neither a whole number nor auto", param, ctx)
        return super().convert(value, param, ctx)


@click.command("worker", cls=CliCommand, extra="name the app with -A, for example -A shop:app")
@app_option
@queues_option(
    "Receive from these queues: a,b or -Q a -Q b. With weights, such as a:4,b:1, four of five "
    "tasks come from a while both have some. [default: those that the app names]",
    weighted=True,
)
@click.option(
    "-c",
    "--concurrency",
    type=click.IntRange(1, MOST_CONCURRENCY),
    default=8,
    show_default="8; 1 with --pool solo",
    help="Run this many tasks at the same time.",
)
@click.option(
    "--pool",
    type=click.Choice(POOLS),
    default=POOLS[0],
    help="Run each task in a process of its own, or all in one child process: in threads, or "
    "on one event loop. solo runs one task at a time in the foreground, for a debugger.",
)
@click.option(
    "--supervisors",
    type=SupervisorCount(1, MOST_SUPERVISORS),
    default=1,
    help="Start this many supervisors, each of which uses one core; auto: as many as help. "
    "--concurrency, --prefetch, --prefetch-bytes, --max-sessions and --max-tasks hold for all of "
    "them together.",
)
@click.option(
    "--prefetch",
    type=click.IntRange(0, 100_000),
    help="Hold this many deliveries beyond the running ones. [default: adapts to the speed]",
)
@click.option(
    "--burst",
    is_flag=True,
    help="End when the queues are empty, delayed messages included, and no task waits inside its "
    "code. Messages of unknown tasks keep it waiting until unknown_task_grace has passed.",
)
@click.option("--max-tasks", type=click.IntRange(1, 2**53), help="End after this many tasks.")
@click.option(
    "--shutdown-timeout",
    type=Duration(),
    default="30s",
    help="After SIGTERM, let running tasks finish for this time, then tell them to stop.",
)
@click.option(
    "--shutdown-grace",
    type=Duration(),
    default="10s",
    help="Tasks that are told to stop may clean up for this time, then their processes are killed. "
    "Lifespans may take as long to close.",
)
@click.option(
    "--max-tasks-per-child",
    type=click.IntRange(1, 2**53),
    help="Replace a pool process after this many tasks; its siblings go on.",
)
@click.option(
    "--max-memory-per-child",
    type=Size(least=SMALLEST_MEMORY),
    help="Replace a pool process that uses more memory than this, for example 500MB, once its "
    "tasks have ended.",
)
@click.option(
    "--prefetch-bytes",
    type=Size(),
    default="64MB",
    help="Beyond this size of all messages in hand, receive only as many as can run.",
)
@click.option(
    "--lease",
    type=Duration(least=SHORTEST_LEASE, most=LONGEST_LEASE),
    help="Hold each delivery under a lease of this length, renewed in time. [default: the app's]",
)
@click.option(
    "--max-lease",
    type=Duration(least=SHORTEST_LEASE),
    help="Stop a run that has held its message for this time, renewals included. "
    "[default: the app's]",
)
@click.option(
    "--poll-ceiling",
    type=Duration(least=0.02, most=3600.0),
    help="Pause at most this long between polls of an empty Storage queue. [default: the app's]",
)
@click.option(
    "--max-sessions",
    type=click.IntRange(1, MOST_SESSIONS),
    help="Serve this many sessions of a queue at the same time. "
    "[default: the concurrency, at most 32]",
)
@click.option(
    "--session-share",
    type=Duration(least=0.01),
    default="5s",
    help="Give a session up after this time if others may wait.",
)
@click.option(
    "--name",
    type=Text(new=True),
    default=None,
    show_default=False,
    help="Name the worker. [default: made of host and process id]",
)
@click.option(
    "--schedules/--no-schedules",
    default=True,
    help="Take part in sending the tasks of schedules.",
)
@click.option(
    "--http",
    type=Listen(),
    help="Serve /metrics, /healthz and /readyz at HOST:PORT, for example 127.0.0.1:9465; needs "
    'pip install "aztask[prometheus]".',
)
@click.option(
    "--celery-metrics",
    is_flag=True,
    help="With --http, add the metrics' names of celery-exporter.",
)
@click.option(
    "--reload",
    is_flag=True,
    help=f"Restart when the app's source files change; needs {install_command('reload')}.",
)
@click.option(
    "--log-format", type=click.Choice(FORMATS), default=FORMATS[0], help="Format the log on stderr."
)
@click.option(
    "--log-level",
    type=click.Choice(LEVELS),
    default=LEVELS[1],
    help="Log from this level on.",
)
@click.option(
    "--log-tasks",
    type=click.Choice(LOG_TASKS),
    default=LOG_TASKS[0],
    help="Log a line for each task that ends: up to 50 a second and else a summary each minute "
    "(auto), always (all) or never (off). Failures are always logged.",
)
def command(
    queues: Sequence[tuple[str, ...]],
    http: tuple[str, int] | None,
    celery_metrics: bool,
    reload: bool,
    log_format: str,
    log_level: str,
    supervisors: int,
    **options: Any,
) -> int:
    """Run tasks from queues until the worker is stopped.

    At SIGTERM, SIGHUP or Ctrl-C, the worker stops receiving, lets running tasks finish, and gives
    the rest back to the queues. A second signal, or SIGQUIT, gives everything back at once.
    """
    stay_first()
    end_while_starting()
    link = OverseerLink.of_process()
    if reload:
        require_library()
    if http is not None:
        telemetry_module("worker")
    configure(log_format, logging.getLevelNamesMapping()[log_level.upper()])
    serving = _Serving(http, celery_metrics, link)
    if link is None and supervisors != 1:
        _check_together(options, supervisors, reload=reload)
        return _oversee(Overseer(sys.argv[1:], options["name"] or "", supervisors), serving)
    # Before there is a thread, a connection or any module of the app.
    with contextlib.closing(first_shell()) as shell:
        if link is not None:
            link.start()
        if link is None or link.speaks:
            for lack in lacks(memory_limit=options["max_memory_per_child"] is not None):
                logger.warning("%s", lack)
        restart = _start(shell, queues, options, serving, reload=reload)
    if restart:
        become(["-m", "aztask", *sys.argv[1:]])  # the same command line once more
    ended()
    return OK


def _check_together(options: dict[str, Any], supervisors: int, *, reload: bool) -> None:
    """Raise UsageError for what several supervisors cannot do."""
    if reload or options["pool"] == SOLO:
        other = "--reload" if reload else "--pool solo"
        raise click.UsageError(f"--supervisors and {other} cannot be combined: remove one of them")
    most, option = most_supervisors(options)
    if supervisors > most:
        raise click.UsageError(
            f"--supervisors {supervisors} is more than {option} {most}, which holds for all of "
            f"them together: raise {option}"
        )


def _oversee(overseer: Overseer, serving: _Serving) -> int:
    """Run several supervisors until all have ended; returns the exit code."""
    with serving.around_all(overseer):
        end(overseer)
        code = overseer.run()
    ended()
    return code


def _start(
    shell: ThreadShell,
    queues: Sequence[tuple[str, ...]],
    options: dict[str, Any],
    serving: _Serving,
    *,
    reload: bool,
) -> bool:
    """Work until stopped; returns whether to restart, for --reload."""
    options["name"] = options["name"] or ""
    if options["pool"] == SOLO and not _is_given("concurrency"):
        options["concurrency"] = 1
    app = find_app(required="a worker")
    try:
        asked, weights = split_weights(all_names(queues))
        served = asked or tuple(app.queue_names())
        settings = WorkerOptions(queues=served, weights=weights, **options)
        warnings = app.overruled + surplus(app, app_spec() or "", asked) + app.unserved(asked)
        if serving.link is not None and not serving.link.speaks:
            warnings = []
        try:
            _check_with_room(app, settings)
        except QueueNotFound:  # misspelt, perhaps: a warning names the queue that is meant
            _log_warnings(warnings)
            raise
        _log_warnings(warnings)
        return _run(app, settings, shell, serving, reload=reload)
    finally:
        app.close()


def _is_given(option: str) -> bool:
    """Whether the command line or the environment has this option."""
    source = click.get_current_context().get_parameter_source(option)
    return source is not click.core.ParameterSource.DEFAULT


def _check_with_room(app: App, options: WorkerOptions) -> None:
    """As `_check`, but while the disk of the queue file is full, wait as a running worker does."""
    while True:
        try:
            _check(app, options)
            return
        except QueueFull as error:
            logger.warning("the worker cannot start, retry in %g s: %s", FULL_PAUSE, error)
            time.sleep(FULL_PAUSE)


def _check(app: App, options: WorkerOptions) -> None:
    """Fail now for errors that every receive would repeat: a wrong name, a missing queue."""
    if app.address.partition("?")[0].endswith(MEMORY):
        raise ConfigurationError(
            f"{app.address} is visible to one process only, so a worker finds nothing there; "
            "give the app a file, for example local://"
        )
    for finding in handler_findings(app):
        if finding.error is not None:
            raise finding.error
    app.codec.cipher.unlock()
    known = [*app.queue_names(), app.settings.default_queue]
    for queue in options.queues:
        if queue not in known and not app.broker.capabilities.remote:
            app.broker.stats(queue)  # receiving would create it, whatever its name
        lease = options.lease or app.lease_seconds(queue)
        session = ANY_SESSION if app.has_sessions(queue) else None
        app.broker.receiver(queue, lease=lease, session=session).close()
    if isinstance(app.results, Provisioned):
        app.results.check()


@dataclass(frozen=True, slots=True)
class _Serving:
    """Where this process is asked how it is.

    address: of ``--http``, None to serve nothing. link: to the overseer, which serves instead.
    """

    address: tuple[str, int] | None
    celery_names: bool
    link: OverseerLink | None

    @contextlib.contextmanager
    def around_all(self, overseer: Overseer) -> Iterator[None]:
        """Serve metrics and probes of all supervisors inside the ``with`` block."""
        if self.address is None:
            yield
            return
        module = telemetry_module("worker")
        with module.serving(module.overseen(overseer), self.address) as url:
            _log_url(url)
            yield

    @contextlib.contextmanager
    def around(self, app: App, worker: str, queues: Sequence[str]) -> Iterator[None]:
        """Serve metrics and probes inside the ``with`` block."""
        if self.address is None:
            yield
            return
        module = telemetry_module("worker")
        with contextlib.ExitStack() as stack:
            pages = stack.enter_context(
                module.observing(app, worker, queues, celery_names=self.celery_names)
            )
            if self.link is not None:
                self.link.serve(pages)
            else:
                _log_url(stack.enter_context(module.serving(pages, self.address)))
            yield


def _log_url(url: str) -> None:
    logger.info("metrics and probes at %s/metrics, /healthz and /readyz", url)


def _run(
    app: App,
    options: WorkerOptions,
    shell: ThreadShell,
    serving: _Serving,
    *,
    reload: bool,
) -> bool:
    link, own, total = serving.link, options, 1
    if link is not None:
        total = link.total or advised_supervisors(asdict(options), remote=app.remote)
        own = divided(options, link.number, total, link.name)
    supervisor = Supervisor(app, app_spec() or "", own, shell)
    reloader = Reloader(Path.cwd(), supervisor.stop) if reload else None
    if link is None:
        end(supervisor)
    if link is None or link.speaks:
        name = supervisor.name if link is None else link.name.removesuffix(f".{link.number}")
        for line in banner(app, app_spec() or "", name, options, total):
            logger.info("%s", line)
        _warn(app, options)
    if link is not None:
        link.up(total, supervisor)
    if reloader is not None:
        reloader.start()
    with (
        serving.around(app, supervisor.name, options.queues),
        app.hooks.worker.around(WorkerInfo(supervisor.name, options.queues)),
    ):
        collect_rarely()
        supervisor.run()
    logger.info("worker %s stopped: %s", supervisor.name, supervisor.journal.summary())
    if reloader is None:
        return False
    reloader.stop()
    return reloader.due


def _warn(app: App, options: WorkerOptions) -> None:
    """Log the settings of the queues that contradict the app's, if they may be read."""
    try:
        unsigned = [each for each in handler_findings(app) if each.level is not Level.OK]
        for finding in [*unsigned, *contradictions(app, options.queues, options.lease)]:
            logger.warning("%s", finding)
    except AztaskError as error:  # the worker continues: its intakes retry
        logger.warning("the queues' settings were not checked: %s", error)


def _log_warnings(warnings: Sequence[str]) -> None:
    for warning in warnings:
        logger.warning("%s", warning)


def surplus(app: App, spec: str, queues: Sequence[str]) -> list[str]:
    """Warnings about an app without tasks, and about given queues that no task uses."""
    modules = {spec.partition(":")[0], *app.include}
    modules |= {task.function.__module__ for task in app.tasks.values()}
    imported = ", ".join(sorted(modules - {""}))
    if not app.tasks:
        return [
            f"app {app.name} has no tasks: it imported {imported}; name the modules that define "
            "its tasks with App(..., include=[...])"
        ]
    known = [*app.queue_names(), app.settings.default_queue]
    return [
        f"queue {queue} is used by no task of app {app.name}, which imported {imported}."
        f"{did_you_mean(queue, known)}"
        for queue in queues
        if queue not in known
    ]


def banner(
    app: App, spec: str, name: str, options: WorkerOptions, supervisors: int = 1
) -> list[str]:
    """The lines at a worker's start: what it serves, from where, and how. Secrets are masked."""
    pool = POOL_TEXTS[options.pool][options.concurrency != 1]
    leases = sorted({options.lease or app.lease_now(queue) for queue in options.queues})
    held = " to ".join(f"{lease:g}" for lease in dict.fromkeys((leases[0], leases[-1])))
    tasks = sorted(app.tasks)
    shown = ", ".join(tasks[:SHOWN_TASKS])
    weights = weights_of(app, options)
    queues = [f"{queue}:{weights[queue]}" if weights else queue for queue in options.queues]
    more = f" and {len(tasks) - SHOWN_TASKS} more" if len(tasks) > SHOWN_TASKS else ""
    several = f"{supervisors} supervisors, " if supervisors > 1 else ""
    longest = options.max_lease or app.settings.max_lease_seconds
    solo = (
        "pool solo: time limits are off, and leases are renewed while a debugger waits; a run "
        f"still ends at max_lease, {longest:g} s (or its task's own): raise it with --max-lease"
    )
    return [
        *([solo] if options.pool == SOLO else []),
        f"worker {name}: {several}{options.concurrency} {pool}, queues {', '.join(queues)}, "
        f"broker {app.address}, lease {held} s",
        f"app {app.name} ({spec}), {plural(len(tasks), 'task')}{': ' * bool(tasks)}{shown}{more}",
    ]
