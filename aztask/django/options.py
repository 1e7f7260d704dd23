"""The ``OPTIONS`` of a backend in Django's setting ``TASKS``: which are ours, which are the App's.

Rules
1. A wrong option raises ConfigurationError when the backend is made, which is at its first use.
2. An unknown option is reported with those that exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aztask.errors import ConfigurationError
from aztask.support.checks import module_names, shown
from aztask.taskoptions import TaskOptions, check_options, flag, name_text

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
