"""What Django's own tests (`tests/tasks` of Django 6) demand of a backend, for `AztaskBackend`.

The order is that of Django's files: test_tasks.py, test_dummy_backend.py (what is enqueued) and
test_immediate_backend.py (what has run). Tests of what Django does without the backend are left
out. "Run" means inline mode: the worker's own pipeline, in this process.
"""

import asyncio
import dataclasses
import os
from datetime import UTC, datetime, timedelta

import pytest
from asgiref.sync import async_to_sync
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import transaction
from django.test import override_settings
from django.utils import timezone
from django.utils.module_loading import import_string
from djangosite import tasks as site

from aztask import RetryPolicy
from aztask.django.api import (
    InvalidTask,
    Task,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
)
from aztask.django.backend import AztaskBackend
from aztask.errors import ConfigurationError

try:
    from django.tasks import default_task_backend, task
    from django.tasks.exceptions import TaskResultMismatch

    FRAMEWORK = LOGGER = "django.tasks"
except ImportError:
    from django_tasks import default_task_backend, task
    from django_tasks.exceptions import TaskResultMismatch

    FRAMEWORK = LOGGER = "django_tasks"

NO_RETRY = RetryPolicy(max_retries=0)
BOTH = pytest.mark.parametrize("name", ["noop_task", "noop_task_async"])


def run(task, *args, **kwargs):
    """Enqueue a task and run everything; its result afterwards."""
    with task_backends[task.backend].app.inline():
        result = task.enqueue(*args, **kwargs)
        result.refresh()
        return result


def assert_ran(result):
    assert result.is_finished
    # Inline, the store's clock stands still from the beginning of the block on.
    assert result.enqueued_at - timedelta(seconds=5) <= result.started_at <= result.finished_at
    assert result.started_at <= result.last_attempted_at


# -- test_tasks.py -------------------------------------------------------------------------------


def test_using_correct_backend():
    assert default_task_backend == task_backends["default"]
    assert isinstance(task_backends["default"], AztaskBackend)
    assert default_task_backend.alias == "default"
    assert default_task_backend.options.keys() == {"broker", "results"}


def test_task_decorator():
    for each in (site.noop_task, site.noop_task_async, site.noop_task_from_bare_decorator):
        assert isinstance(each, Task)


@BOTH
def test_enqueue_task(name):
    each = getattr(site, name)
    result = each.enqueue(1, two=3)
    assert result.status == TaskResultStatus.READY
    assert not result.is_finished
    assert result.enqueued_at is not None
    assert (result.started_at, result.last_attempted_at, result.finished_at) == (None, None, None)
    with pytest.raises(ValueError, match="Task has not finished yet"):
        _ = result.return_value
    assert (result.task, result.args, result.kwargs) == (each, [1], {"two": 3})
    assert (result.attempts, result.errors, result.worker_ids) == (0, [], [])
    assert 0 < len(result.id) <= 64


@BOTH
def test_enqueue_task_async(name):
    each = getattr(site, name)
    result = asyncio.run(each.aenqueue(1, two=3))
    assert result.status == TaskResultStatus.READY
    assert (result.task, result.args, result.kwargs) == (each, [1], {"two": 3})
    assert result == each.get_result(result.id)


def test_enqueue_with_invalid_argument():
    with pytest.raises(TypeError, match="Unsupported type"):
        site.noop_task.enqueue(datetime.now(UTC))
    with pytest.raises(TypeError, match="Unsupported type"):
        asyncio.run(site.noop_task.aenqueue(datetime.now(UTC)))
    assert default_task_backend.app.broker.queues() == []


def test_using_priority_is_refused_because_no_queue_service_has_any():
    assert site.noop_task.priority == 0
    with pytest.raises(InvalidTask, match="does not support setting priority"):
        site.noop_task.using(priority=1)
    with pytest.raises(InvalidTask):
        site.noop_task.using(priority=-101)
    assert site.noop_task.using(priority=0) == site.noop_task


def test_using_queue_name():
    assert site.noop_task.using(queue_name="queue_1").queue_name == "queue_1"
    assert site.noop_task.queue_name == "default"
    result = site.noop_task.using(queue_name="queue_1").enqueue()
    assert default_task_backend.app.broker.stats("queue_1").active == 1
    assert site.noop_task.get_result(result.id).task.queue_name == "queue_1"


