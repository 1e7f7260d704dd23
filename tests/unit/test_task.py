"""Tasks: calling, sending, and the options of both."""

import asyncio
import re
from datetime import datetime
from pathlib import Path

import pytest

from aztask import (
    App,
    ConfigurationError,
    ContextTask,
    EncodeError,
    LeaseLost,
    RetryPolicy,
    chain,
    current_context,
)
from aztask.testing import task_context


@pytest.fixture
def app():
    app = App("shop", broker="local://:memory:", results="local://:memory:")
    yield app
    app.close()


def messages(app, queue="default"):
    peeked = app.broker.peek(queue, limit=100)
    return [app.codec.from_envelope(each.envelope, queue) for each in peeked]


def test_calling_a_task_calls_the_function(app):
    @app.task
    def add(a, b):
        return a + b

    @app.task_with_context
    def told(context, a):
        return context, a

    assert add(1, 2) == 3
    assert add.call("unused", (1, 2), {}) == 3
    assert told.call("context", (1,), {}) == ("context", 1)
    assert (add.name, told.name) == ("shop.add", "shop.told")


def test_delay_map_and_options_send_messages(app):
    @app.task(queue="bulk")
    def add(a, b=0):
        return a + b

    add.delay(1, b=2)
    asyncio.run(add.adelay(3))
    add.map([(4, 5), (6,)])
    add.with_options(queue="other", task_id="mine").delay(7)
    sent = messages(app, "bulk")
    assert [app.codec.decode_arguments(each)[0] for each in sent] == [(1,), (3,), (4, 5), (6,)]
    (other,) = messages(app, "other")
    assert other.id == "mine"


def test_arguments_that_do_not_fit_are_refused_before_the_send(app):
    @app.task
    def add(a, b):
        return a + b

    with pytest.raises(TypeError, match="missing a required argument: 'b'"):
        add.delay(1)
    with pytest.raises(TypeError):
        add.map([(1, 2, 3)])
    with pytest.raises(TypeError, match=r"map takes tuples of arguments, not 'ab'"):
        add.map(["ab"])
    app.broker.declare("default")
    assert messages(app) == []
    with pytest.raises(TypeError) as refused:
        add.map(["x" * 200_000])
    assert len(str(refused.value)) < 200, "a line that can be read"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quue": "a"}, "Did you mean 'queue'"),
        ({"time_limit": 0}, "time_limit takes seconds above 0"),
        ({"lease": 60, "max_lease": 30}, "must be longer than lease"),
        ({"retry_strategy": "never"}, "retry_strategy takes 'resubmit'"),
        ({"delivery": "exactly-once"}, "delivery takes 'at-least-once'"),
        ({"ordered": 1}, "ordered is True or False"),
    ],
)
def test_a_wrong_option_of_a_task_is_named(app, options, message):
    with pytest.raises(ConfigurationError, match=message):
        app.task(**options)(len)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dealy": 1}, "Did you mean 'delay'"),
        ({"delay": -1}, "delay takes seconds of 0 or more"),
        ({"task_id": 7}, "task_id takes a text"),
        ({"session": 7}, "session takes a text"),
    ],
)
def test_a_wrong_option_of_a_send_is_named(app, options, message):
    with pytest.raises(ConfigurationError, match=message):
        app.task(len).with_options(**options)


def test_one_task_id_is_for_one_invocation(app):
    with pytest.raises(ConfigurationError, match="task_id names one invocation"):
        app.task(len).with_options(task_id="a").map([("b",)])


def test_the_apps_retry_policy_is_the_default():
    policy = RetryPolicy(max_retries=9)
    app = App("shop", broker="local://:memory:", retry=policy, retry_strategy="hold")
    task = app.task(len)
    assert (task.retry, task.retry_strategy, task.strategy_asked) == (policy, "hold", None)
    assert app.task(name="own", retry_strategy="defer")(len).strategy_asked == "defer"


