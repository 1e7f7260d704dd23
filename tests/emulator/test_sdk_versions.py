"""Older releases of the Python SDK behave like the newest one.

The default run tries one release that reads the fields of a frame by their positions. All of those
that speak AMQP in pure Python are tried by ``tox -e sdk-versions``, which sets AZTASK_SDK_VERSIONS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from aztask.testing import emulator
from tests.emulator.sdkversions import SCENARIO, installed

VERSIONS = [v.strip() for v in os.environ.get("AZTASK_SDK_VERSIONS", "7.14.3").split(",")]
FIRST_WITHOUT_TLS = (7, 14)
"""Earlier releases have no emulator mode and connect only with TLS."""
QUEUES = (
    *("settling", "dead_letters", "scheduling", "sending_again", "receiving_and_deleting"),
    *("refusals", "async_messages"),
)
SESSION_QUEUES = ("sessions", "async_sessions")
SENT = ["complete", "abandon", "defer", "dead-letter", "xxxxxxxxxxxx"]
SEEN = {
    "settling": {
        "peeked": SENT,
        "received": SENT,
        "large": 300_000,
        "renewed": True,
        "redelivered": ["abandon", 1],
        "deferred": "defer",
        "left": 0,
    },
    "dead_letters": ["x", "bad", "very"],
    "scheduling": ["scheduled", "due"],
    "sending_again": ["again", 1, None],
    "receiving_and_deleting": ["0", "1", "2"],
    "sessions": ["two", True, "state", "one", "one"],
    "refusals": ["too large", "missing"],
    "async_messages": ["a", "b"],
    "async_sessions": "s",
}


@pytest.mark.parametrize("version", VERSIONS)
def test_an_application(version):
    old = tuple(map(int, version.split(".")[:2])) < FIRST_WITHOUT_TLS
    environment = {**os.environ, "PYTHONPATH": str(installed(version))}
    with emulator(queues=QUEUES, tls=old) as bus:
        for name in SESSION_QUEUES:
            bus.create_queue(name, sessions=True)
        settings = {"connection": bus.connection_string}
        if old:
            settings |= {"certificate": str(bus.certificate), "port": bus.port}
        done = subprocess.run(
            [sys.executable, str(SCENARIO), json.dumps(settings)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"version": version, **SEEN}
