"""Retry decisions: bounded, repeatable, and never surprised by a number."""

import dataclasses
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask import retry
from aztask.app import App
from aztask.errors import (
    ConfigurationError,
    DecodeError,
    Reject,
    Retry,
    Snooze,
    TimeLimitExceeded,
)
from aztask.message.message import TaskMessage
from aztask.retry import RETRY_STRATEGIES, RetryPolicy, check_strategy, describe
from aztask.settlement import DeadLetter, Resubmit
from aztask.support.durations import LONGEST_SECONDS

MESSAGE = TaskMessage(id="t1", task="shop.pay", queue="pay", body=b"")
PLAIN = RetryPolicy(jitter=False)


def after(failures=0, snoozes=0, **fields):
    return dataclasses.replace(
        MESSAGE, resubmit_count=failures, snooze_count=snoozes, hop=failures + snoozes, **fields
    )


def test_delays_grow_up_to_their_maximum():
    policy = RetryPolicy(max_retries=20, delay=2, backoff=3, max_delay=50, jitter=False)
    delays = [policy.decide(OSError("x"), after(n)).delay for n in range(5)]
    assert delays == [2, 6, 18, 50, 50]


def test_a_failure_is_resubmitted_until_its_retries_are_used_up():
    decisions = [PLAIN.decide(OSError("disk"), after(n)) for n in range(4)]
    assert decisions[:3] == [Resubmit(1.0), Resubmit(2.0), Resubmit(4.0)]
    assert decisions[3] == DeadLetter("retries-exhausted", "OSError: disk (failed 4 of 4 runs)")


def test_no_retries_means_one_run():
    assert isinstance(RetryPolicy(max_retries=0).decide(OSError(), MESSAGE), DeadLetter)


@given(st.text(min_size=1), st.integers(0, 10**6), st.integers(0, 10**6))
def test_jitter_repeats_exactly_and_stays_between_half_and_all(task_id, hop, generation):
    message = dataclasses.replace(MESSAGE, id=task_id, hop=hop, generation=generation)
    policy = RetryPolicy(delay=10)
    delay = policy.decide(OSError(), message).delay
    assert 5 <= delay <= 10
    assert policy.decide(ValueError(), message).delay == delay


def test_jitter_spreads_messages_and_hops():
    policy = RetryPolicy(delay=10)
    messages = [dataclasses.replace(MESSAGE, id=str(n)) for n in range(50)]
    messages += [dataclasses.replace(MESSAGE, hop=n) for n in range(50)]
    delays = {policy.decide(OSError(), message).delay for message in messages}
    assert len(delays) > 90
    assert max(delays) - min(delays) > 3


@given(st.integers(0, 2**31 - 1), st.floats(1, 1e6), st.floats(0, 1e6))
def test_no_count_overflows_a_delay(count, backoff, delay):
    policy = RetryPolicy(max_retries=2**31 - 1, delay=delay, backoff=backoff)
    message = dataclasses.replace(MESSAGE, resubmit_count=count)
    assert 0 <= policy.delay_of(message) <= 600


def test_only_the_listed_errors_are_retried():
    policy = RetryPolicy(retry_on=(OSError,), give_up_on=(FileNotFoundError,))
    assert isinstance(policy.decide(ConnectionError(), MESSAGE), Resubmit)
    assert policy.decide(KeyError("k"), MESSAGE) == DeadLetter("not-retryable", "KeyError: 'k'")
    gone = policy.decide(FileNotFoundError("gone"), MESSAGE)
    assert gone == DeadLetter("not-retryable", "FileNotFoundError: gone")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), TimeLimitExceeded()])
def test_what_is_not_the_tasks_own_failure_is_retried_whatever_is_listed(error):
    policy = RetryPolicy(retry_on=(OSError,), max_retries=1)
    assert isinstance(policy.decide(error, MESSAGE), Resubmit)
    assert policy.decide(error, after(1)).reason == "retries-exhausted"