def test_using_run_after():
    later = timezone.now() + timedelta(hours=1)
    with default_task_backend.app.inline() as inline:
        result = site.calculate_meaning_of_life.using(run_after=later).enqueue()
        result.refresh()
        assert result.status == TaskResultStatus.READY
        again = site.calculate_meaning_of_life.get_result(result.id)
        assert again == result
        assert again.task.run_after == later
        inline.advance(3590)
        result.refresh()
        assert result.status == TaskResultStatus.READY
        inline.advance(20)
        result.refresh()
        assert result.return_value == 42


def test_run_after_without_time_zones():
    with override_settings(USE_TZ=False, TIME_ZONE="Asia/Tokyo"):
        later = datetime.now() + timedelta(hours=1)
        with default_task_backend.app.inline() as inline:
            result = site.calculate_meaning_of_life.using(run_after=later).enqueue()
            assert timezone.is_naive(result.enqueued_at)
            inline.advance(4000)
            result.refresh()
            assert result.return_value == 42


def test_naive_datetime():
    with pytest.raises(InvalidTask, match="run_after must be an aware datetime"):
        site.noop_task.using(run_after=datetime.now())


def test_using_creates_new_instance():
    new = site.noop_task.using()
    assert new == site.noop_task
    assert new is not site.noop_task


def test_chained_using():
    now = timezone.now()
    first = site.noop_task.using(run_after=now)
    second = first.using(queue_name="queue_1")
    assert (second.run_after, second.queue_name) == (now, "queue_1")
    assert first.queue_name == "default"


def test_refresh_result():
    result = site.noop_task.enqueue()
    before = dataclasses.asdict(result)
    result.refresh()
    assert dataclasses.asdict(result) == before
    asyncio.run(result.arefresh())
    assert dataclasses.asdict(result) == before


def test_unknown_queue_name(settings_of):
    with pytest.raises(InvalidTask, match="Queue 'queue-2' is not valid for backend"):
        site.noop_task.using(queue_name="queue-2")
    with settings_of(queues=()):
        assert site.noop_task.using(queue_name="queue-2").queue_name == "queue-2"
        assert run(site.noop_task.using(queue_name="queue-2")).status == "SUCCESSFUL"


def test_call_task():
    assert site.calculate_meaning_of_life.call() == 42
    assert asyncio.run(site.calculate_meaning_of_life.acall()) == 42
    assert asyncio.run(site.noop_task_async.acall()) is None
    assert site.noop_task_async.call() is None


def test_get_result():
    result = default_task_backend.enqueue(site.noop_task, (1,), {"two": [3, None]})
    assert default_task_backend.get_result(result.id) == result
    assert site.noop_task.get_result(result.id) == result
    assert asyncio.run(site.noop_task.aget_result(result.id)) == result


@pytest.mark.parametrize("missing", ["123", 123, "", "x" * 65, None])
def test_get_missing_result(missing):
    with pytest.raises(TaskResultDoesNotExist):
        site.noop_task.get_result(missing)
    with pytest.raises(TaskResultDoesNotExist):
        asyncio.run(default_task_backend.aget_result(missing))


def test_get_incorrect_result():
    result = default_task_backend.enqueue(site.noop_task_async, (), {})
    with pytest.raises(TaskResultMismatch, match="Task does not match"):
        site.noop_task.get_result(result.id)
    with pytest.raises(TaskResultMismatch, match="Task does not match"):
        asyncio.run(site.noop_task.aget_result(result.id))


def test_invalid_function():
    def local():
        pass

    for function in (any, local, test_get_result.__get__(object())):
        with pytest.raises(InvalidTask, match="must be defined at a module level"):
            task()(function)


def test_module_path_is_the_task_s_name_on_the_queue():
    assert site.noop_task.module_path == "djangosite.tasks.noop_task"
    assert import_string(site.noop_task.module_path) is site.noop_task
    with default_task_backend.app.inline(run=False) as inline:
        site.noop_task.enqueue(1, a=[2])
        inline.assert_sent("djangosite.tasks.noop_task", 1, a=[2])


def test_takes_context_without_taking_context():
    with pytest.raises(InvalidTask, match="does not have a first argument of 'context'"):
        task(takes_context=True)(site.calculate_meaning_of_life.func)


# -- test_dummy_backend.py -----------------------------------------------------------------------


def test_enqueue_logs(caplog):
    with caplog.at_level("DEBUG", LOGGER):
        result = site.noop_task.enqueue()
    (record,) = [each for each in caplog.records if each.name == LOGGER]
    assert "enqueued" in record.getMessage()
    assert result.id in record.getMessage()


