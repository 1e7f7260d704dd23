"""What workers saw goes into the document, and the lease follows from all of it."""

from aztask.leaseadvice.advice import Evidence, decide
from aztask.leaseadvice.document import LeaseDocument
from aztask.leaseadvice.learning import PIPELINE_STANDS, LeaseCounts, followed, learn
from aztask.queues.lease.bounds import Bounds

BOUNDS = Bounds(2.0, 600.0)


def told(document, seen, now=1000.0, configured=60.0):
    return learn(document, "q", seen, configured=configured, bounds=BOUNDS, now=now)


def settled(count, seconds):
    seen = LeaseCounts()
    for _ in range(count):
        seen.settled(seconds)
    return seen


def lost(count, lease, held=5.0):
    seen = LeaseCounts()
    for _ in range(count):
        seen.cut_off(held, lease)
    return seen


def test_until_something_changes_the_configured_lease_holds():
    document = told(LeaseDocument(), settled(5, 1.0))
    entry = document.entry("q")
    assert followed(entry) is None
    assert entry.advice.reason == "kept: 5 deliveries so far, 100 are needed"
    assert followed(told(document, settled(1, 1.0), configured=10.0).entry("q")) is None


def test_workers_counts_add_up_to_a_decision():
    document = told(LeaseDocument(), settled(60, 100.0))
    assert followed(document.entry("q")) is None
    lease = followed(told(document, settled(60, 100.0)).entry("q"))
    assert 150.0 <= lease <= 165.0


def test_refused_settlements_of_two_workers_raise_the_lease():
    late = LeaseCounts()
    late.refused(5.0, 4.0)
    late.refused(5.0, 4.0)
    document = told(LeaseDocument(), late, configured=4.0)
    assert followed(document.entry("q")) is None
    document = told(document, late, configured=4.0)
    assert followed(document.entry("q")) == 8.0
    assert "4 settlements came too late" in document.entry("q").advice.reason
    assert document.entry("q").observed.failed_ever == 4


def test_losses_under_the_former_lease_do_not_raise_it_again():
    document = told(LeaseDocument(), lost(3, 4.0), configured=4.0)
    assert followed(document.entry("q")) >= 8.0
    raised = followed(document.entry("q"))
    document = told(document, lost(20, 4.0), configured=4.0)
    assert followed(document.entry("q")) == raised
    assert document.entry("q").observed.lost_ever == 23
    assert followed(told(document, lost(20, raised), configured=4.0).entry("q")) >= 2 * raised


def test_the_pipelines_advice_stands_for_a_day_but_for_raises():
    advice = decide(Evidence(1000, 100.0, 100.0), 60.0, BOUNDS, source="pipeline", at=1000.0)
    document = LeaseDocument().with_advice("q", advice)
    short = settled(1000, 1.0)
    assert told(document, short, now=2000.0).entry("q").advice == advice
    assert followed(told(document, lost(9, 150.0), now=2000.0).entry("q")) == 300.0
    later = told(document, short, now=1001.0 + PIPELINE_STANDS).entry("q").advice
    assert (later.lease_seconds, later.source) == (2.0, "worker")


def test_what_could_not_be_told_is_told_later():
    seen, later = lost(2, 4.0), lost(1, 4.0)
    later.put_back(seen)
    assert (later.losses, later.cut.total()) == (3, 3)
    assert not LeaseCounts()
