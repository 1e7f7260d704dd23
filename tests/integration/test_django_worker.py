"""Django's tasks on real workers, which ``manage.py aztask_worker`` starts."""

import asyncio
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import django
import pytest
from waiting import wait_until

os.environ["DJANGO_SETTINGS_MODULE"] = "djangosite.settings"
django.setup()
del os.environ["DJANGO_SETTINGS_MODULE"]  # programs that other tests start have their own

from django.conf import settings  # noqa: E402
from django.db import connection  # noqa: E402
from django.test import override_settings  # noqa: E402
from django.utils import timezone  # noqa: E402
from djangosite import tasks as site  # noqa: E402

from aztask.errors import TimeLimitExceeded  # noqa: E402
from aztask.queues.servicebus.admin import ADMIN_VARIABLE  # noqa: E402
from aztask.testing import emulator  # noqa: E402

ROOT = Path(__file__).parents[2]
MANAGE = ROOT / "tests" / "djangosite" / "manage.py"


class Project:
    """The site in a folder of its own, on one broker."""

    def __init__(self, folder, broker):
        self.environment = {
            **os.environ,
            "DJANGOSITE_FOLDER": str(folder),
            "DJANGOSITE_BROKER": broker,
            "DJANGOSITE_RESULTS": f"local://{folder}/queues.db",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        }
        given = settings.TASKS["default"]
        results = self.environment["DJANGOSITE_RESULTS"]
        options = {**given["OPTIONS"], "broker": broker, "results": results}
        self.settings = override_settings(TASKS={"default": {**given, "OPTIONS": options}})

    def manage(self, *words, code=0, **environment):
        """Run a command of ``manage.py``; returns what it printed."""
        done = subprocess.run(
            [sys.executable, MANAGE, *words],
            env={**self.environment, **environment},
            cwd=self.environment["DJANGOSITE_FOLDER"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def work(self, *words, **environment):
        """Run a worker until the queues are empty; returns its log."""
        return self.manage("aztask_worker", "--burst", *words, **environment)


@pytest.fixture(params=["local", "servicebus"])
def project(request, tmp_path):
    """The site on the embedded queue, and on the local Service Bus."""
    if request.param == "local":
        broker = f"local://{tmp_path}/queues.db"
    else:
        bus = request.getfixturevalue("private_bus")
        broker = bus.connection_string
        request.getfixturevalue("monkeypatch").setenv(ADMIN_VARIABLE, bus.admin_connection_string)
    made = Project(tmp_path, broker)
    with made.settings:
        yield made


@pytest.fixture
def private_bus():
    """A fresh local Service Bus with the queues of the site."""
    with emulator(queues=["default", "queue_1"]) as running:
        yield running


@pytest.fixture
def local(tmp_path):
    """The site on the embedded queue."""
    made = Project(tmp_path, f"local://{tmp_path}/queues.db")
    with made.settings:
        yield made


def test_tasks_run_on_a_worker(project):
    echo = site.echo.enqueue(1, two=[3])
    other = site.echo.using(queue_name="queue_1").enqueue("other")
    later = site.get_task_id.using(run_after=timezone.now() + timedelta(seconds=2)).enqueue()
    retried = asyncio.run(site.fails_until_async.aenqueue(2))
    failed = site.complex_return_value.enqueue()
    log = project.work("-c", "2", "--name", "w1")
    for result in (echo, other, later, retried, failed):
        result.refresh()
    assert echo.return_value == [[1], {"two": [3]}]
    assert echo.enqueued_at <= echo.started_at <= echo.finished_at
    assert other.return_value == [["other"], {}]
    assert later.return_value == later.id
    assert later.started_at >= later.task.run_after
    assert (retried.return_value, retried.attempts) == (2, 2)
    assert retried.worker_ids == ["w1", "w1"]
    assert retried.errors[0].exception_class is site.SoldOut
    assert failed.status == "FAILED"
    assert failed.errors[0].exception_class is TypeError
    assert "worker w1: 2 processes, queues default, queue_1" in log
    assert echo == site.echo.get_result(echo.id)


@pytest.mark.parametrize(
    "pool", [["-c", "1"], ["--pool", "threads", "-c", "2"], ["--pool", "asyncio", "-c", "2"]]
)
def test_the_database_in_each_pool(local, pool):
    local.manage("migrate", "--run-syncdb")
    written = [
        *(site.write_note.enqueue(f"def {number}") for number in range(3)),
        *(site.write_note_async.enqueue(f"async {number}") for number in range(3)),
    ]
    local.work(*pool)
    for result in written:
        result.refresh()
        assert result.status == "SUCCESSFUL", result.errors
    texts = {text for result in written for text in result.return_value}
    assert texts == {f"{kind} {number}" for kind in ("def", "async") for number in range(3)}


def test_many_coroutines_wait_at_the_same_time_without_a_thread_for_each(local):
    results = [site.nap.enqueue(1.0) for _ in range(100)]
    local.work("--pool", "asyncio", "-c", "100")
    for result in results:
        result.refresh()
    last = max(result.finished_at for result in results)
    assert last - min(result.started_at for result in results) < timedelta(seconds=50)
    assert max(result.return_value for result in results) < 50


@pytest.mark.parametrize(("age", "left"), [("0", False), ("600", True)])
def test_connections_are_closed_after_each_task_as_after_a_request(local, age, left):
    """In one process, one after the other; CONN_MAX_AGE decides, as in a web server."""
    opened, after = site.leave_connection_open.enqueue(), site.left_open.enqueue()
    local.work("-c", "1", DJANGOSITE_CONN_MAX_AGE=age)
    opened.refresh()
    after.refresh()
    assert (opened.return_value, after.return_value) == (True, left)


def test_options_of_single_tasks(local):
    result = site.limited.enqueue()
    local.work("-c", "1")
    result.refresh()
    assert result.status == "FAILED"
    assert [each.exception_class for each in result.errors] == [TimeLimitExceeded]


def test_a_worker_stops_at_sigterm_like_any_other(local):
    with subprocess.Popen(
        [sys.executable, MANAGE, "aztask_worker", "--name", "w2"],
        env=local.environment,
        cwd=local.environment["DJANGOSITE_FOLDER"],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        result = site.calculate_meaning_of_life.enqueue()
        try:
            wait_until(lambda: result.refresh() or result.is_finished, 20, "the task has ended")
            process.send_signal(signal.SIGTERM)
            log = process.stderr.read()
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert result.worker_ids == ["w2"]
    assert "worker w2 stopped: " in log


def test_the_commands_help_and_errors(local):
    text = local.manage("aztask_worker", "--help")
    for option in ("--backend", "--concurrency", "--pool", "--burst", "--http", "--queues"):
        assert option in text
    assert "no backend 'other'" in local.manage("aztask_worker", "--backend", "other", code=1)
    assert "Invalid value for '-c'" in local.manage("aztask_worker", "-c", "0", code=2)
    assert "aztask.W001" not in local.manage("check")


@pytest.mark.parametrize("problem", ["import no_such_module", "None.missing", "1 / 0"])
def test_a_module_of_tasks_that_cannot_be_imported(local, tmp_path, problem):
    """Also an AttributeError, which must not look like a missing backend."""
    (tmp_path / "brokentasks.py").write_text(problem)
    path = os.pathsep.join([str(tmp_path), local.environment["PYTHONPATH"]])
    log = local.manage(
        "aztask_worker", "--burst", code=2, PYTHONPATH=path, DJANGOSITE_MODULES="brokentasks"
    )
    assert log.splitlines()[-1].startswith(
        "aztask: error: the tasks of backend 'default' cannot be imported: "
    )


def test_other_commands_take_the_workers_app(local):
    site.calculate_meaning_of_life.enqueue()
    done = subprocess.run(
        [sys.executable, "-m", "aztask", "-A", "aztask.django.worker:default", "tasks"],
        env={**local.environment, "DJANGO_SETTINGS_MODULE": "djangosite.settings"},
        cwd=local.environment["DJANGOSITE_FOLDER"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "djangosite.tasks.calculate_meaning_of_life" in done.stdout
    assert connection.vendor == "sqlite"
