"""``aztask run``: one task here and now, with its own arguments or those of a message."""

import json
import time

import pytest

from aztask import App
from aztask.settlement import Complete, DeadLetter
from aztask.stores.records.base import Finish, Outcome, RunKey, Start, State

SHOP = """
import contextvars
from dataclasses import dataclass
from typing import Annotated
from aztask import App, Context, Reject, Retry, RetryPolicy, Secret
app = App("shop", broker="local://", results="local://")
OPEN = contextvars.ContextVar("open", default="closed")

@app.lifespan
async def opens():
    OPEN.set("open")
    yield

@app.task(queue="sums")
def add(a: int, b: int) -> int:
    if b == 0:
        raise ZeroDivisionError("no b")
    return a + b

@app.task
async def later(value):
    return [OPEN.get(), value]

@app.task_with_context
def who(context: Context, *values):
    return [context.task_id, context.queue, context.resubmit_count, context.saved, *values]

@app.task
def again():
    raise Retry(5)

@dataclass
class Order:
    number: int

@app.task
def bill(order: Order) -> Order:
    return Order(order.number + 1)

@app.task
def counts(end: int):
    for number in range(end):
        yield {"number": number}
    return "all"

@app.task
async def drips():
    for number in range(2):
        yield [OPEN.get(), number]

@app.task_with_context
def emits(context: Context):
    context.emit(1)
    return 2

@app.task
def leaks():
    yield object()

def breaks():
    raise ValueError("no luck")

@app.task_with_context
def steps(context: Context):
    context.sleep(3600)
    context.step("charge", breaks, retry=RetryPolicy(3, delay=60))

@app.task_with_context
async def drip_steps(context: Context):
    yield 1
    await context.step("charge", abreaks, retry=RetryPolicy(3, delay=60))

async def abreaks():
    raise ValueError("no luck")

@app.task_with_context
def swallows(context: Context):
    try:
        context.step("charge", breaks, retry=RetryPolicy(3, delay=60))
    except BaseException:
        return "done"

@app.task
def odd():
    return object()

@app.task
def charge(card: Annotated[str, Secret]) -> Annotated[str, Secret]:
    if card.startswith("no"):
        raise ValueError(f"the card {card} was refused")
    if card.startswith("reject"):
        raise Reject(card)
    return card
"""


@pytest.fixture
def shop(cli):
    cli.make_file()
    return cli.module("run_shop", SHOP)


def nothing_recorded(cli):
    return cli.app().results.recent() == []


def test_a_value_is_printed_and_nothing_is_recorded(cli, shop):
    ended = cli("run", "-A", shop, "shop.add", "--args", "[1]", "--kwargs", '{"b": 2}')
    assert (ended.code, ended.out, ended.err) == (0, "3\n", "")
    assert json.loads(cli("run", "-A", shop, "shop.later", "--args", "[7]").out) == ["open", 7]
    assert nothing_recorded(cli)


def test_arguments_and_value_are_of_the_annotated_types(cli, shop):
    ended = cli("run", "-A", shop, "shop.bill", "--args", '[{"number": 7}]')
    assert json.loads(ended.out) == {"number": 8}


def test_a_given_call_needs_no_queues(cli):
    alone = cli.module("run_alone", SHOP)
    assert cli("run", "-A", alone, "shop.add", "--args", "[1, 2]").out == "3\n"
    assert cli("run", "-A", alone, "--from", "x").code == 4


def test_an_error_has_its_traceback(cli, shop):
    ended = cli("run", "-A", shop, "shop.add", "--args", "[1, 0]")
    assert ended.code == 1
    assert "ZeroDivisionError: no b" in ended.err
    assert 'raise ZeroDivisionError("no b")' in ended.err
    assert "runhere.py" not in ended.err, "it begins in the code of the task"
    assert ended.err.splitlines()[-1].endswith("task shop.add failed")


def test_secret_arguments_and_values_are_masked(cli, shop):
    assert cli("run", "-A", shop, "shop.charge", "--args", '["4111-1111"]').out == "****\n"
    for card in ("no-4111-1111", "rejected-4111"):
        ended = cli("run", "-A", shop, "shop.charge", "--args", f'["{card}"]')
        assert ended.code == 1
        assert card not in ended.out + ended.err
        assert "****" in ended.err


def test_what_a_task_asks_of_a_worker_is_said(cli, shop):
    ended = cli("run", "-A", shop, "shop.again")
    assert (ended.code, "the task raised Retry" in ended.error) == (1, True)
    assert "what cannot be a result" in cli("run", "-A", shop, "shop.odd").error


