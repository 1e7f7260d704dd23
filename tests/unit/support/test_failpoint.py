"""Crash steps: what they are armed with, and when they signal."""

import os
import signal

import pytest

from aztask.errors import ConfigurationError
from aztask.support.failpoint import Failpoint


def test_it_signals_at_the_nth_time_alone(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((process, number)))
    failpoint = Failpoint("recorded:STOP:2")
    for _ in range(4):
        failpoint.reached("recorded", 1, 7)
    assert (failpoint.step, sent) == ("recorded", [(7, signal.SIGSTOP)])


@pytest.mark.parametrize("text", ["", "recorded", "recorded:NONE", "no-step:KILL", "sent:KILL:x"])
def test_a_wrong_step_is_refused(text):
    with pytest.raises(ConfigurationError, match="is not STEP:SIGNAL"):
        Failpoint(text)
