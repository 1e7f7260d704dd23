"""Starting and stopping an emulator."""

from __future__ import annotations

import asyncio
import json
import time

from aztask.emulator.broker.entities import Entity
from aztask.emulator.config import Options
from aztask.emulator.emulator import Emulator


def run(options):
    async def scenario():
        emulator = Emulator(options)
        await emulator.start()
        found = (
            [each.path for each in emulator.namespace.all()],
            emulator.connection_string(),
            emulator.admin_connection_string(),
            (emulator.port, emulator.admin_port, emulator.certificate),
        )
        await emulator.stop()
        return found

    return asyncio.run(scenario())


def test_entities_of_the_options_and_of_the_file_are_created(tmp_path):
    config = tmp_path / "config.json"
    namespace = {"Queues": [{"Name": "configured"}]}
    config.write_text(json.dumps({"UserConfig": {"Namespaces": [namespace]}}))
    data = str(tmp_path / "bus.db")
    options = Options(port=0, admin_port=0, queues=("q",), config=config, data=data)
    for _ in range(2):  # the second start finds them
        assert run(options)[0] == ["configured", "q"]


def test_an_existing_queue_keeps_its_settings(tmp_path):
    data = str(tmp_path / "bus.db")
    emulator = Emulator(Options(data=data))
    emulator.namespace.create(Entity("q", max_deliveries=3))
    emulator.database.close()
    run(Options(port=0, admin_port=0, data=data, queues=("q",)))
    emulator = Emulator(Options(data=data))
    assert emulator.namespace.get("q").max_deliveries == 3
    emulator.database.close()


def test_connection_strings_name_the_bound_ports():
    _, messaging, admin, (port, admin_port, certificate) = run(Options(port=0, admin_port=0))
    assert f"Endpoint=sb://127.0.0.1:{port};" in messaging
    assert f"Endpoint=sb://127.0.0.1:{admin_port};" in admin
    assert messaging.endswith(";UseDevelopmentEmulator=true")
    assert certificate is None


def test_without_an_administration_port():
    _, messaging, admin, (_, admin_port, _) = run(Options(port=0, admin_port=None))
    assert (admin, admin_port) == (messaging, None)


def test_the_clock_runs_ahead_by_the_offset():
    emulator = Emulator(Options(clock_offset=3600))
    assert 3590 < emulator.clock.wall() - time.time() < 3610
    emulator.database.close()


def test_a_temporary_certificate_is_removed_at_the_stop():
    _, messaging, _, (*_, certificate) = run(Options(port=0, admin_port=0, tls=True))
    assert certificate is not None
    assert not certificate.exists()
    assert "UseDevelopmentEmulator" not in messaging
