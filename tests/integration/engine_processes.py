"""What the durability tests run in processes of their own: ``engine_processes.py ROLE FILE LOG``.

Everything acknowledged by the engine goes to LOG with one `write`, which outlives the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from aztask.queues.engine import Database, Engine, NewMessage

QUEUE = "q"
BATCH = 3


def write(engine: Engine, log: Callable[[str], None]) -> None:
    """Send for ever, one message and a batch in turn, and log each when it is accepted."""
    number = 0
    while True:
        number += 1
        name = f"{os.getpid()}-{number}"
        count = BATCH if number % 2 else 1
        engine.send(QUEUE, [NewMessage(f"{name}/{count}".encode())] * count)
        log(name)


def move(engine: Engine, log: Callable[[str], None]) -> None:
    """Replace, release, abandon and defer messages for ever: none may appear or disappear."""
    log("started")
    while True:
        for leased in engine.receive(QUEUE, 4, 0.05):
            lease = (leased.seq, leased.token)
            match leased.seq % 4:
                case 0:
                    engine.replace(QUEUE, [(*lease, NewMessage(leased.payload))])
                case 1:
                    engine.release(QUEUE, [lease])
                case 2:
                    engine.dead_letter(QUEUE, [lease], "moved")
                case 3:
                    engine.abandon(QUEUE, [lease], 0.001)
        for dead in engine.receive(QUEUE, 4, 0.05, dead_letter=True):
            clone = (dead.seq, dead.token, NewMessage(dead.payload))
            engine.replace(QUEUE, [clone], dead_letter=True)


def consume(engine: Engine, log: Callable[[str], None]) -> None:
    """Complete what there is, one by one, until the queue is empty."""
    while leased := engine.receive(QUEUE, 1, 30.0):
        ((seq, token, payload, *_),) = leased
        if engine.complete(QUEUE, [(seq, token)]) == [True]:
            log(payload.decode())


def main(role: str, path: str, log_path: str) -> None:
    log_file = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    roles = {"write": write, "move": move, "consume": consume}
    roles[role](Engine(Database(path)), lambda line: os.write(log_file, f"{line}\n".encode()))


if __name__ == "__main__":
    main(*sys.argv[1:])