def test_the_signal_of_an_enqueue():
    seen = []

    def note(sender, task_result, **kwargs):
        seen.append((sender, task_result.id, task_result.enqueued_at is not None))

    task_enqueued.connect(note)
    try:
        ids = [site.noop_task.enqueue().id, asyncio.run(site.noop_task.aenqueue()).id]
    finally:
        task_enqueued.disconnect(note)
    assert seen == [(AztaskBackend, each, True) for each in ids]


def test_check():
    assert list(default_task_backend.check()) == []


def test_validate_on_enqueue(settings_of):
    elsewhere = site.noop_task.using(queue_name="queue_1")
    with settings_of(queues=["default"]):
        with pytest.raises(InvalidTask, match="Queue 'queue_1' is not valid for backend"):
            elsewhere.enqueue()
        with pytest.raises(InvalidTask, match="Queue 'queue_1' is not valid for backend"):
            asyncio.run(elsewhere.aenqueue())


def test_clear_has_its_counterpart_in_purging_the_results():
    result = site.noop_task.enqueue()
    assert default_task_backend.app.result(result.id).forget()
    with pytest.raises(TaskResultDoesNotExist, match=result.id):
        default_task_backend.get_result(result.id)


# -- test_immediate_backend.py -------------------------------------------------------------------


@BOTH
def test_a_task_runs(name):
    each = getattr(site, name)
    result = run(each, 1, two=3)
    assert result.status == TaskResultStatus.SUCCESSFUL
    assert_ran(result)
    assert result.return_value is None
    assert (result.task, result.args, result.kwargs) == (each, [1], {"two": 3})
    assert (result.attempts, result.worker_ids) == (1, ["inline"])


@pytest.mark.parametrize(
    ("name", "exception", "message"),
    [
        ("failing_task_value_error", ValueError, "This Task failed due to ValueError"),
        ("failing_task_system_exit", SystemExit, "This Task failed due to SystemExit"),
    ],
)
def test_catches_exception(name, exception, message, settings_of, caplog):
    each = getattr(site, name)
    with settings_of(retry=NO_RETRY), caplog.at_level("ERROR", LOGGER):
        result = run(each)
    (record,) = [each for each in caplog.records if each.name == LOGGER]
    assert message in caplog.text
    assert record.levelname == "ERROR"
    assert result.status == TaskResultStatus.FAILED
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value
    assert_ran(result)
    assert result.errors[0].exception_class is exception
    assert result.errors[0].traceback.endswith(f"{exception.__name__}: {message}\n")
    assert (result.task, result.args, result.kwargs) == (each, [], {})


def test_keyboard_interrupt_goes_through_inline():
    with pytest.raises(KeyboardInterrupt):
        run(site.failing_task_keyboard_interrupt)


def test_complex_exception(settings_of):
    with settings_of(retry=NO_RETRY):
        result = run(site.complex_exception)
    assert result.status == TaskResultStatus.FAILED
    assert_ran(result)
    assert result.errors[0].exception_class is ValueError
    assert 'ValueError(ValueError("This task failed"))' in result.errors[0].traceback


def test_complex_return_value():
    result = run(site.complex_return_value)
    assert result.status == TaskResultStatus.FAILED
    assert_ran(result)
    assert result.attempts == 1, "it would return the same again"
    assert result.errors[0].exception_class is TypeError
    assert "Unsupported type" in result.errors[0].traceback


def test_result():
    assert run(site.calculate_meaning_of_life).return_value == 42
    echoed = run(site.echo, (1, 2), a={"b": None}, c="é", d=2.5)
    assert echoed.return_value == [[[1, 2]], {"a": {"b": None}, "c": "é", "d": 2.5}]


def test_signals_and_logs_of_a_run(caplog):
    with caplog.at_level("DEBUG", LOGGER):
        result = run(site.noop_task)
    lines = [each.getMessage() for each in caplog.records if each.name == LOGGER]
    assert len(lines) == 3
    assert all(result.id in line for line in lines)
    assert not any("None" in line for line in lines)
    # Inline, the task runs inside of the send, so that "enqueued" comes last.
    for line, word in zip(lines, ("state=RUNNING", "state=SUCCESSFUL", "enqueued"), strict=True):
        assert word in line


def test_failed_logs(caplog, settings_of):
    with settings_of(retry=NO_RETRY), caplog.at_level("DEBUG", LOGGER):
        run(site.failing_task_value_error)
    lines = [each.getMessage() for each in caplog.records if each.name == LOGGER]
    assert [line.rpartition(" ")[2] for line in lines[:2]] == ["state=RUNNING", "state=FAILED"]


