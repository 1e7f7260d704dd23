"""The options of tasks and of sends: durations, times, and what a wrong one is answered with."""

from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction

import pytest

from aztask import App, ConfigurationError, Context, RetryPolicy
from aztask.errors import EncodeError
from aztask.taskoptions import delay_seconds, expiry

HOUR = timedelta(hours=1)


@pytest.fixture
def app():
    app = App("shop", broker="local://:memory:", results="local://:memory:")
    yield app
    app.close()


def add(a, b=0):
    return a + b


def sent(app):
    """The one message on the queue: (its envelope's delay is gone, so when it is due, message)."""
    (peeked,) = app.broker.peek("default", limit=10)
    return peeked, app.codec.from_envelope(peeked.envelope, "default")


@pytest.mark.parametrize("name", ["time_limit", "soft_time_limit", "lease", "max_lease", "expires"])
def test_a_timedelta_is_a_duration_of_a_task(app, name):
    task = app.task(**{name: timedelta(minutes=2)})(add)
    assert getattr(task, name) == 120.0


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"retry": 3}, "retry=RetryPolicy(max_retries=3)"),
        ({"retry": None}, "retry=RetryPolicy(max_retries=0)"),
        ({"retry": False}, "retry=RetryPolicy(max_retries=0)"),
        ({"retry": {"max_retries": 5}}, "retry=RetryPolicy(max_retries=3)"),
        ({"max_retries": 3}, "Write retry=RetryPolicy(max_retries=...)"),
        ({"retries": 3}, "Write retry=RetryPolicy(max_retries=...)"),
        ({"default_retry_delay": 3}, "Write retry=RetryPolicy(delay=...)"),
        ({"autoretry_for": (OSError,)}, "Write retry=RetryPolicy(retry_on=(...))"),
        ({"bind": True}, "Write @app.task_with_context"),
        ({"timeout": 3}, "Write time_limit="),
        ({"countdown": 3}, "with_options(delay=...)"),
        ({"queue": 7}, "task 'shop.add': queue takes a text, not 7"),
        ({"queue": ""}, "queue takes a text"),
        ({"time_limit": "1m"}, "time_limit takes seconds above 0 or a timedelta, not '1m'"),
        ({"time_limit": timedelta(0)}, "time_limit takes seconds above 0"),
        ({"lease": datetime.now(UTC)}, "lease takes seconds above 0 or a timedelta"),
    ],
)
def test_a_wrong_option_of_a_task_says_what_to_write(app, options, instead):
    with pytest.raises(ConfigurationError) as caught:
        app.task(**options)(add)
    assert instead in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"retry": 3}, "App 'shop': retry takes a RetryPolicy, not 3"),
        ({"max_retries": 3}, "Write retry=RetryPolicy(max_retries=...)"),
        ({"backend": "local://"}, "Write results="),
    ],
)
def test_a_wrong_option_of_an_app_says_what_to_write(options, instead):
    with pytest.raises(ConfigurationError) as caught:
        App("shop", **options)
    assert instead in str(caught.value)


@pytest.mark.parametrize("name", ["", 7, None])
def test_an_app_needs_a_name(name):
    with pytest.raises(ConfigurationError, match="App: the name takes a text"):
        App(name)


EASTERN = timezone(timedelta(hours=-5))


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"delay": "5s"}, "delay takes seconds of 0 or more, or a timedelta, not '5s'"),
        ({"delay": timedelta(seconds=-1)}, "delay takes seconds of 0 or more"),
        ({"delay": datetime.now(UTC)}, "write eta= for a time"),
        ({"eta": 60}, "eta takes a datetime with a time zone, such as datetime.now(UTC), not int"),
        ({"eta": datetime(2030, 1, 1)}, "which has no time zone; write datetime.now(UTC)"),
        ({"eta": datetime.now(UTC), "delay": 1}, "delay and eta both say"),
        ({"expires": datetime(2030, 1, 1)}, "expires is 2030-01-01T00:00:00, which has no"),
        ({"expires": 0}, "expires takes seconds above 0"),
        ({"queue": 7}, "queue takes a text"),
        ({"countdown": 3}, "Write delay="),
        ({"id": "a"}, "Write task_id="),
        ({"retry": RetryPolicy()}, "in @app.task(...)"),
        ({"time_limit": 3}, "Write time_limit= in @app.task(...)"),
    ],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_a_wrong_option_of_a_send_says_what_to_write(app, options, instead, by_name):
    task = app.task(add)
    with pytest.raises(ConfigurationError) as caught:
        if by_name:
            app.send("shop.add", [1], **options)
        else:
            task.with_options(**options)
    assert instead in str(caught.value)


