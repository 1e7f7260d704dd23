"""The result store's values: which states and outcomes are an end."""

import pytest

from aztask.results.base import Outcome, State
from aztask.settlement import Abandon, Complete, DeadLetter, Hold, Lapse, Resubmit

FINAL = {State.SUCCEEDED, State.FAILED, State.CANCELLED, State.EXPIRED}


@pytest.mark.parametrize("state", State)
def test_four_states_are_an_end(state):
    if state is not State.UNREADABLE:
        assert state.final is (state in FINAL)


@pytest.mark.parametrize(
    ("settlement", "again"),
    [
        (Complete(), False),
        (DeadLetter("rejected"), False),
        (Resubmit(1.0), False),
        (Abandon(), True),
        (Hold(1.0), True),
        (Lapse(), True),
    ],
)
def test_the_same_message_comes_again_unless_it_is_gone_or_cloned(settlement, again):
    assert Outcome(State.RETRYING, settlement).again is again