def test_takes_context():
    result = run(site.get_task_id)
    assert result.return_value == result.id


def test_context():
    assert run(site.check_context, 1).status == TaskResultStatus.SUCCESSFUL


@pytest.mark.parametrize("committed", [True, False])
def test_doesnt_wait_until_transaction_commit_by_default(committed, database):
    with transaction.atomic():
        result = site.noop_task.enqueue()
        assert result.enqueued_at is not None
        assert default_task_backend.get_result(result.id) == result
        transaction.set_rollback(not committed)
    assert default_task_backend.get_result(result.id) == result


# -- beyond Django's tests -----------------------------------------------------------------------


def test_a_task_that_is_retried_has_all_attempts():
    states = []

    def note(task_result, **kwargs):
        states.append((task_result.status, task_result.attempts, len(task_result.errors)))

    task_started.connect(note)
    task_finished.connect(note)
    try:
        result = run(site.fails_until, 3)
        other = run(site.fails_until_async, 2)
    finally:
        task_started.disconnect(note)
        task_finished.disconnect(note)
    assert result.return_value == ["inline"] * 3
    assert result.attempts == 3
    assert [each.exception_class for each in result.errors] == [site.SoldOut] * 2
    assert result.errors[1].traceback.endswith("SoldOut: attempt 2\n")
    assert result.started_at < result.finished_at
    assert other.return_value == 2
    running, successful = TaskResultStatus.RUNNING, TaskResultStatus.SUCCESSFUL
    assert states == [
        *((running, number, 0) for number in (1, 2, 3)),
        (successful, 3, 0),
        *((running, number, 0) for number in (1, 2)),
        (successful, 2, 0),
    ]


def test_a_cancelled_task_has_failed():
    result = site.noop_task.enqueue()
    default_task_backend.app.result(result.id).cancel()
    result.refresh()
    assert result.status == TaskResultStatus.FAILED
    assert result.errors[0].exception_class_path == "aztask.errors.TaskCancelled"
    assert result.errors[0].exception_class.__name__ == "TaskCancelled"


def test_a_receiver_that_fails_does_not_fail_the_task(caplog):
    def broken(**kwargs):
        raise RuntimeError("a receiver")

    task_started.connect(broken)
    task_finished.connect(broken)
    try:
        assert run(site.calculate_meaning_of_life).return_value == 42
        assert run(site.noop_task_async).status == TaskResultStatus.SUCCESSFUL
    finally:
        task_started.disconnect(broken)
        task_finished.disconnect(broken)
    assert "a receiver" in caplog.text


def test_long_arguments_are_sent_but_not_kept():
    with default_task_backend.app.inline():
        result = site.echo.enqueue("x" * 70_000)
        again = site.echo.get_result(result.id)
        assert len(again.return_value[0][0]) == 70_000
        assert (again.args, again.enqueued_at) == ([], result.enqueued_at)


def test_on_commit(settings_of, database):
    with settings_of(enqueue_on_commit=True):
        stats = default_task_backend.app.broker.stats
        with transaction.atomic():
            result = site.noop_task.enqueue(1)
            assert result.enqueued_at is None
            assert default_task_backend.app.broker.queues() == []
        assert result.enqueued_at is not None
        assert stats("default").active == 1
        assert site.noop_task.get_result(result.id) == result
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            dropped = site.noop_task.enqueue(2)
            1 / 0  # noqa: B018
        assert stats("default").active == 1
        with pytest.raises(TaskResultDoesNotExist):
            site.noop_task.get_result(dropped.id)
        asyncio.run(site.noop_task.aenqueue())
        assert stats("default").active == 2


def test_only_allowed_modules(settings_of):
    with settings_of(modules=["shop.tasks", "billing.*"]):
        with pytest.raises(InvalidTask, match=r"djangosite\.tasks\.noop_task .*option modules"):
            site.noop_task.enqueue()
        allows = default_task_backend.tasks.options.allows
        assert [allows(name) for name in ("billing", "billing.jobs.tax", "shop.tasks")] == [
            True
        ] * 3
        assert not any(allows(name) for name in ("billings", "shop", "shop.tasks.more", "os"))
    with settings_of(modules=["djangosite.*"]):
        assert run(site.noop_task).status == TaskResultStatus.SUCCESSFUL


