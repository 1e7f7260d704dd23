"""Writers of contended rows wait, so that few of their writes are in vain; others never wait."""

from __future__ import annotations

import pytest
from still import Still

from aztask.errors import BrokerUnavailable
from aztask.stores.records.workflows import ROOT, Document
from aztask.support.chance import SystemChance, replaced
from aztask.support.clock import Clock
from aztask.workflows.documents import LONGEST, TRIES, Documents, Pace


def test_a_pace_rises_where_writers_meet_and_falls_where_they_do_not():
    time = Still()
    pace = Pace(time)
    assert (pace.contended, pace.wait()) == (False, 0.0)
    pace.passed()
    assert not pace.contended
    for _ in range(10):
        pace.met()
    assert pace.contended
    assert 0.0 <= max(pace.wait() for _ in range(50)) <= 2 * LONGEST
    for _ in range(30):
        pace.passed()
    assert (pace.contended, pace.wait()) == (False, 0.0)


def test_a_pace_is_forgotten():
    time = Still()
    pace = Pace(time)
    pace.met()
    assert pace.contended
    time.now += 4.0
    assert not pace.contended


class Edit:
    place = ("w", "row")
    exists = False

    def __init__(self, *, patient):
        self.patient = patient

    def apply(self, data):
        return (data or b"") + b"x"

    def pieces(self):
        return {}

    def first(self):
        return ()


class Busy:
    """A store in which another writer is first, a number of times."""

    def __init__(self, times):
        self.times, self.reads, self.version, self.data = times, 0, 1, b""

    def read(self, places):
        self.reads += 1
        row = Document(self.data, str(self.version))
        return [Document(b"", "1") if name == ROOT else row for _, name in places]

    def write(self, changes):
        (change,) = changes
        if self.times:
            self.times -= 1
            self.version += 1
            return [None]
        self.version, self.data = self.version + 1, change.data
        return [str(self.version)]


def changed(times, *, patient, again=0):
    slept = []
    store = Busy(times)
    clock = Clock(monotonic=Still().monotonic, sleep=slept.append)
    documents = Documents(store, remote=True, clock=clock)
    for _ in range(1 + again):
        documents.change([Edit(patient=patient)])
    return store, slept


def test_without_other_writers_nothing_waits_and_nothing_is_read_twice():
    store, slept = changed(0, patient=True, again=3)
    assert (store.reads, slept, store.data) == (1, [], b"xxxx")


def test_after_a_meeting_a_patient_edit_waits_and_reads_before_it_writes():
    store, slept = changed(1, patient=True, again=2)
    assert len(slept) == 3, "once between the tries, once before each later change"
    assert (store.reads, store.data) == (4, b"xxx")


def test_an_edit_that_others_wait_for_does_not_wait_for_its_turn():
    store, slept = changed(1, patient=False, again=2)
    assert len(slept) == 1
    assert store.reads == 2


def test_a_document_that_others_never_stop_changing_is_an_outage():
    with pytest.raises(BrokerUnavailable, match="other workers keep changing row of workflow w"):
        changed(TRIES, patient=True)


def test_a_writer_that_sees_others_keeps_its_pace():
    time = Still()
    pace = Pace(time)
    pace.meeting()
    assert pace.contended, "others are about, so it begins to wait"
    for _ in range(4):
        pace.met()
    before = pace._now()
    pace.meeting()
    assert pace._now() == before


def test_a_pace_has_its_figures():
    """20 ms at first, doubled up to half a second, and halved every two seconds."""
    time = Still()
    with replaced(Last()):
        pace = Pace(time)
        paces = []
        for _ in range(7):
            pace.met()
            paces.append(pace.wait() / 2)
        assert paces == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5])
        pace.passed()
        assert pace.wait() / 2 == pytest.approx(0.425)
        time.now += 2.0
        assert pace.wait() / 2 == pytest.approx(0.2125)
        pace.meeting()
        assert pace.wait() / 2 == pytest.approx(0.2125)
        time.now += 9.0
        assert (pace.wait(), pace.contended) == (0.0, False), "less than ten milliseconds is none"
        pace.meeting()
        assert pace.wait() / 2 == pytest.approx(0.02)


def test_a_wait_is_random_from_nothing_on():
    time = Still()
    pace = Pace(time)
    pace.met()
    with replaced(Last(first=True)):
        assert pace.wait() == 0.0


def test_a_clock_that_was_set_back_makes_no_longer_pace():
    time = Still()
    pace = Pace(time)
    pace.met()
    time.now -= 100.0
    with replaced(Last()):
        assert pace.wait() / 2 == pytest.approx(0.02)


class Last(SystemChance):
    """Chance that gives the last number of each range, or the first."""

    def __init__(self, *, first=False):
        self._first = first

    def uniform(self, first, last):
        return first if self._first else last


def test_writers_of_a_document_pause_for_twice_as_long_at_each_try():
    slept = []
    with replaced(Last()), pytest.raises(BrokerUnavailable):
        made = Documents(Busy(TRIES), remote=True, clock=Clock(sleep=slept.append))
        made.change([Edit(patient=False)])
    assert len(slept) == 40
    assert slept[:8] == pytest.approx([0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.25, 0.25])


def test_a_patient_writer_pauses_for_its_pace_if_that_is_longer():
    slept = []
    with replaced(Last()):
        clock = Clock(monotonic=Still().monotonic, sleep=slept.append)
        Documents(Busy(3), remote=True, clock=clock).change([Edit(patient=True)])
    assert slept == pytest.approx([0.04, 0.08, 0.16])


def test_in_a_local_store_nothing_pauses_and_nothing_is_remembered():
    slept, store = [], Busy(2)
    documents = Documents(store, remote=False, clock=Clock(sleep=slept.append))
    documents.change([Edit(patient=True)])
    documents.change([Edit(patient=True)])
    assert slept == []
    assert (store.reads, store.data) == (4, b"xx")
