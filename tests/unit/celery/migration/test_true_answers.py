"""Each answer to a part of Celery is true: what it names exists here, and what it denies does not.

Rules
1. Every piece of code in an answer is resolved: commands and options against the command line,
   calls and attributes against the classes, words against the states, events and reasons.
2. An answer without code makes a claim. It is computed here (`CLAIMS`), or a test proves it
   (`PROVED`), or it is about Celery and other programs (`OTHERS`); there is no fourth kind.
3. "no, because" and "not needed" are wrong where aztask has an option of the same name.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import logging
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
import pytest

import aztask
import aztask.testing
from aztask import App, AsyncResult, Context, RetryPolicy, Signature, Task, WorkflowResult, errors
from aztask.address.shards import ShardLayout
from aztask.app.options import AppOptions, QueueOptionNames
from aztask.celery.migration.answers import NO, NOT_NEEDED, SECTIONS, rows, split_names
from aztask.celery.transport.options import TransportOptions
from aztask.config import SERIALIZERS
from aztask.message.codec import Codec
from aztask.operate.cli.main import cli
from aztask.queues.base import Capabilities
from aztask.retry import RETRIES_EXHAUSTED, UNDECODABLE
from aztask.schedules.schedules import ScheduleOptions
from aztask.stores.events.event import EVENT_KINDS
from aztask.stores.records.base import RunRecord, State
from aztask.task import BoundTask
from aztask.taskoptions import DELIVERIES, SendOptions, TaskOptions
from aztask.worker.logs import configure
from aztask.worker.pipeline.redelivery import UNKNOWN_TASK

ROOT = Path(__file__).parents[4]
EVERY = [(section, names, text) for section in SECTIONS for names, text in rows()[section].items()]


@pytest.fixture(scope="module")
def app() -> App:
    return App("shop", broker="local://:memory:", results="local://:memory:")


# -- what an answer names ------------------------------------------------------------------------

WORDS = {
    *EVENT_KINDS, *State, RETRIES_EXHAUSTED, UNDECODABLE, UNKNOWN_TASK,
    # Python's and Celery's own
    "datetime", "datetime.now(UTC)", "except", "json", "logging", "logging.config", "return", "try",
    "logging.getLogger(__name__)", "python -i -m MODULE", "uuid.uuid4()", "yield", "NO_COLOR=1",
    "beat_schedule", "eta", "polling_interval", "visibility_timeout", "requeue=True",
    # placeholders, addresses, extras, the words of a command before it
    "APP.FUNCTION", "django", "local://", "tables://ACCOUNT", "/healthz", "running", "workers",
    "asyncio", "threads", "solo", "normal",
}  # fmt: skip
SIGNED = set(inspect.signature(App).parameters) | set(AppOptions.__annotations__)
KEYWORDS: dict[str, set[str]] = {
    "App": SIGNED,
    "task": set(TaskOptions.__annotations__),
    "queue": set(QueueOptionNames.__annotations__),
    "limit": set(inspect.signature(App.limit).parameters),
    "schedule": set(ScheduleOptions.__annotations__),
    "handler": set(inspect.signature(App.handler).parameters) | set(TaskOptions.__annotations__),
    "with_options": set(SendOptions.__annotations__),
    "RetryPolicy": {field.name for field in dataclasses.fields(RetryPolicy)},
    "Retry": set(inspect.signature(aztask.Retry.__init__).parameters),
    "chain": set(inspect.signature(aztask.chain).parameters),
    "chord": set(inspect.signature(aztask.chord).parameters),
    "get": set(inspect.signature(AsyncResult.get).parameters),
}
EXAMPLES = {
    "task", "other", "alarm", "report", "result", "args", "kwargs", "f", "_", "NAME", "N", "ID",
}  # fmt: skip
"""Names of a reader's own code."""
CHOICES: dict[str, set[str]] = {
    "delivery": set(DELIVERIES),
    "serializer": set(SERIALIZERS),
    "accept": set(SERIALIZERS),
    "results": {"tables://ACCOUNT"},
}
"""The texts that an option takes."""
LOOSE = KEYWORDS["task"] | KEYWORDS["with_options"] | KEYWORDS["schedule"]
HANDLES = (Task, BoundTask, Signature, AsyncResult, WorkflowResult)


