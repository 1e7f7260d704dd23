"""``manage.py aztask_worker``: the worker of a backend, with the options of ``aztask worker``."""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser
from typing import Any, Final

from django.conf import ENVIRONMENT_VARIABLE
from django.core.management.base import BaseCommand, CommandError

from aztask.django.api import task_backends
from aztask.django.backend import AztaskBackend
from aztask.operate.cli.worker import command as worker
from aztask.worker.firstprocess import become

PREFIX: Final = "worker_"
"""Of the names of the worker's options, because some are Django's too."""

ALIAS: Final = re.compile(r"[A-Za-z_]\w*\Z")


class Command(BaseCommand):
    """Replaces this process by ``aztask worker``, so that signals and process id stay as usual."""

    help = "Run Django tasks from their queues until the worker is stopped."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add ``--backend``, and every option of ``aztask worker``."""
        parser.add_argument(
            "--backend", default="default", help="Alias in the setting TASKS. [default: default]"
        )
        for option in worker.params:
            given: Any = option
            if option.name in (None, "app", "help"):
                continue
            text = (given.help or "").replace("%", "%%")
            settings: dict[str, Any] = {"dest": f"{PREFIX}{option.name}", "help": text}
            if given.is_flag:
                settings.update(action="store_const", const=True)
            elif given.multiple:
                settings.update(action="append", metavar=str(option.name).upper())
            else:
                settings.update(metavar=str(option.name).upper())
            parser.add_argument(*option.opts, **settings)

    def handle(self, *args: Any, **options: Any) -> None:
        """Check the backend, then become the worker."""
        alias = options["backend"]
        if alias not in task_backends.settings:
            known = ", ".join(sorted(task_backends.settings))
            raise CommandError(f"TASKS has no backend {alias!r}; it has: {known}")
        if not isinstance(task_backends[alias], AztaskBackend):
            raise CommandError(
                f"TASKS[{alias!r}] is not an aztask backend; name one with --backend"
            )
        if not ALIAS.match(alias):
            raise CommandError(f"the alias {alias!r} is not a Python name; rename it in TASKS")
        if ENVIRONMENT_VARIABLE not in os.environ:
            raise CommandError(
                f"{ENVIRONMENT_VARIABLE} is not set; the worker's processes find the settings by it"
            )
        words = ["-m", "aztask", "-A", f"aztask.django.worker:{alias}", "worker"]
        words += given_options(options)
        path = os.pathsep.join(each for each in sys.path if each)
        environment = {**os.environ, "PYTHONPATH": path}
        become(words, environment)


def given_options(options: dict[str, Any]) -> list[str]:
    """The command line of the worker's options that were given."""
    words = []
    for option in worker.params:
        value = options.get(f"{PREFIX}{option.name}")
        if value is True:
            words.append(option.opts[-1])
        elif value is not None:
            for each in value if isinstance(value, list) else [value]:
                words += [option.opts[-1], str(each)]
    return words
