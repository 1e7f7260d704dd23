"""Sessions whose workers are killed at random: nothing is lost, and no message passes another."""

from __future__ import annotations

import os
import random
from pathlib import Path

from harness import Site, wait_until
from hostilemessages import MALFORMED, send_raw, taken_as_it_is, task_payload
from killing import KILL, kill_while_they_last
from neighbour import neighbour_of
from session_app import step
from test_session_tasks import LEASE, on_service_bus, send

from aztask.stores.records.base import State
from aztask.testing import emulator

SESSIONS = 8
STEPS = 12
SEED = int(os.environ.get("CHAOS_SEED", "20260719"))
ARGUMENTS = ("-Q", "orders", "-c", "4")


def test_random_kills_keep_every_session_in_order(tmp_path: Path) -> None:
    """In the middle of each session there is a message that cannot be read."""
    dice = random.Random(SEED)
    with (
        emulator() as bus,
        taken_as_it_is(),
        on_service_bus(tmp_path / "site", bus) as site,
        neighbour_of(site),
    ):
        app = site.app()
        app.queue("orders", sessions=True, lease=LEASE)
        names = [f"s{number}" for number in range(SESSIONS)]
        ids = [f"{name}/{number}" for number in range(STEPS) for name in names]
        for each in ids:
            name, number = each.split("/")
            seconds = dice.choice([0.0, 0.05, 0.2])
            if int(number) == STEPS // 2:
                spoil = MALFORMED[dice.choice(sorted(MALFORMED))]
                bad = task_payload(app.codec, step.name, [], f"bad-{name}", name)
                send_raw(bus.port, "orders", [spoil(bad)], session=name)
            send(app, step.name, name, int(number), seconds, task_id=each)
        kill_while_they_last(site, dice, ids, ARGUMENTS, least=5, kinds=[KILL])
        for each in ids:
            records = [record.state for record in app.results.history(each)]
            assert records == [State.SUCCEEDED], f"{each}, seed {SEED}"
        for name in names:
            assert passed(site, name) == [], f"session {name}, seed {SEED}"
        wait_until(lambda: not app.broker.peek("orders"), 30, "all is settled")
        letters = app.broker.peek("orders", dead_letter=True)
        assert [each.dead_letter_reason for each in letters] == ["undecodable"] * SESSIONS
        site.stop_workers()


def passed(site: Site, session: str) -> list[str]:
    """Messages that started before the one before them had ended, or after the one after them."""
    found, done = [], -1
    for line in site.lines():
        name, number = line.key.split("/")
        if name == session and line.event == "start" and int(number) not in (done, done + 1):
            found.append(f"{number} after {done}")
        if name == session and line.event == "end":
            done = int(number)
    return found
