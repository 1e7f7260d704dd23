"""Writers of contended rows wait, so that few of their writes are in vain; others never wait."""

from __future__ import annotations

import pytest
from still import Still

from aztask.errors import BrokerUnavailable
from aztask.results.workflows import ROOT, Document
from aztask.workflows.documents import TRIES, Documents
from aztask.workflows.pace import LONGEST, Pace


def test_a_pace_rises_where_writers_meet_and_falls_where_they_do_not():
    time = Still()
    pace = Pace(time.monotonic)
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
    pace = Pace(time.monotonic)
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
    documents = Documents(store, remote=True, sleep=slept.append, pace=Pace(Still().monotonic))
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