def test_a_failure_known_by_name_is_retried_until_its_retries_are_used_up():
    policy = RetryPolicy(retry_on=(OSError,), max_retries=1, jitter=False)
    assert policy.decide_named("ProcessDied", "signal 11", MESSAGE) == Resubmit(1.0)
    assert policy.decide_named("ProcessDied", "signal 11", after(1)) == DeadLetter(
        "retries-exhausted", "ProcessDied: signal 11 (failed 2 of 2 runs)"
    )


def test_bytes_that_cannot_be_read_are_not_tried_again():
    assert PLAIN.decide(DecodeError("broken"), MESSAGE) == DeadLetter(
        "not-retryable", "DecodeError: broken"
    )


def test_a_task_that_asks_for_a_retry_gets_its_delay_and_is_counted():
    assert PLAIN.decide(Retry(delay=30), after(1)) == Resubmit(30.0, asked=True)
    assert PLAIN.decide(Retry(), after(1)) == Resubmit(2.0)
    assert RetryPolicy(retry_on=()).decide(Retry(), MESSAGE).counted is True
    assert PLAIN.decide(Retry(delay=30), after(3)).reason == "retries-exhausted"
    assert PLAIN.decide(Retry(delay=timedelta(minutes=1)), MESSAGE) == Resubmit(60.0, asked=True)


def test_a_task_that_rejects_its_message_gives_the_reason():
    decision = PLAIN.decide(Reject("no such order", "order 7 was deleted"), MESSAGE)
    assert decision == DeadLetter("no such order", "order 7 was deleted")


@pytest.mark.parametrize("reason", ["", None, 7, ValueError("x"), "a\n\ud800" * 1000])
def test_a_strange_reason_is_still_a_reason(reason):
    decision = PLAIN.decide(Reject(reason), MESSAGE)
    assert decision.reason.isprintable()
    assert 0 < len(decision.reason) <= 1024


def test_a_snooze_is_not_a_failure_and_has_its_own_limit():
    policy = RetryPolicy(max_retries=0, max_snoozes=2)
    assert policy.decide(Snooze(5), after(snoozes=1)) == Resubmit(5.0, counted=False, asked=True)
    assert policy.decide(Snooze(5), after(snoozes=2)) == DeadLetter(
        "snoozes-exhausted", "the task asked to run again 3 times"
    )


@pytest.mark.parametrize("delay", [float("nan"), float("inf"), -1, True, "soon", 1e300])
def test_a_delay_that_cannot_be_is_dead_lettered_not_guessed_at(delay):
    decision = PLAIN.decide(Retry(delay=delay), MESSAGE)
    assert decision.reason == "invalid-delay"
    assert decision.description.startswith("the task asked for a delay that cannot be: delay ")
    assert "\n" not in decision.description


def test_a_retry_past_the_expiry_is_dead_lettered_at_once():
    message = dataclasses.replace(MESSAGE, expires=1010.0)
    assert PLAIN.decide(Retry(delay=10), message, now=1000.0) == Resubmit(10.0, asked=True)
    assert PLAIN.decide(Retry(delay=11), message, now=1000.0).reason == "expired"
    assert PLAIN.decide(Retry(delay=11), message) == Resubmit(11.0, asked=True)


def test_a_hostile_error_text_stays_one_short_line():
    decision = PLAIN.decide(OSError("a\n\x1b[31m\ud800" + "b" * 5000), after(3))
    assert decision.description.isprintable()
    assert len(decision.description) <= 1024


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_an_error_without_a_text_is_still_decided():
    assert PLAIN.decide(Unprintable(), after(3)).description.startswith("Unprintable")


