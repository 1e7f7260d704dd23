"""The tasks of Django's own tests (`tests/tasks/tasks.py`), then those that need a worker."""

import asyncio
import threading
import time

from django.db import connections

from djangosite.models import Note

try:
    from django.tasks import TaskContext, task
except ImportError:
    from django_tasks import TaskContext, task


@task()
def noop_task(*args, **kwargs):
    return None


@task
def noop_task_from_bare_decorator(*args, **kwargs):
    return None


@task()
async def noop_task_async(*args, **kwargs):
    return None


@task()
def calculate_meaning_of_life():
    return 42


@task()
def failing_task_value_error():
    raise ValueError("This Task failed due to ValueError")


@task()
def failing_task_system_exit():
    raise SystemExit("This Task failed due to SystemExit")


@task()
def failing_task_keyboard_interrupt():
    raise KeyboardInterrupt("This Task failed due to KeyboardInterrupt")


@task()
def complex_exception():
    raise ValueError(ValueError("This task failed"))


@task()
def complex_return_value():
    # Return something which isn't JSON serializable nor picklable.
    return lambda: True


@task(takes_context=True)
def get_task_id(context):
    return context.task_result.id


@task(takes_context=True)
def check_context(context, attempt):
    assert isinstance(context, TaskContext)
    assert context.attempt == attempt


class SoldOut(Exception):
    """An error of the project's own."""


@task(takes_context=True)
def fails_until(context, attempt):
    if context.attempt < attempt:
        raise SoldOut(f"attempt {context.attempt}")
    return context.task_result.worker_ids


@task(takes_context=True)
async def fails_until_async(context, attempt):
    await asyncio.sleep(0)
    if context.attempt < attempt:
        raise SoldOut(f"attempt {context.attempt}")
    return context.attempt


@task
def echo(*args, **kwargs):
    return [args, kwargs]


@task
def limited():
    time.sleep(60)


@task
def write_note(text):
    """Write a row, and return the texts of all rows."""
    Note.objects.create(text=text)
    return sorted(Note.objects.values_list("text", flat=True))


@task
async def write_note_async(text):
    await Note.objects.acreate(text=text)
    return [note.text async for note in Note.objects.order_by("text")]


@task
async def nap(seconds):
    """Sleep, and return how many threads the process has in the meantime."""
    await asyncio.sleep(seconds)
    return threading.active_count()


@task
def leave_connection_open():
    connections["default"].ensure_connection()
    return connections["default"].connection is not None


@task
def left_open():
    """Whether the connection of an earlier task is still open in this thread."""
    return connections["default"].connection is not None
