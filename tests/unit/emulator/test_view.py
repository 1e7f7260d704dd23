"""The state of an emulator, as data and as text."""

from __future__ import annotations

import asyncio

from aztask.emulator.config import Options
from aztask.emulator.emulator import Emulator
from aztask.emulator.view import view_of
from aztask.queues.engine import NewMessage


def test_the_view_counts_and_fits_its_terminal():
    async def run():
        emulator = Emulator(Options(port=0, admin_port=0, queues=("one", "two", "three")))
        await emulator.start()
        emulator.broker.engine.send("two", [NewMessage(b"x")] * 3)
        view = view_of(emulator.broker, emulator.server.endpoints)
        await emulator.stop()
        return view

    view = asyncio.run(run())
    assert [entity.name for entity in view.entities] == ["one", "three", "two"]
    assert view.entities[2].active == 3
    assert view.record()["connections"] == 0
    assert any("two" in line and "3" in line for line in view.lines(20))
    assert "2 more" in "\n".join(view.lines(5))
