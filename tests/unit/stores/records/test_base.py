"""The result store's values: which states and outcomes are an end."""

import pytest

from aztask.settlement import Abandon, Complete, DeadLetter, Hold, Lapse, Resubmit
from aztask.stores.records.base import Outcome, State

FINAL = {State.SUCCEEDED, State.FAILED, State.CANCELLED, State.EXPIRED}


@pytest.mark.parametrize("state", State)
def test_four_states_are_an_end(state):
    if state is not State.UNREADABLE:
        assert state.final is (state in FINAL)


@pytest.mark.parametrize(
    ("state", "settlement", "again"),
    [
        (State.SUCCEEDED, Complete(), False),
        (State.FAILED, DeadLetter("rejected"), False),
        (State.RETRYING, Resubmit(1.0), False),
        (State.RETRYING, Abandon(), True),
        (State.SNOOZED, Hold(1.0), True),
        (State.RETRYING, Lapse(), True),
    ],
)
def test_the_same_message_comes_again_unless_the_run_ended_or_was_cloned(state, settlement, again):
    assert Outcome(state, settlement).again is again