def test_a_worker_imports_the_tasks_of_installed_apps_if_they_are_allowed(settings_of):
    default_task_backend.tasks.load()
    assert len(default_task_backend.app.tasks) > 15
    assert "djangosite.tasks.noop_task" in default_task_backend.app.tasks
    with settings_of(modules=["json"]):
        default_task_backend.tasks.load()
        assert default_task_backend.app.tasks == {}
    with (
        settings_of(modules=["djangosite.*", "no_such_module"]),
        pytest.raises(ModuleNotFoundError, match="no_such_module"),
    ):
        default_task_backend.tasks.load()


def test_no_message_imports_a_module():
    """A message that names a function which no imported module declares as a task."""
    app = default_task_backend.app
    with app.inline() as inline:
        for name in ("os.system", "djangosite.models.Note", "djangosite.tasks.SoldOut"):
            app.send(name, ["true"])
        inline.advance(900)
        assert [each.reason for each in inline.dead_letters()] == ["unknown-task"] * 3


def test_a_task_for_another_backend_is_known_to_both(settings_of):
    with settings_of("second", queues=["default"]):
        task_backends["second"].tasks.load()
        assert "djangosite.tasks.noop_task" in task_backends["second"].app.tasks
        result = run(site.calculate_meaning_of_life.using(backend="second"))
        assert (result.return_value, result.backend) == (42, "second")
        assert result.task.backend == "second"


def test_threads_share_one_app():
    apps = []

    async def ask():
        apps.append(task_backends["default"].app)

    for _ in range(3):
        asyncio.run(asyncio.to_thread(lambda: apps.append(task_backends["default"].app)))
    async_to_sync(ask)()
    assert len({id(app) for app in apps}) == 1


def test_without_results(tmp_path, settings_of):
    with settings_of(results=None):
        backend = task_backends["default"]
        assert not backend.supports_get_result
        result = site.noop_task.enqueue()
        with pytest.raises(NotImplementedError, match="retrieving or refreshing results"):
            backend.get_result(result.id)
        assert [each.id for each in backend.check()] == ["aztask.W001"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"brokr": "local://"}, "Did you mean 'broker'"),
        ({"modules": "shop.tasks"}, "takes a list of module names"),
        ({"modules": ["shop tasks"]}, "takes module names"),
        ({"tasks": ["x"]}, "tasks is a dict of options"),
        ({"tasks": {"a.b": {"time_limits": 5}}}, "Did you mean 'time_limit'"),
        ({"tasks": {"a.b": {"queue": "x"}}}, "queue is set by Django's @task"),
        ({"enqueue_on_commit": "yes"}, "enqueue_on_commit is True or False"),
    ],
)
def test_wrong_options(options, words, settings_of):
    with settings_of(**options), pytest.raises(ConfigurationError, match=words):
        _ = task_backends["default"]


def test_an_unknown_database(settings_of):
    with settings_of(enqueue_on_commit=True, database="other"):
        assert [each.id for each in task_backends["default"].check()] == ["aztask.E001"]


def test_a_damaged_note_shows_a_result_without_arguments():
    result = site.noop_task.enqueue(1)
    store = default_task_backend.app.results
    with store._database.transaction() as connection:
        connection.execute("UPDATE runs SET note = ?", (b"{\xff",))
    again = site.noop_task.get_result(result.id)
    assert (again.status, again.args, again.enqueued_at) == (TaskResultStatus.READY, [], None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "other"}, "TASKS has no backend 'other'; it has: default, dummy, my-own"),
        ({"backend": "dummy"}, "TASKS.'dummy'. is not an aztask backend"),
        ({"backend": "my-own"}, "the alias 'my-own' is not a Python name"),
        ({}, "DJANGO_SETTINGS_MODULE is not set"),
    ],
)
def test_a_worker_that_cannot_start_says_why(options, words, settings_of, monkeypatch):
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("it started"))
    with settings_of("my-own"):
        tasks = {**settings.TASKS, "dummy": {"BACKEND": f"{FRAMEWORK}.backends.dummy.DummyBackend"}}
        with override_settings(TASKS=tasks), pytest.raises(CommandError, match=words):
            call_command("aztask_worker", **options)


def test_the_worker_gets_the_options_that_were_given(monkeypatch):
    started = []
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "djangosite.settings")
    monkeypatch.setattr(os, "execve", lambda _, words, environment: started.append(words))
    call_command("aztask_worker", "-c", "3", "--burst", "-Q", "default,queue_1", "-Q", "b")
    (words,) = started
    assert words[1:] == [
        *("-m", "aztask", "-A", "aztask.django.worker:default", "worker"),
        *("--queues", "default,queue_1", "--queues", "b", "--concurrency", "3", "--burst"),
    ]