@pytest.mark.parametrize(
    ("task", "args", "lines"),
    [
        ("counts", [2], [{"number": 0}, {"number": 1}, "all"]),
        ("drips", [], [["open", 0], ["open", 1], None]),
        ("emits", [], [1, 2]),
    ],
)
def test_what_a_task_emits_is_printed_before_its_value(cli, shop, task, args, lines):
    ended = cli("run", "-A", shop, f"shop.{task}", "--args", json.dumps(args))
    assert [json.loads(line) for line in ended.out.splitlines()] == lines
    assert (ended.code, ended.err) == (0, "")


def test_a_part_that_no_worker_would_take_is_an_error_of_the_task(cli, shop):
    ended = cli("run", "-A", shop, "shop.leaks")
    assert (ended.code, "EncodeError" in ended.err) == (1, True)


@pytest.mark.parametrize(("task", "out"), [("steps", ""), ("drip_steps", "1\n")])
def test_a_task_that_would_go_on_later_ends_with_one_line(cli, shop, task, out):
    ended = cli("run", "-A", shop, f"shop.{task}")
    assert (ended.code, ended.out) == (1, out)
    assert len(ended.err.splitlines()) == 1
    assert f"task shop.{task} has stopped, to go on later: step charge is retried" in ended.error
    assert "ValueError: no luck" in ended.error


def test_a_task_that_swallows_the_end_of_its_run_fails_as_in_a_worker(cli, shop):
    ended = cli("run", "-A", shop, "shop.swallows")
    assert (ended.code, ended.out) == (1, "")
    assert "StepError: the task caught the end of its run" in ended.err


def test_wrong_input_is_one_line(cli, shop):
    assert cli("run", "-A", shop).code == 2
    assert cli("run", "-A", shop, "shop.add", "--from", "x").code == 2
    assert cli("run", "-A", shop, "--from", "x", "--args", "[1]").code == 2
    assert cli("run", "-A", shop, "shop.add", "--args", "[1]").code == 2
    assert "Did you mean" in cli("run", "-A", shop, "shop.ad").error
    assert cli("run", "shop.add").code == 2
    assert cli("run", "-A", shop, "--from", "unknown").code == 5


def test_a_dead_letter_runs_and_stays(cli, shop):
    app = cli.app()
    app.send("shop.who", ["a"], task_id="dead", queue="sums")
    receiver = app.broker.receiver("sums", lease=60.0)
    (delivery,) = receiver.receive(1, 0.0)
    receiver.settle([(delivery, DeadLetter("broken", "it was"))])
    ended = cli("run", "-A", shop, "--from", "dead")
    assert json.loads(ended.out) == ["dead", "sums", 0, None, "a"]
    assert "from the dead letters of queue sums" in ended.err
    assert app.broker.stats("sums").dead == 1
    assert app.result("dead").state == "pending"


def test_a_message_that_waits_runs_and_stays(cli, shop):
    app = cli.app()
    app.send("shop.add", [1, 2], task_id="waits", queue="sums")
    assert cli("run", "-A", shop, "--from", "waits").out == "3\n"
    assert app.broker.stats("sums").active == 1
    assert app.result("waits").state == "pending"


def test_a_task_of_a_workflow_gets_the_value_before_it(cli, shop):
    app = App("shop", broker=cli.address, results=cli.address)
    add = app.task(name="shop.add", queue="sums")(lambda a, b: a + b)
    (add.s(1, 2) | add.s(10)).delay(workflow_id="w")
    ended = cli("run", "-A", shop, "--from", "w.2")
    assert (ended.code, "takes the value of the task before it" in ended.error) == (5, True)
    key, at = RunKey("w.1"), time.time()
    app.results.start([Start(key, "shop.add", "sums", 1, "o#1", "w", at)])
    value = app.codec.encode_value(3)
    app.results.record([Finish(key, "o#1", Outcome(State.SUCCEEDED, Complete(), value, at=at))])
    assert cli("run", "-A", shop, "--from", "w.2").out == "13\n"
    assert app.result("w.2").state == "pending"
    app.close()


def test_a_task_whose_message_is_gone_says_what_to_write(cli, shop):
    app = cli.app()
    key, at = RunKey("ended"), time.time()
    app.results.start([Start(key, "shop.add", "sums", 1, "o#1", "w", at)])
    app.results.record([Finish(key, "o#1", Outcome(State.FAILED, Complete(), at=at))])
    ended = cli("run", "-A", shop, "--from", "ended")
    assert ended.code == 5
    assert "aztask run shop.add --args" in ended.error