@pytest.mark.parametrize(
    "options",
    [
        {"max_retries": -1},
        {"max_retries": 1.5},
        {"max_retries": True},
        {"max_retries": None},
        {"max_snoozes": -1},
        {"delay": -1},
        {"delay": float("nan")},
        {"delay": True},
        {"max_delay": float("inf")},
        {"backoff": 0.5},
        {"backoff": float("nan")},
        {"backoff": float("inf")},
        {"backoff": True},
        {"backoff": "2"},
        {"jitter": 1},
        {"retry_on": ("OSError",)},
        {"retry_on": OSError("instance")},
        {"give_up_on": (int,)},
    ],
)
def test_numbers_and_classes_are_checked(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        RetryPolicy(**options)


def test_what_a_policy_does_where_nothing_was_said():
    expected = RetryPolicy(3, 1.0, 2.0, 600.0, True, (Exception,), (), 100)
    assert RetryPolicy() == expected
    assert dataclasses.astuple(RetryPolicy()) == (3, 1.0, 2.0, 600.0, True, (Exception,), (), 100)


@pytest.mark.parametrize("name", ["max_retries", "max_snoozes", "delay", "max_delay", "backoff"])
def test_the_wrong_number_is_named(name):
    with pytest.raises(ConfigurationError) as caught:
        RetryPolicy(**{name: -1})
    assert str(caught.value).startswith(name)


def test_the_numbers_at_the_edge_are_taken():
    policy = RetryPolicy(max_retries=0, backoff=1, delay=0, max_delay=0, max_snoozes=2**31 - 1)
    assert policy.decide(Snooze(1), after(snoozes=2**31 - 2)) == Resubmit(
        1.0, counted=False, asked=True
    )
    assert RetryPolicy(backoff=LONGEST_SECONDS).backoff == LONGEST_SECONDS


@pytest.mark.parametrize(("delay", "longest"), [(0.0, 0.0), (0.001, 600.0)])
def test_a_factor_that_overflows_gives_the_longest_delay_and_of_none_none(delay, longest):
    policy = RetryPolicy(max_retries=2**31 - 1, delay=delay, backoff=1e6, jitter=False)
    assert policy.delay_of(after(2**31 - 2)) == longest


def test_a_rejection_without_a_reason_has_one():
    assert PLAIN.decide(Reject(""), MESSAGE) == DeadLetter("rejected", "")
    assert PLAIN.decide(Reject("no", "never"), MESSAGE) == DeadLetter("no", "never")


@pytest.mark.parametrize(
    ("error_type", "error", "described"),
    [
        ("OSError", "disk", "OSError: disk"),
        ("OSError", "", "OSError"),
        ("E", "x" * 997, "E: " + "x" * 997),
        ("E", "x" * 998, "E: " + "x" * 994 + "..."),
    ],
)
def test_a_failure_is_described_on_one_line_of_1000_characters(error_type, error, described):
    assert describe(error_type, error) == described


@pytest.mark.parametrize("now", [None, 1000.0])
@pytest.mark.parametrize(
    ("expires", "again"), [(None, True), (1002.0, True), (1001.999, False), (0.0, False)]
)
def test_a_retry_is_due_until_the_expiry_and_not_after_it(now, expires, again):
    message = after(1, expires=expires)
    decided = PLAIN.decide(OSError(), message, now)
    assert isinstance(decided, Resubmit) is (again or now is None)
    asked = PLAIN.decide(Retry(delay=2), message, now)
    assert isinstance(asked, Resubmit) is (again or now is None)


def test_an_id_that_is_no_valid_text_has_its_jitter_too():
    message = dataclasses.replace(MESSAGE, id="\udcff")
    assert 5 <= RetryPolicy(delay=10).decide(OSError(), message).delay <= 10


def test_policies_are_values():
    assert RetryPolicy(delay=timedelta(seconds=2)) == RetryPolicy(delay=2.0)
    assert RetryPolicy(retry_on=OSError) == RetryPolicy(retry_on=[OSError])


def test_a_delay_that_the_task_asked_for_is_marked():
    assert PLAIN.decide(Retry(7.0), MESSAGE).asked
    assert PLAIN.decide(Snooze(7.0), MESSAGE).asked
    assert not PLAIN.decide(Retry(), MESSAGE).asked
    assert not PLAIN.decide(OSError("disk"), MESSAGE).asked


def test_an_unknown_strategy_is_refused_with_a_hint():
    assert [check_strategy(name) for name in RETRY_STRATEGIES] == list(RETRY_STRATEGIES)
    with pytest.raises(ConfigurationError, match="Did you mean 'lease-timeout'"):
        check_strategy("lease_timeout")
    with pytest.raises(ConfigurationError, match=r"^retry_strategy takes .* not 'None'"):
        check_strategy(None)


def test_the_apps_strategy_is_that_of_tasks_which_name_none():
    app = App("shop", broker="local://:memory:", retry_strategy="hold")
    assert app.task(len).retry_strategy == "hold"
    assert app.task(name="other", retry_strategy="abandon")(len).retry_strategy == "abandon"
    assert App("plain").task(len).retry_strategy == "resubmit"
    with pytest.raises(ConfigurationError, match="task 'x': retry_strategy takes"):
        app.task(name="x", retry_strategy="abandom")(len)
    with pytest.raises(ConfigurationError, match="Did you mean 'hold'"):
        App("wrong", retry_strategy="hole")


def test_reasons_are_what_operators_search_for():
    """They travel in dead letters and are quoted in the documentation: they do not change."""
    names = (
        *("RETRIES_EXHAUSTED", "SNOOZES_EXHAUSTED", "NOT_RETRYABLE", "INVALID_DELAY"),
        *("EXPIRED", "UNDECODABLE"),
    )
    assert [getattr(retry, name) for name in names] == [
        name.lower().replace("_", "-") for name in names
    ]


def test_a_timedelta_is_a_delay_everywhere():
    policy = RetryPolicy(
        delay=timedelta(minutes=1), max_delay=timedelta(hours=1), jitter=False, retry_on=OSError
    )
    assert (policy.delay, policy.max_delay, policy.retry_on) == (60.0, 3600.0, (OSError,))
    assert policy == RetryPolicy(delay=60, max_delay=3600, jitter=False, retry_on=[OSError])
    message = TaskMessage(id="a", task="t", queue="q", body=b"")
    for error in (Retry(delay=timedelta(minutes=2)), Snooze(timedelta(minutes=2))):
        settlement = policy.decide(error, message)
        assert isinstance(settlement, Resubmit)
        assert settlement.delay == 120.0


@pytest.mark.parametrize("delay", [timedelta(minutes=2), 120, "120", None])
def test_a_snooze_can_be_printed_whatever_its_delay(delay):
    assert "the task asked to run again in" in str(Snooze(delay))


@pytest.mark.parametrize(
    ("inner", "options", "decision"),
    [
        ([OSError("a"), ValueError("b")], {}, "Resubmit"),
        ([OSError("a"), ValueError("b")], {"give_up_on": ValueError}, "not-retryable"),
        ([OSError("a"), ConnectionError("b")], {"retry_on": OSError}, "Resubmit"),
        ([OSError("a"), ValueError("b")], {"retry_on": OSError}, "not-retryable"),
        ([OSError("a"), ValueError("b")], {"retry_on": ExceptionGroup}, "Resubmit"),
        ([OSError("a"), DecodeError("b")], {}, "not-retryable"),
        ([OSError("a"), Reject("no such customer")], {}, "no such customer"),
        ([ExceptionGroup("in", [Reject("deep")])], {}, "deep"),
        ([Retry(30.0), OSError("a")], {}, 30.0),
        ([Snooze(60.0), Snooze(70.0)], {}, 60.0),
        ([Snooze(60.0), OSError("a")], {}, 1.0),
    ],
)
def test_an_exception_group_is_judged_by_the_errors_in_it(inner, options, decision):
    """A TaskGroup wraps whatever is raised in it."""
    policy = RetryPolicy(jitter=False, **options)
    found = policy.decide(ExceptionGroup("unhandled errors in a TaskGroup", inner), MESSAGE)
    if isinstance(found, DeadLetter):
        assert found.reason == decision
    else:
        assert decision in ("Resubmit", found.delay)
        assert found.counted == any(not isinstance(each, Snooze) for each in inner)


def test_the_description_of_an_exception_group_has_its_inner_errors():
    error = ExceptionGroup("in a TaskGroup", [OSError("disk"), ExceptionGroup("x", [KeyError(1)])])
    found = RetryPolicy(max_retries=0).decide(error, MESSAGE)
    assert "ExceptionGroup: in a TaskGroup (2 sub-exceptions): OSError: disk; KeyError: 1" in (
        found.description
    )