def child(command: click.Command, name: str) -> click.Command | None:
    """A command of a group, which are imported when they are needed."""
    assert isinstance(command, click.Group)
    return command.get_command(click.Context(command), name)


def command_of(*path: str) -> click.Command:
    command: click.Command = cli
    for name in path:
        found = child(command, name)
        assert found is not None
        command = found
    return command


def wrong(span: str, app: App) -> Iterator[str]:
    """What a piece of code names that does not exist."""
    if span in WORDS or span in vars(errors) or span in aztask.__all__:
        return
    if re.match(r"aztask( |$)|-", span):
        yield from wrong_command(span)
    elif span.startswith("AZTASK_"):
        if span not in (ROOT / "docs/reference/settings.md").read_text(encoding="utf-8"):
            yield span
    elif re.fullmatch(r"[a-z_]+=?", span):  # an option that is named alone
        known = {*SIGNED, *TaskOptions.__annotations__, *ScheduleOptions.__annotations__}
        known |= {field.name for field in dataclasses.fields(TransportOptions)}
        known |= KEYWORDS["with_options"] | set(dir(aztask.TaskMessage)) | KEYWORDS["RetryPolicy"]
        if span.rstrip("=") not in known:
            yield span
    else:
        yield from wrong_python(span, app)


def wrong_python(span: str, app: App) -> Iterator[str]:
    text = re.sub(r"=(?=[,)])", "=...", span.removeprefix("@").removeprefix("with ").rstrip(":"))
    text = re.sub(r"^raise ", "", re.sub(r"^\.", "_.", text))
    text = f"f({text})" if re.match(r"\w+=[^=]", text) else text
    made = {"app": app, "aztask": aztask, "context": Context.for_testing()}
    for node in ast.walk(ast.parse(text, mode="eval")):
        if isinstance(node, ast.Name):
            if node.id not in EXAMPLES and not exists(node.id):
                yield node.id
        elif isinstance(node, ast.Compare):
            yield from set(texts(node.comparators[0])) - set(State)
        elif isinstance(node, ast.Call):
            yield from wrong_call(node)
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner in made or owner.startswith(("app.", "aztask.", "context.")):
                try:
                    found = eval(ast.unparse(node), dict(made))  # names only: no call is in it
                except AttributeError:
                    yield ast.unparse(node)
                else:  # a module is nothing that a reader can use, but for those that are public
                    if inspect.ismodule(found) and found not in (errors, aztask.testing):
                        yield ast.unparse(node)
            elif not any(has(kind, node.attr) for kind in HANDLES):
                yield ast.unparse(node)


def wrong_call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func).rpartition(".")[2]
    for keyword in node.keywords:
        known = KEYWORDS.get(name, LOOSE)
        if keyword.arg and keyword.arg not in known:
            yield f"{name}({keyword.arg}=)"
        elif keyword.arg in CHOICES:
            yield from set(texts(keyword.value)) - CHOICES[keyword.arg]


def exists(name: str) -> bool:
    """Whether users can write a name: of the package, an error, or a method that is named alone."""
    return (
        name in aztask.__all__
        or name in vars(errors)
        or name in ("app", "aztask", "context", "raised")
        or any(hasattr(kind, name) for kind in (*HANDLES, App, Context))
    )


