"""The real run is recorded that the other tests read."""

from realrun import QUICK

from aztask.stores.events.sink import read_events


def test_a_real_run_is_recorded(real_run):
    directory, number = real_run
    reader = read_events(directory)
    finished = {event.task_id for event in reader if event.event == "succeeded"}
    assert number >= QUICK
    assert len(finished) >= 0.9 * number  # a kill takes what was not written yet
