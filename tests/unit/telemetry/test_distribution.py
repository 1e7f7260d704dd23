"""Our histogram beside that of the library: the same text for the same values."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from aztask.telemetry.prometheus.metrics import Distribution

BUCKETS = (0.0, 0.005, 1.0, 2.5, 3600.0)

numbers = st.floats(0.0, 1e6) | st.sampled_from(BUCKETS)
batches = st.lists(st.tuples(st.sampled_from("ab"), st.lists(numbers, max_size=5)), max_size=5)


def lines(registry):
    """The lines of the text, without the times at which series began."""
    text = generate_latest(registry).decode()
    return [line for line in text.splitlines() if "_created" not in line and "_sum" not in line]


@given(batches)
def test_it_shows_what_the_histogram_of_the_library_shows(batches):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    new = Distribution(ours, "wait_seconds", "Wait.", ["queue", "task"], BUCKETS)
    old = Histogram("wait_seconds", "Wait.", ["queue", "task"], buckets=BUCKETS, registry=theirs)
    total = 0.0
    for queue, values in batches:
        new.observe((queue, 'a"b'), values)
        for value in values:
            old.labels(queue, 'a"b').observe(value)
            total += value
    assert lines(ours) == lines(theirs)
    sums = [
        sample.value
        for family in ours.collect()
        for sample in family.samples
        if sample.name == "wait_seconds_sum"
    ]
    assert abs(sum(sums) - total) <= 1e-9 * max(1.0, total)


def test_its_name_is_taken_before_the_first_value():
    registry = CollectorRegistry()
    Distribution(registry, "wait_seconds", "Wait.", ["queue"], BUCKETS)
    try:
        Histogram("wait_seconds", "Wait.", registry=registry)
    except ValueError as error:
        assert "wait_seconds" in str(error)
    else:
        raise AssertionError("the name was free")
