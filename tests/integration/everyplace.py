"""A site on each broker: on one file, on two, on Azurite, and on the emulator of Service Bus with
duplicate detection and without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from azurite import Azurite
from bus import bus_site
from harness import Site, site_in
from storage import storage_site
from test_servicebus_worker import DETECTING, PLAIN

from aztask.testing import RunningEmulator

PLACES = ("one file", "two files", "storage", "detection", "no detection")
"""The parameters of a fixture that calls `site_at`."""


@contextmanager
def site_at(request: pytest.FixtureRequest, folder: Path) -> Iterator[Site]:
    """The site that the parameter of a fixture names; workers are killed at the end."""
    if request.param == "storage":
        azurite: Azurite = request.getfixturevalue("azurite")
        with storage_site(folder, azurite) as made:
            yield made
    elif request.param in ("detection", "no detection"):
        bus: RunningEmulator = request.getfixturevalue("bus")
        with bus_site(folder, bus, DETECTING if request.param == "detection" else PLAIN) as made:
            yield made
    else:
        with site_in(folder, joint=request.param == "one file") as made:
            yield made