def test_durations_and_times_of_a_send_reach_the_message(app):
    task = app.task(add)
    before = datetime.now(UTC)
    task.with_options(delay=HOUR, expires=2 * HOUR).delay(1)
    peeked, message = sent(app)
    after = datetime.now(UTC)
    assert before + 2 * HOUR <= datetime.fromtimestamp(message.expires, UTC) <= after + 2 * HOUR
    assert app.broker.stats("default").scheduled == 1
    assert (before + HOUR).timestamp() <= peeked.due <= (after + HOUR).timestamp() + 1


def test_a_send_at_a_time_in_any_time_zone(app):
    app.task(add)
    due = (datetime.now(UTC) + HOUR).astimezone(EASTERN)
    app.send("shop.add", [1], eta=due, expires=due + HOUR)
    peeked, message = sent(app)
    assert message.expires == pytest.approx((due + HOUR).timestamp(), abs=1e-5)
    assert peeked.due == pytest.approx(due.timestamp(), abs=5)


def test_a_time_that_has_passed_starts_at_once(app):
    app.task(add).with_options(eta=datetime(2020, 1, 1, tzinfo=UTC)).delay(1)
    assert app.broker.stats("default").active == 1


def test_the_seconds_of_checked_options():
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    now = noon.timestamp()
    assert delay_seconds({}, now) == 0.0
    assert delay_seconds({"eta": noon + HOUR}, now) == 3600.0
    assert delay_seconds({"eta": noon - HOUR}, now) == 0.0
    assert expiry({}, None, now) is None
    assert expiry({}, 60.0, now) == now + 60.0
    assert expiry({"expires": 30.0}, 60.0, now) == now + 30.0
    assert expiry({"expires": noon + HOUR}, 60.0, now) == now + 3600.0


def takes_a_context(context: Context, count: int) -> None: ...


def takes_a_context_by_name(context: "Context", count: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (takes_a_context, "write @app.task_with_context"),
        (takes_a_context_by_name, "write @app.task_with_context"),
        (lambda count: count, "is a lambda, which a worker cannot find by its name"),
        (Fraction, "is a class, which a worker cannot find by its name"),
        (Fraction(1, 2).limit_denominator, "is a bound method, which a worker cannot find"),
        ([].append, "is a bound method, which a worker cannot find"),
        (type, "Python does not know the parameters of <class 'type'>"),
    ],
)
def test_a_function_that_would_fail_in_each_run_is_refused(app, function, words):
    with pytest.raises(ConfigurationError, match=words):
        app.task(function)
    if "context" in words:
        app.task_with_context(function)


def test_a_soft_time_limit_comes_before_the_hard_one(app):
    for soft in (10, 11):
        with pytest.raises(ConfigurationError, match="must be shorter than time_limit"):
            app.task(name="x", soft_time_limit=soft, time_limit=10)(add)
    app.task(name="x", soft_time_limit=9, time_limit=10)(add)


def test_an_option_of_a_send_among_the_arguments_is_answered_with_a_hint(app):
    task = app.task(add)
    with pytest.raises(TypeError, match=r"'delay'; .* with_options\(delay=...\)"):
        task.delay(1, delay=5)
    with pytest.raises(TypeError, match=r"'wide'$"):
        task.delay(1, wide=5)


def test_an_argument_that_cannot_be_written_is_reported_with_its_task(app):
    task = app.task(name="shop.add")(add)
    with pytest.raises(EncodeError, match=r"^task shop\.add: .* type object"):
        task.delay(object())
