import json
import logging

import pytest

from aztask.config import Secret
from aztask.context import Context, TaskLease, set_current_context
from aztask.message.message import TaskMessage
from aztask.settlement import Abandon, DeadLetter, Resubmit
from aztask.support.clock import SYSTEM_CLOCK
from aztask.worker.logs import configure, configured, next_step

logger = logging.getLogger("shop")


@pytest.fixture
def clean():
    """The root logger as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def task():
    """A task that runs."""
    lease = TaskLease(SYSTEM_CLOCK.monotonic() + 60, ask=lambda seconds: None)
    message = TaskMessage("id-1", "shop.add", "default", b"")
    set_current_context(Context(message, delivery_count=1, lease=lease, save=lambda state: None))
    yield
    set_current_context(None)


def write(capsys, log_format, *args, **options):
    configure(log_format)
    logger.warning(*args, **options)
    return capsys.readouterr().err


def test_plain(clean, capsys):
    line = write(capsys, "plain", "hello %s", "there")
    assert line.endswith(" WARNING shop: hello there\n")


def test_plain_in_a_task(clean, capsys, task):
    assert write(capsys, "plain", "hello").endswith(" WARNING shop: [id-1] hello\n")


def test_json(clean, capsys):
    record = json.loads(write(capsys, "json", "hello\n%s", "there"))
    assert record.pop("ts").endswith("+00:00")
    assert record == {"level": "WARNING", "logger": "shop", "message": "hello\nthere"}


def test_json_in_a_task(clean, capsys, task):
    record = json.loads(write(capsys, "json", "hello"))
    assert (record["task_id"], record["task"]) == ("id-1", "shop.add")


@pytest.mark.parametrize("log_format", ["plain", "json"])
def test_secrets_are_masked_in_messages_and_tracebacks(clean, capsys, log_format):
    Secret("a-very-secret-key")
    try:
        raise ValueError("a-very-secret-key")
    except ValueError as error:
        text = write(capsys, log_format, "it is a-very-secret-key", exc_info=error)
    assert "ValueError" in text
    assert "a-very-secret-key" not in text
    assert text.count("\n") == 1 or log_format == "plain"


def test_what_tells_of_every_request_is_silent(clean, capsys):
    configure("plain")
    logging.getLogger("azure.core.pipeline").info("GET ...")
    logging.getLogger("aztask").info("seen")
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("log_format", ["plain", "json"])
def test_a_pool_process_can_take_the_settings_over(clean, log_format):
    configure(log_format, logging.DEBUG)
    assert configured() == (log_format, logging.DEBUG)


@pytest.mark.parametrize(
    ("decision", "fields", "options", "words"),
    [
        (Resubmit(4.0), {"resubmit_count": 1}, {}, "retry 2 of 3 in 4.0 s"),
        (Resubmit(0.25), {}, {}, "retry 1 of 3 in 0.250 s"),
        (Resubmit(600.0), {}, {"strategy": "hold"}, "retry 1 of 3 in 600 s"),
        (Resubmit(4.0), {}, {"strategy": "abandon"}, "retry 1 of 3 at once"),
        (Resubmit(4.0, asked=True), {}, {"strategy": "abandon"}, "retry 1 of 3 in 4.0 s"),
        (
            Resubmit(4.0),
            {},
            {"strategy": "lease-timeout"},
            "retry 1 of 3 when its lease ends",
        ),
        (Resubmit(4.0, counted=False), {}, {}, "runs again in 4.0 s"),
        (Resubmit(4.0), {"expires": 1003.0}, {}, "dead-lettered: expired"),
        (Resubmit(4.0), {"expires": 1005.0}, {}, "retry 1 of 3 in 4.0 s"),
        (DeadLetter("not-retryable", "text"), {}, {}, "dead-lettered: not-retryable"),
        (
            Resubmit(4.0),
            {},
            {"settled": True},
            "not retried, because its delivery is at-most-once",
        ),
        (Abandon(), {}, {}, "not retried"),
    ],
)
def test_what_follows_a_failure(decision, fields, options, words):
    message = TaskMessage("id-1", "shop.add", "default", b"", **fields)
    given = {"max_retries": 3, "strategy": "resubmit", "now": 1000.0, **options}
    assert next_step(decision, message, **given) == words


def test_plain_lines_hold_no_control_characters(clean, capsys):
    out = write(capsys, "plain", "a\x1b[2J\r\u202eb\n2026 INFO forged")
    first, second = out.splitlines()
    assert first.endswith("a\\x1b[2J\\r\\u202eb")
    assert second == "    2026 INFO forged"
    try:
        raise ValueError("\x1b[31mred")
    except ValueError:
        assert "ValueError: \\x1b[31mred" in write(capsys, "plain", "x", exc_info=True)
