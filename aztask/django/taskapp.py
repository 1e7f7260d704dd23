"""The App behind a backend: its tasks are the Django tasks that this process has imported.

Rules
1. Django makes a backend for each thread; those of one alias with equal settings share one App.
2. A message names a task by its path, and nothing is imported for it: a path that no imported
   module has registered is an unknown task.
3. Workers import the module ``tasks`` of every installed app that the option `modules` allows, and
   the modules that it names. Nothing else is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from django.apps import apps
from django.utils.module_loading import module_has_submodule

from aztask.app import App
from aztask.django.api import Task, attach
from aztask.errors import ConfigurationError
from aztask.hooks import WorkerInfo
from aztask.support.checks import module_names, shown
from aztask.support.forks import fork_safe_lock, fork_safe_rlock
from aztask.taskoptions import TaskOptions, check_options, flag, name_text

# The ``OPTIONS`` of a backend in Django's setting ``TASKS``: which are ours, which are the App's.
#
# Rules
# 1. A wrong option raises ConfigurationError when the backend is made, which is at its first use.
# 2. An unknown option is reported with those that exist.


BELOW: Final = ".*"
NOT_OF_TASKS: Final = ("name", "queue")
"""Task options that Django itself gives a task."""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """The options of one backend.

    * `modules`: the modules whose tasks may be sent and run. ``"shop.jobs.*"`` stands for
      ``shop.jobs`` and everything below it. None, the default, allows all modules.
    * `enqueue_on_commit`: True sends a task when the transaction commits in which it was enqueued;
      False (default) sends it at once.
    * `database`: the alias of the database whose transactions count, "default" by default.
    * `tasks`: options of `aztask.taskoptions.TaskOptions` by a task's path, such as
      ``{"shop.tasks.send_mail": {"time_limit": 60}}``.
    * `app`: the options of the `App`.
    """

    modules: tuple[str, ...] | None = None
    enqueue_on_commit: bool = False
    database: str = "default"
    tasks: Mapping[str, TaskOptions] = field(default_factory=dict)
    app: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, given: Mapping[str, Any], where: str) -> BackendOptions:
        """The options in `given`. where: names the backend in errors, ConfigurationError."""
        app = dict(given)
        modules = app.pop("modules", None)
        tasks = app.pop("tasks", {})
        if modules is not None:
            listed = isinstance(modules, list | tuple)
            names = [str(each).removesuffix(BELOW) for each in modules] if listed else modules
            module_names(f"{where}: modules", names)
            modules = tuple(str(each) for each in modules)
        if not isinstance(tasks, Mapping):
            raise ConfigurationError(
                f"{where}: tasks is a dict of options by a task's path, such as "
                f'{{"shop.tasks.send_mail": {{"time_limit": 60}}}}, not {shown(tasks)}'
            )
        for path, options in tasks.items():
            check_options(options, TaskOptions, f"{where}: tasks: {path!r}")
            if wrong := [name for name in NOT_OF_TASKS if name in options]:
                raise ConfigurationError(
                    f"{where}: tasks: {path!r}: {wrong[0]} is set by Django's @task decorator; "
                    "take it out here"
                )
        return cls(
            modules,
            flag(app.pop("enqueue_on_commit", False), f"{where}: enqueue_on_commit"),
            name_text(app.pop("database", "default"), f"{where}: database"),
            tasks,
            app,
        )

    def allows(self, module: str) -> bool:
        """True if tasks of this module may be sent and run."""
        if self.modules is None:
            return True
        return any(_covers(pattern, module) for pattern in self.modules)


def _covers(pattern: str, module: str) -> bool:
    if not pattern.endswith(BELOW):
        return module == pattern
    base = pattern.removesuffix(BELOW)
    return module == base or module.startswith(f"{base}.")


TASKS: Final = "tasks"
DEFAULT_QUEUE: Final = "default"

Wrap = Callable[["TaskApp", str], Callable[..., Any]]


class TaskApp:
    """The App of one backend, with the Django tasks that it runs.

    * `alias`: the backend's name in the setting ``TASKS``.
    * `app`: the App.
    * `options`: the backend's options.
    * `backend`: the backend's class, the sender of its signals.
    * `known`: the Django tasks by their paths.
    * `worker`: the name of the worker whose process this is.
    """

    def __init__(self, alias: str, params: Mapping[str, Any], backend: type, wrap: Wrap) -> None:
        """Raises ConfigurationError if an option is wrong.

        * `wrap`: makes the function that the worker calls for a task's path.
        """
        self.alias = alias
        where = f"TASKS[{alias!r}]['OPTIONS']"
        self.options = BackendOptions.read(params.get("OPTIONS", {}), where)
        self.backend = backend
        self.known: dict[str, Any] = {}
        self.worker = "inline"
        self._wrap = wrap
        self._lock = fork_safe_rlock()
        self._loaded = False
        queues = list(params.get("QUEUES", [DEFAULT_QUEUE]))
        first = DEFAULT_QUEUE if DEFAULT_QUEUE in queues or not queues else queues[0]
        self.app = App(**{"name": alias, "default_queue": first, **self.options.app})
        for queue in queues:
            self.app.queue(queue)
        self.app.around_send(attach)
        self.app.around_process(self._note_worker)

    def register(self, task: Any) -> None:
        """Have the App know this Django task, so that a worker in this process can run it."""
        path = task.module_path
        known = self.known.get(path)
        if known is not None and known.func is task.func:
            return
        with self._lock:
            self.known[path] = task  # a module that was imported again has a new function
            if path in self.app.tasks:
                return
            options: dict[str, Any] = {**self.options.tasks.get(path, {})}
            decorate = self.app.task_with_context(name=path, queue=task.queue_name, **options)
            decorate(self._wrap(self, path))

    def load(self) -> None:
        """Import the modules with tasks, once, and register all of their tasks."""
        with self._lock:
            if self._loaded:
                return
            for name in self._modules():
                for value in list(vars(import_module(name)).values()):
                    # Declared for another backend, perhaps, and sent with .using(backend=...).
                    if isinstance(value, Task) and self.options.allows(value.func.__module__):
                        self.register(value)
            self._loaded = True

    def _modules(self) -> Iterator[str]:
        for config in apps.get_app_configs():
            name = f"{config.name}.{TASKS}"
            if self.options.allows(name) and module_has_submodule(config.module, TASKS):
                yield name
        yield from (each for each in self.options.modules or () if not each.endswith(BELOW))

    def _note_worker(self, info: WorkerInfo) -> Generator[None, Any, Any]:
        self.worker = info.name
        yield


_lock = fork_safe_lock()
_made: dict[str, tuple[Mapping[str, Any], type, TaskApp]] = {}


def task_app(alias: str, params: Mapping[str, Any], backend: type, wrap: Wrap) -> TaskApp:
    """The shared `TaskApp` of a backend; a new one if its settings have changed, as in tests."""
    with _lock:
        made = _made.get(alias)
        asked = {**params, "OPTIONS": {**params.get("OPTIONS", {})}}
        if made is not None and made[:2] == (asked, backend):
            return made[2]
        new = TaskApp(alias, params, backend, wrap)
        _made[alias] = (asked, backend, new)
        if made is not None:
            made[2].app.close()
        return new
