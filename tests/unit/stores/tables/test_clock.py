"""The table service's time, from the Date of its answers."""

from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.stores.tables.store import FRESH_SECONDS, ServiceClock

TRUE = 1_800_000_000.0


class Service:
    """A service, and this machine's clock of the deadlines, which began somewhere else."""

    def __init__(self, now=TRUE):
        self.now = now
        self.asked = 0
        self.latency = 0.0

    def monotonic(self):
        return self.now - TRUE + 5000.0

    def date(self, call, partition, row):
        self.asked += 1
        date = formatdate(int(self.now), usegmt=True)
        self.now += self.latency
        return date


def clock_of(service):
    return ServiceClock(service, service)


def test_the_clock_of_this_machine_does_not_matter():
    """Only the service's answers and the time since them count."""
    service = Service(TRUE + 0.75)
    clock = clock_of(service)
    assert clock.now() == TRUE
    service.now += 3600.0
    assert clock.now() == pytest.approx(TRUE + 3600.75)
    assert service.asked == 2


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 3.0)), min_size=1, max_size=40))
def test_it_is_never_ahead_and_at_most_a_second_and_a_request_late(steps):
    service = Service()
    clock = clock_of(service)
    for pause, latency in steps:
        service.now += pause
        service.latency = latency
        clock.learn()
        assert service.now - 1.0 - latency - 1e-3 <= clock.now() <= service.now + 1e-3


def test_answers_narrow_it_down():
    service = Service(TRUE + 0.9)
    clock = clock_of(service)
    assert service.now - clock.now() == pytest.approx(0.9)
    for _ in range(20):
        service.now += 0.37
        clock.learn()
    assert service.now - clock.now() < 0.1


def test_a_fresh_answer_costs_no_request():
    service = Service()
    clock = clock_of(service)
    for _ in range(100):
        service.now += FRESH_SECONDS / 110
        clock.now()
    assert service.asked == 1
    service.now += FRESH_SECONDS
    clock.now()
    assert service.asked == 2


def test_an_answer_without_a_date_is_an_error():
    service = Service()
    service.date = lambda *asked: None
    clock = clock_of(service)
    with pytest.raises(LookupError, match="no Date header"):
        clock.now()
