"""What the check of a project recognises, and what it leaves alone."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from aztask.celery.migration.project import read_project

APP = "from celery import Celery\napp = Celery('shop')\n"


def found(folder: Path, *, missing: bool = False) -> list[str]:
    """The uses as ``FILE:LINE SECTION NAME``."""
    return [
        f"{Path(use.file).relative_to(folder)}:{use.line} {use.section} {use.name}"
        for use in read_project(folder).uses
        if use.missing or not missing
    ]


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/').replace('INIT', '__init__')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


AROUND = [
    ("from django_celery_beat.models import PeriodicTask as P\nP.objects",
     "django_celery_beat.models.PeriodicTask"),
    ("app.conf.beat_scheduler = 'django_celery_beat.schedulers:DatabaseScheduler'",
     "django_celery_beat.schedulers.DatabaseScheduler"),
    ("INSTALLED_APPS = ['django_celery_beat']", "django_celery_beat"),
    ("from django_celery_beat.admin import PeriodicTaskAdmin", "django_celery_beat.admin"),
    ("from django_celery_results.models import TaskResult",
     "django_celery_results.models.TaskResult"),
    ("from celery_once import QueueOnce", "celery_once"),
    ("import redbeat\nredbeat.RedBeatSchedulerEntry", "redbeat"),
    ("from celery.worker.control import control_command as c\n@c()\ndef f(state): ...",
     "celery.worker.control.control_command"),
    ("from celery.worker.request import Request", "celery.worker.request"),
    ("import celery.worker.consumer as c\nc.Consumer", "celery.worker"),
    ("from celery.beat import ScheduleEntry", "celery.beat"),
    ("from celery import bootsteps\nclass S(bootsteps.Step): ...", "celery.bootsteps"),
    ("from kombu import Queue", "kombu.Queue"),
    ("from kombu import Exchange as E\nE('a')", "kombu.Exchange"),
    ("import kombu.common\nkombu.common.Broadcast('a')", "kombu.common.Broadcast"),
    ("from kombu.transport.redis import Transport\nclass T(Transport): ...", "kombu.transport"),
    ("from kombu.utils.json import register_type", "kombu.utils.json"),
    ("try:\n    from celery.task import Task\nexcept ImportError:\n    Task = None", "celery.task"),
    ("from kombu import *", "kombu.*"),
    ("from kombu import *\nQueue('a')", "kombu.Queue"),
    ("def f():\n    from celery.platforms import signals\n    signals['INT']", "celery.platforms"),
    ("from celery.nowhere import x", "celery.nowhere.x"),
    ("from kombu import nowhere", "kombu.nowhere"),
    ("from celery_unheard_of import x", "celery_unheard_of.x"),
    ("from django_celery_unheard_of.models import x", "django_celery_unheard_of.models.x"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "name"), AROUND)
def test_no_name_of_celery_and_what_is_around_it_is_passed_over(
    tmp_path: Path, source: str, name: str
) -> None:
    write(tmp_path, shop=APP + source)
    names = [use.name for use in read_project(tmp_path).uses if use.section == "names"]
    assert name in names


def test_modules_of_the_project_are_not_taken_for_packages(tmp_path: Path) -> None:
    write(tmp_path, celery_tools="x = 1\n", shop="from celery_tools import x\nprint(x)\n")
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("@app.task(throws=(OSError,))\ndef f(): ...", "task throws"),
        ("@app.task(colour='red')\ndef f(): ...", "task colour"),
        ("app.conf.task_annotations = {}", "settings task_annotations"),
        ("app.conf['task_annotations'] = {}", "settings task_annotations"),
        ("app.conf.update(task_annotations={})", "settings task_annotations"),
        ("app.conf.update({'task_annotations': {}})", "settings task_annotations"),
        ("app.conf = {'task_annotations': {}}", "settings task_annotations"),
        ("app.config_from_object({'task_annotations': {}})", "settings task_annotations"),
        ("CELERY_TASK_ANNOTATIONS = {}", "settings task_annotations"),
        ("CELERYD_AGENT = 'a'", "settings worker_agent"),
        ("app.control.rate_limit('f', '1/s')", "control rate_limit"),
        ("app.control.inspect().memdump()", "control memdump"),
        ("i = app.control.inspect()\ni.memdump()", "control memdump"),
        ("app.send_task('f', priority=3)", "send priority"),
        ("@app.task\ndef f(): ...\nf.apply_async(shadow='g')", "send shadow"),
        ("@app.task\ndef f(): ...\nf.s(1).set(priority=1)", "send priority"),
        ("@app.task\ndef f(): ...\n(f.s() | f.s()).stamp(a=1)", "signature stamp"),
        ("@app.task\ndef f(): ...\nf.chunks([], 10)", "task chunks"),
        ("@app.task(bind=True)\ndef f(self):\n    self.replace(1)", "task replace"),
        ("@app.task(bind=True)\ndef f(me):\n    me.request.utc", "request utc"),
        ("from celery import current_task as t\nt.request.utc", "request utc"),
        ("class T(app.Task):\n    abstract = True", "task abstract"),
        ("from celery import Task\nclass T(Task):\n    def on_replace(self): ...",
         "task on_replace"),
        ("from celery.signals import eventlet_pool_apply as e\ne.connect(print)",
         "signals eventlet_pool_apply"),
        ("import celery.signals as s\ns.eventlet_pool_apply.connect(print)",
         "signals eventlet_pool_apply"),
        ("from celery.schedules import solar", "names celery.schedules.solar"),
        ("import celery\ncelery.bootsteps.Step", "names celery.bootsteps"),
        ("class Config:\n    task_annotations = {}\napp.config_from_object(Config)",
         "settings task_annotations"),
    ],
)  # fmt: skip
def test_a_use_without_a_counterpart_is_found(tmp_path: Path, source: str, use: str) -> None:
    write(tmp_path, shop=APP + source)
    assert [each.partition(" ")[2] for each in found(tmp_path, missing=True)][-1] == use


def test_apps_and_tasks_are_followed_through_imports(tmp_path: Path) -> None:
    write(
        tmp_path,
        proj__INIT="from .celery import app as celery_app\n",
        proj__celery=APP,
        proj__tasks="""\
            from . import celery_app
            from proj.celery import app as other

            @celery_app.task(throws=(KeyError,))
            def one(): ...

            @other.task(throws=(KeyError,))
            def two(): ...
            """,
        main="from proj.tasks import one, two as second\none.chunks(1, 2)\nsecond.chunks(1, 2)\n",
    )
    assert found(tmp_path, missing=True) == [
        "main.py:2 task chunks",
        "main.py:3 task chunks",
        "proj/tasks.py:4 task throws",
        "proj/tasks.py:7 task throws",
    ]


def test_settings_modules_are_found_by_how_they_are_loaded(tmp_path: Path) -> None:
    write(
        tmp_path,
        shop=APP + "app.config_from_object('site.conf')\n"
        "app.config_from_object('django.conf:settings', namespace='QUEUE')\n",
        site__INIT="",
        site__conf="task_annotations: dict = {}\n",
        settings="QUEUE_TASK_ANNOTATIONS = {}\nDEBUG = True\n",
        other="task_annotations = {}  # nothing loads this\n",
    )
    assert found(tmp_path, missing=True) == [
        "settings.py:1 settings task_annotations",
        "site/conf.py:1 settings task_annotations",
    ]


def test_other_libraries_are_left_alone(tmp_path: Path) -> None:
    write(
        tmp_path,
        web="""\
            from aztask import App, chain
            from flask import Flask

            app = App("shop")
            site = Flask("celery")

            @app.task(rate_limit="1/s")
            def f(): ...

            f.chunks()
            site.conf.task_annotations = 1
            chain(f.s()).stamp()
            priority = 1
            """,
    )
    assert found(tmp_path) == []


def test_two_folders_may_hold_modules_of_one_name(tmp_path: Path) -> None:
    write(tmp_path, old__tasks=APP + "app.conf.task_annotations = {}\n")
    write(
        tmp_path, new__tasks="from aztask import App\napp = App('x')\napp.conf.task_annotations\n"
    )
    assert found(tmp_path, missing=True) == ["old/tasks.py:3 settings task_annotations"]


def test_command_lines_are_read(tmp_path: Path) -> None:
    (tmp_path / "Procfile").write_text("worker: celery -A shop worker -c4 --autoscale=3,1 -Q a\n")
    (tmp_path / "run.sh").write_text(
        "#!/bin/sh\n# celery multi start\nexec venv/bin/celery --app shop \\\n  beat -l info\n"
        "celery -A shop inspect memdump\npip install celery\n"
    )
    (tmp_path / "compose.yml").write_text(
        'services:\n  celery:\n    image: "shop/celery:1"\n'
        '    command: ["celery", "-A", "s", "multi"]\n'
    )
    assert found(tmp_path) == [
        "Procfile:1 commands celery worker",
        "Procfile:1 worker --autoscale",
        "Procfile:1 worker -A",
        "Procfile:1 worker -Q",
        "Procfile:1 worker -c",
        "compose.yml:4 commands celery multi",
        "run.sh:3 commands celery beat",
        "run.sh:5 commands celery inspect",
        "run.sh:5 control memdump",
    ]


def test_damaged_files_are_named_and_skipped(tmp_path: Path) -> None:
    write(tmp_path, good=APP + "app.conf.task_annotations = {}\n")
    (tmp_path / "bad.py").write_text("from celery import (\n")
    (tmp_path / "bytes.py").write_bytes(b"# celery \xff\xfe\n")
    (tmp_path / "deep.py").write_text("celery = " + "(" * 5000 + ")" * 5000)
    (tmp_path / "brackets.py").write_text("celery = " + "[" * 120 + "]" * 120)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "x.py").write_text("from celery import (\n")
    reading = read_project(tmp_path)
    unread = {Path(each.file).name for each in reading.unread}
    assert unread - {"brackets.py"} == {"bad.py", "bytes.py", "deep.py"}
    assert all("\n" not in each.reason for each in reading.unread)
    assert len([use for use in reading.uses if use.missing]) == 1


def test_a_circular_import_ends(tmp_path: Path) -> None:
    write(tmp_path, a="from b import app\napp.task\n# celery", b="from a import app\n# celery")
    assert found(tmp_path) == []


def test_what_is_no_file_is_left_alone(tmp_path):
    """Reading a FIFO waits for somebody to write to it, perhaps for ever."""
    os.mkfifo(tmp_path / "pipe.py")
    write(tmp_path, shop=APP)
    assert read_project(tmp_path).unread == []
    with pytest.raises(OSError, match="Not a directory"):
        read_project(tmp_path / "pipe.py")