def test_a_task_with_a_context_is_called_without_one(app):
    @app.task_with_context(queue="pages")
    def crawl(context, url, *, depth=0):
        context.lease.ensure()
        context.lease.extend(60)
        context.checkpoint({"url": url})
        return context, depth

    context, depth = crawl("http://localhost", depth=2)
    assert isinstance(crawl, ContextTask)
    assert depth == 2
    assert (context.task, context.queue) == ("shop.crawl", "pages")
    assert (context.resubmit_count, context.delivery_count) == (0, 1)
    assert context.saved == {"url": "http://localhost"}
    assert not context.lease.lost
    assert context.session is None
    other, _ = crawl("http://localhost")
    assert other.task_id != context.task_id
    assert current_context() is None


def test_a_task_with_a_context_is_called_with_one(app):
    @app.task_with_context
    def crawl(context, url):
        return context.task_id, url

    with task_context(task_id="mine") as context:
        pass
    assert crawl(context, "a") == ("mine", "a")
    assert crawl(context, url="a") == ("mine", "a")


def test_called_by_a_running_task_it_gets_that_tasks_context_and_lease(app):
    @app.task_with_context
    def charge(context, amount):
        context.lease.ensure()
        return context

    with task_context() as running:
        assert charge(3) is running
        running.lease.lose("another worker has it")
        with pytest.raises(LeaseLost, match="another worker has it"):
            charge(3)


def test_an_async_task_with_a_context_is_called_without_one(app):
    @app.task_with_context
    async def crawl(context, url):
        await asyncio.sleep(0)
        return context.task, url

    assert asyncio.run(crawl("a")) == ("shop.crawl", "a")


def test_arguments_that_do_not_fit_a_call_are_named_as_in_the_signature(app):
    @app.task_with_context
    def crawl(context, url):
        return url

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'url'"):
        crawl()


@pytest.mark.parametrize("serializer", ["msgpack", "json"])
@pytest.mark.parametrize(
    ("value", "instead"),
    [
        ({1, 2}, "a list, such as sorted(value)"),
        ([{"tags": frozenset("ab")}], "a list, such as sorted(value)"),
        (Path("/a"), "str(path)"),
        (datetime(2030, 1, 1), None),
    ],
)
def test_an_argument_that_cannot_be_sent_says_what_to_write(serializer, value, instead):
    app = App("shop", broker="local://:memory:", serializer=serializer)

    @app.task
    def tag(value, more=None):
        return value

    if instead is None:
        tag.delay(value)  # datetimes have an encoding in both
        return
    for send in (lambda: tag.delay(value), lambda: tag.delay(1, more=value)):
        with pytest.raises(EncodeError) as caught:
            send()
        assert instead in str(caught.value)
        assert "\n" not in str(caught.value)
    app.close()


@pytest.mark.parametrize("name", ["apply_async", "kiq", "send", "enqueue"])
def test_what_other_frameworks_call_it_gets_advice(app, name):
    task = app.task(name="shop.add")(lambda: None)
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; write \.delay\("):
        getattr(task, name)
    assert not hasattr(task, "dealy")


@pytest.mark.parametrize(
    ("read", "advice"),
    [
        (lambda app, task: task.with_options(delay=1).apply_async, "'BoundTask' .*; write .delay("),
        (lambda app, task: chain(task.s()).apply_async, "'Chain' .*; write .delay()"),
        (lambda app, task: task.s().kiq, "'Signature' .*; write .delay()"),
        (lambda app, task: app.result("1").status, "'AsyncResult' .*; write .state"),
        (lambda app, task: app.send_task, "'App' .*; write .send(name"),
    ],
)
def test_so_do_workflows_results_and_apps(app, read, advice):
    task = app.task(name="shop.add")(lambda: None)
    with pytest.raises(AttributeError, match=re.escape(advice).replace(r"\.\*", ".*")):
        read(app, task)
