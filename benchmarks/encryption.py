"""The CPU time that encryption adds to a task with arguments and a value.

Usage: python benchmarks/encryption.py [--check] [--rounds N]

One process does for one task what its sender, its worker and the reader of its result do between
the values and the bytes: encode, sign, encrypt, verify, decrypt, decode. In one turn with
encryption, in the next with the same keys and without it. The cost of each is that of its cheapest
tenth of turns, since other programs of the machine can only add to one; CPU time.

docs/how-to/production/encrypt.md quotes the figure.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

from common import machine

from aztask.address.owner import Owner
from aztask.message.codec import Codec
from aztask.message.encryption import Cipher
from aztask.message.message import TaskMessage
from aztask.message.rowsignatures import RowSignatures
from aztask.settlement import Complete
from aztask.stores.records.base import Outcome, RunKey, State
from aztask.stores.records.rowsigning import RowSigner

BOUND = 25.0
TASKS = 200
KEY = b"a-key-with-enough-bytes-in-it-0123456789"


def task_of(*, encrypt: bool) -> Callable[[int], None]:
    """What is done for one task, by its number."""
    cipher = Cipher([KEY], encrypt=encrypt)
    codec = Codec(cipher=cipher, signing_keys=[KEY], id_key=KEY)
    signer = RowSigner(RowSignatures([KEY], cipher=cipher), Owner("servicebus://shop"))

    def task(number: int) -> None:
        arguments = codec.encode_arguments(["4111-1111-1111-1111"], {"cents": 500})
        message = TaskMessage(f"{number:032x}", "shop.charge", "default", *arguments)
        read = codec.from_envelope(codec.to_envelope(message), "default")
        codec.decode_arguments(read)
        value = codec.encode_value({"charged": 500, "receipt": "R-17"})
        outcome = Outcome(State.SUCCEEDED, Complete(), value, at=1.0, duration=0.1)
        key = RunKey(message.id)
        found = signer.opened(key, signer.closed(key, outcome)).value
        assert found is not None
        codec.decode_value(found)

    return task


def turn(task: Callable[[int], None]) -> float:
    """CPU time of one task, in microseconds."""
    begun = time.process_time()
    for number in range(TASKS):
        task(number)
    return (time.process_time() - begun) / TASKS * 1e6


def cost(turns: list[float]) -> float:
    """The mean of the cheapest tenth."""
    return statistics.fmean(sorted(turns)[: max(1, len(turns) // 10)])


def main() -> int:
    """Measure, print, and with --check fail above the bound."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help=f"fail above {BOUND:g} µs")
    parser.add_argument("--rounds", type=int, default=300)
    given = parser.parse_args()
    print(machine())
    tasks = {encrypt: task_of(encrypt=encrypt) for encrypt in (True, False)}
    turns: dict[bool, list[float]] = {True: [], False: []}
    for number in range(given.rounds):
        for encrypt in (True, False) if number % 2 else (False, True):
            turns[encrypt].append(turn(tasks[encrypt]))
    on, off = cost(turns[True]), cost(turns[False])
    print(f"{off:.1f} µs of CPU without encryption, {on:.1f} µs with it: {on - off:.1f} µs more")
    return int(given.check and on - off > BOUND)


if __name__ == "__main__":
    sys.exit(main())
