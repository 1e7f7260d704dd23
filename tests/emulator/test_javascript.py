"""A second SDK, which shares no code with the Python one: ``@azure/service-bus`` on Node."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from programs import need_node, npm_ci

from aztask.emulator.broker.entities import Entity, EntityKind
from aztask.testing import emulator

FOLDER = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def node():
    """The node program, with the packages of package.json installed beside it."""
    node = need_node()
    npm_ci(FOLDER)
    return node


def test_queues_sessions_and_subscriptions(node, bus, queue):
    plain, with_sessions = queue(), queue(sessions=True)
    namespace = bus._emulator.namespace
    namespace.create(Entity("js-topic", EntityKind.TOPIC))
    namespace.create(Entity("js-topic/Subscriptions/one", EntityKind.SUBSCRIPTION))
    done = subprocess.run(
        [node, "scenario.js", bus.connection_string, plain, with_sessions, "js-topic"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {
        "queueOperations": ["x", "y"],
        "subscribing": 20,
        "sessions": 2,
        "subscriptions": 2,
    }


def test_administration(node):
    """Every method of its client. It reads the types of rules by the length of their prefix."""
    with emulator(tls=True, tier="premium") as bus:
        done = subprocess.run(
            [node, "administration.js", bus.admin_connection_string],
            cwd=FOLDER,
            env={**os.environ, "NODE_EXTRA_CA_CERTS": str(bus.certificate)},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["namespace"] == ["aztask-emulator", "Premium"]
    assert found["deliveries"] == 4
    assert found["queue"] == {
        "lockDuration": "PT45S",
        "maxDeliveryCount": 2**31 - 1,
        "autoDeleteOnIdle": "PT10M",
        "defaultMessageTimeToLive": "P1D",
    }
    rules = found["rules"]
    assert rules["correlated"]["filter"]["applicationProperties"] == {
        "number": 5,
        "text": "x",
        "flag": True,
        "moment": "1970-01-01T00:00:00.000Z",
    }
    assert rules["sql"]["filter"]["sqlParameters"] == {"@p": 7}
    assert rules["sql"]["action"]["sqlExpression"] == "SET a = @q"
    assert rules["sql"]["action"]["sqlParameters"] == {"@q": 2}


def test_websockets(node):
    """It encrypts WebSockets in emulator mode, too."""
    with emulator(queues=["q"], tls=True) as bus:
        done = subprocess.run(
            [node, "websocket.js", f"{bus.connection_string};UseDevelopmentEmulator=true"],
            cwd=FOLDER,
            env={**os.environ, "NODE_EXTRA_CA_CERTS": str(bus.certificate)},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == 200_000