def texts(node: ast.AST) -> Iterator[str]:
    """The texts in a value: itself, or those of a list or the keys of a map."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def has(kind: type, name: str) -> bool:
    """Whether instances have an attribute: of the class, or set where it is made."""
    return hasattr(kind, name) or f"self.{name} = " in inspect.getsource(kind)


def choices(option: str) -> Sequence[str]:
    """What an option of the worker takes."""
    (found,) = (each for each in command_of("worker").params if option in each.opts)
    assert isinstance(found.type, click.Choice)
    return found.type.choices


def wrong_command(span: str) -> Iterator[str]:
    """Commands, options and values of a command line that `aztask` would refuse."""
    words = shlex.split(span)
    command: click.Command = cli
    if words[0] == "aztask":
        words = words[1:]
        if words[:1] == ["-A"]:
            words = words[2:]
    else:  # an option alone is one of the worker, or of the commands that the answer names
        command = command_of("worker")
        if words[0] in ("-A", "--json", "--log-level"):
            if words[0] == "--log-level":
                yield from set(words[1:2]) - set(choices("--log-level"))
            words = words[2:]
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        name = words.pop(0)
        found = child(command, name)
        if found is None:
            yield f"{span}: {name}"
            return
        command = found
    options = {
        each: param for param in command.params for each in [*param.opts, *param.secondary_opts]
    }
    for position, word in enumerate(words):
        following = words[position + 1 : position + 2]
        if word.startswith("-") and word not in options and word not in ("--version",):
            yield f"{span}: {word}"
        elif word in options and following:
            kind = options[word].type
            if isinstance(kind, click.Choice) and following[0] not in kind.choices:
                yield f"{span}: {following[0]}"
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    values = [word for word in words if not word.startswith("-")]
    if values and not arguments and not any(word.startswith("-") for word in words):
        yield f"{span}: takes no argument"


@pytest.mark.parametrize(("section", "names", "text"), EVERY, ids=lambda value: str(value)[:40])
def test_what_an_answer_names_exists(section: str, names: str, text: str, app: App) -> None:
    assert [each for span in re.findall(r"`([^`]+)`", text) for each in wrong(span, app)] == []


@pytest.mark.parametrize(
    "span",
    [
        "aztask.testing.worker", "aztask wroker", "aztask worker --autoscale 3", "--autoscale",
        "App(compression=...)", "@app.task(rate_limit=...)", "app.nothing", "context.nothing",
        "task.chunks(...)", ".traceback", "with_options(countdown=10)",
        "RetryPolicy(retries=, delay=)",
        "aztask worker --pool gevent", "aztask.errors.Nothing", "nothing", "AZTASK_NOTHING",
        "app.queue(NAME, priority=...)", "aztask tasks NAME", "BrokerAway", "raise Again(delay=3)",
        "no-such-reason", 'delivery="at-most-twice"', 'result.state == "done"',
        "with_option(eta=1)", 'App(serializer="pickle")', "--log-level loud",
        'App(results="table://ACCOUNT")',
    ],
)  # fmt: skip
def test_what_does_not_exist_is_noticed(span: str, app: App) -> None:
    assert list(wrong(span, app))


# -- what an answer denies -----------------------------------------------------------------------


def own_options(section: str) -> set[str]:
    """The options that aztask has where Celery has those of a section."""
    worker = {each for param in command_of("worker").params for each in param.opts}
    return {
        "settings": SIGNED | {f"worker_{o.strip('-').replace('-', '_')}" for o in worker},
        "task": set(TaskOptions.__annotations__),
        "send": set(SendOptions.__annotations__),
        "app": {name for name in dir(App) if not name.startswith("_")},
        "worker": worker,
        "result": {name for name in dir(AsyncResult) if not name.startswith("_")},
        "signature": {name for name in dir(Signature) if not name.startswith("_")},
        "names": {f"celery.{name}" for name in aztask.__all__},
    }.get(section, set())


DIFFERENT = {
    ("task", "priority"),  # a number in Celery, a name here, as the answer says
    ("send", "priority"),
    ("names", "celery.Task"),  # a class to derive from there, what a function becomes here
}


@pytest.mark.parametrize("section", SECTIONS)
def test_nothing_is_denied_that_aztask_has_under_the_same_name(section: str) -> None:
    denied = {
        (section, name)
        for names, text in rows()[section].items()
        for name in split_names(names)
        if text.startswith((NO, NOT_NEEDED))
    }
    assert {each for each in denied if each[1] in own_options(section)} <= DIFFERENT


# -- what an answer claims without code ----------------------------------------------------------

TESTED = {
    "delays are the broker's own": (
        "contract/test_contract_sending.py::test_a_delayed_message_comes_after_its_delay"
    ),
    "with dates, UUIDs and Decimals": "unit/message/test_codec.py::",
    "store for as long as it holds the lease": (
        "unit/worker/pipeline/test_pipeline.py::"
        "test_a_finished_run_is_not_given_back_while_the_store_is_unreachable"
    ),
    "shares one connection": (
        "contract/test_contract_leases.py::test_eight_threads_share_a_receiver"
    ),
    "loses its lease is told": (
        "unit/queues/lease/test_state.py::test_nothing_is_settled_under_a_lost_lease"
    ),
    "recorded outcome": (
        "unit/operate/cli/test_send.py::test_a_known_id_is_sent_once_unless_forced"
    ),
    "noticed at once": "integration/test_fork_server.py::",
    "fork server starts": (
        "integration/test_fork_server.py::test_a_killed_worker_leaves_no_process_and_no_file"
    ),
    "redelivered": "integration/test_kills.py::",
    "cancelled tasks are kept": (
        "unit/worker/pipeline/test_decisions.py::test_a_cancelled_task_is_completed_and_recorded_so"
    ),
    "checked when you send": (
        "unit/workflows/test_mailing.py::test_wrong_arguments_are_refused_before_anything_is_sent"
    ),
    "reads and writes protocol 2": (
        "unit/message/test_codec.py::test_headers_follow_protocol_2_and_leave_out_what_is_not_set"
    ),
    "process is killed": "unit/worker/pool/test_timelimits.py::",
    "no chord is polled": (
        "unit/workflows/test_compiler.py::test_a_chord_is_a_group_followed_by_a_task"
    ),
    "byte for byte": (
        "contract/test_contract_settling.py::test_a_clone_without_delay_comes_at_once"
    ),
    "reconnects": "integration/test_servicebus_faults.py::",
    "every worker sends what is due": "integration/test_schedules_long.py::",
    "limits are the task's own": (
        "unit/test_taskoptions.py::test_a_soft_time_limit_comes_before_the_hard_one"
    ),
    "the task's own options": (
        "unit/test_taskoptions.py::test_a_soft_time_limit_comes_before_the_hard_one"
    ),
    "log goes to stderr": "unit/operate/cli/test_failures.py::test_a_closed_stderr_is_no_error",
}
PROVED = {claim: f"tests/{test}" for claim, test in TESTED.items()}


def settings_with(word: str) -> list[str]:
    return [name for name in SIGNED if word in name]


def logs_go_to_the_root_logger() -> bool:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        configure("plain")
        return len(root.handlers) == 1 and root.handlers != before
    finally:
        root.handlers[:] = before
        root.setLevel(level)


CLAIMS: dict[str, Callable[[], object]] = {
    "no beat process": lambda: child(cli, "beat") is None,
    "time-outs follow from the lease": lambda: not settings_with("timeout"),
    "a task stays at one address": lambda: (
        "home" in ShardLayout.__dict__ and not settings_with("failover")
    ),
    "times and errors": lambda: (
        {"task", "queue", "worker", "started_at", "outcome"}
        <= {field.name for field in dataclasses.fields(RunRecord)}
    ),
    "results are never messages": lambda: "reply_to" not in SendOptions.__annotations__,
    "nothing is cached in the caller": lambda: not settings_with("cache"),
    "Azure Tables or a local file": lambda: settings_with("redis") == settings_with("s3") == [],
    "control goes through the result store": lambda: not settings_with("control"),
    "workers read control state from the result store": lambda: not settings_with("control"),
    "there are no exchanges": lambda: (
        not {"exchange", "routing_key"} & set(SendOptions.__annotations__)
    ),
    "errors are always stored": lambda: not settings_with("ignore"),
    "dead-lettered": lambda: child(command_of("dlq"), "replay"),
    "cannot be replaced": lambda: not [n for n in dir(App) if "bootstep" in n or "consumer" in n],
    "a function, not a class": lambda: not settings_with("task_cls") and not hasattr(App, "Task"),
    "a task belongs to the app": lambda: "shared" not in TaskOptions.__annotations__,
    "kept with the workflow": lambda: child(command_of("workflow"), "show"),
    "log lines hold no results": lambda: (
        not settings_with("repr") or settings_with("repr") == ["argsrepr"]
    ),
    "the same": lambda: (
        hasattr(Task, "delay")
        and all(map(AsyncResult.__dict__.get, ("get", "ready", "successful", "failed", "forget")))
    ),
    "change its own workflow": lambda: (
        not [n for n in dir(Context) if "replace" in n or "workflow" in n]
    ),
    "size is fixed when it starts": lambda: not hasattr(WorkflowResult, "add"),
    "events are aztask's own": lambda: not hasattr(Context, "send_event"),
    "one name in logs": lambda: "shadow" not in SendOptions.__annotations__,
    "arguments of the function": lambda: not hasattr(Context, "args"),
    "lives in the result store": lambda: not hasattr(Context, "chain"),
    "the worker's name is in each event": lambda: (
        "worker" in {f.name for f in dataclasses.fields(RunRecord)}
    ),
    "import the app": lambda: not hasattr(aztask, "current_app"),
    "a task cannot end its worker": lambda: not hasattr(errors, "WorkerShutdown"),
    "never change": lambda: vars(Signature)["__dataclass_params__"].frozen,
    "not changed after it was made": lambda: not hasattr(Signature, "replace"),
    "messages are not moved between brokers": lambda: child(command_of("queues"), "move") is None,
    "no AMQP shell": lambda: child(cli, "amqp") is None,
    "the app has its settings": lambda: "--config" not in own_options("worker"),
    "do not talk to each other": lambda: "--without-gossip" not in own_options("worker"),
    # said beside code
    "aztask compresses nothing": lambda: (
        not settings_with("compress")
        and not [name for name in dir(Codec) if "compress" in name and not name.startswith("_")]
    ),
    "on `local://` only": lambda: (
        not [n for n in Capabilities.__dataclass_fields__ if "create" in n]
    ),
    "the root logger's records": logs_go_to_the_root_logger,
    "7 days by default": lambda: App("x").settings.result_retention_seconds == 7 * 86400,
    "the default is msgpack": lambda: App("x").settings.serializer == "msgpack",
    "a task without one is `normal`": lambda: (
        "normal" in str(inspect.getdoc(TaskOptions)).split("`priority`")[1].split("* `")[0]
    ),
}
OTHERS = (
    "Celery's internals", "Celery's worker", "RabbitMQ's", "service manager",
    "connections to Azure use TLS", "SIGTERM to the worker", "an error of the worker itself",
)  # fmt: skip


def claims_of(text: str) -> list[str]:
    return [claim for claim in (*CLAIMS, *PROVED, *OTHERS) if claim in text]


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_is_true(claim: str) -> None:
    assert any(claim in text for _, _, text in EVERY), "no answer makes it: remove it here"
    assert CLAIMS[claim]()


@pytest.mark.parametrize("claim", PROVED)
def test_a_claim_has_a_test_that_exists(claim: str) -> None:
    assert any(claim in text for _, _, text in EVERY), "no answer makes it: remove it here"
    file, _, name = PROVED[claim].partition("::")
    assert f"def {name or 'test_'}" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(("section", "names", "text"), EVERY, ids=lambda value: str(value)[:40])
def test_an_answer_without_code_makes_a_claim_that_is_tested(
    section: str, names: str, text: str
) -> None:
    assert "`" in text or claims_of(text), "add it to CLAIMS or PROVED"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("task_create_missing_queues", "workers create missing queues"),
        ("worker_hijack_root_logger", "changes neither the root logger"),
        ("worker_autoscaler", "concurrency is fixed"),
        ("task_compression", "put large arguments into a blob"),
        ("task_default_priority", "no, because"),
        ("worker_max_memory_per_child", "does not measure memory"),
    ],
)
def test_an_answer_that_became_untrue_does_not_come_back(name: str, said: str) -> None:
    (text,) = [text for _, names, text in EVERY if name in split_names(names)]
    assert said not in text
