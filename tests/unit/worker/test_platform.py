"""Which systems run a worker, and what the others are told."""

import os
import platform

import pytest

from aztask.errors import ConfigurationError
from aztask.worker.platform import NEEDED, require_linux


def test_linux_runs_a_worker():
    require_linux("aztask worker")


@pytest.mark.parametrize("number", range(len(NEEDED)))
@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_a_system_that_lacks_one_call_is_told_in_one_line(monkeypatch, number, system):
    module, name = NEEDED[number]
    monkeypatch.delattr(module, name)
    monkeypatch.setattr(platform, "system", lambda: system)
    with pytest.raises(ConfigurationError) as caught:
        require_linux("aztask worker")
    text = str(caught.value)
    assert text.startswith("aztask worker needs Linux: run it in Docker or in WSL. ")
    assert "\n" not in text


def test_a_python_on_linux_that_lacks_a_call_is_named(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigurationError, match=r"needs os\.memfd_create, which this build of Py"):
        require_linux("aztask worker")
