"""Rate, pauses and patience, on a fake clock."""

import pytest

from aztask.spark.submission.send import FIRST_PAUSE, MAX_PAUSE, Backoff, SendingPace


class Time:
    def __init__(self):
        self.now = 100.0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        assert seconds >= 0
        self.now += seconds


@pytest.fixture
def time():
    return Time()


def pace(time, rate):
    return SendingPace(rate, clock=time.clock, sleep=time.sleep)


@pytest.mark.parametrize("rate", [0.5, 3.0, 400.0, 1e6])
def test_never_faster_than_the_rate(time, rate):
    made, sent, began = pace(time, rate), 0, time.now
    for most in (1, 7, 500, 500, 3, 500):
        count = made.batch(most)
        made.pay(count)
        sent += count
        assert sent <= rate * (time.now - began) * (1 + 1e-6)
    assert sent == pytest.approx(rate * (time.now - began), rel=1e-6)


def test_time_that_was_not_used_is_not_saved_up(time):
    made = pace(time, 10.0)
    made.pay(5)
    time.now += 1000
    idle = time.now
    made.pay(20)
    assert time.now - idle == pytest.approx(2.0)


def test_without_a_rate_nothing_waits(time):
    made = pace(time, None)
    assert made.batch(500) == 500
    made.pay(10**9)
    assert time.now == 100.0


def test_slow_rates_send_few_at_once(time):
    assert pace(time, 0.1).batch(500) == 1
    assert pace(time, 100.0).batch(500) == 50
    assert pace(time, 1e6).batch(500) == 500


def patience(time, seconds, chance=0.5):
    return Backoff(seconds, clock=time.clock, sleep=time.sleep, chance=lambda: chance)


def test_pauses_double_up_to_a_limit(time):
    made, pauses = patience(time, 1e6), []
    for _ in range(12):
        before = time.now
        assert made.wait(None)
        pauses.append(time.now - before)
    assert pauses[0] == pytest.approx(FIRST_PAUSE)
    assert pauses[1] == pytest.approx(2 * FIRST_PAUSE)
    assert pauses[-1] == pytest.approx(MAX_PAUSE)
    made.succeeded()
    before = time.now
    assert made.wait(None)
    assert time.now - before == pytest.approx(FIRST_PAUSE)


def test_the_service_is_given_what_it_asks_for(time):
    made = patience(time, 60.0)
    assert made.wait(10.0)
    assert time.now == pytest.approx(110.0)


@pytest.mark.parametrize("chance", [0.0, 0.999])
def test_patience_ends_after_its_time_without_success(time, chance):
    made = patience(time, 20.0, chance)
    while made.wait(None):
        assert time.now <= 120.0
    assert time.now > 120.0 - 1.5 * MAX_PAUSE


def test_what_is_asked_for_beyond_patience_is_not_waited_for(time):
    assert not patience(time, 5.0).wait(10.0)
    assert time.now == 100.0
