"""Workers that are killed at random while tasks last, and replaced; and kills of pool processes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from harness import Site, Worker

WORKERS = 2
KILL, POOL, DRAIN = "workers killed", "pool processes killed", "workers drained"
ALL = (KILL, KILL, POOL, POOL, DRAIN)
"""What strikes, each as likely as it is often here."""


class Strikes:
    """Strikes at workers, as the dice fall, and what was struck."""

    def __init__(
        self, dice: random.Random, start: Callable[[], Worker], kinds: Sequence[str] = ALL
    ) -> None:
        """start: starts the worker that replaces one."""
        self._dice, self._start, self._kinds = dice, start, kinds
        self._drained: list[Worker] = []
        self.counts: Counter[str] = Counter()

    def strike(self, workers: list[Worker]) -> bool:
        """Strike one that is up, if there is one: on a busy machine, starting takes long."""
        up = [number for number, worker in enumerate(workers) if worker.log]
        if not up:
            return False
        number = self._dice.choice(up)
        victim, kind = workers[number], self._dice.choice(self._kinds)
        if kind == POOL:
            if not kill_pool_process(victim, self._dice):
                return False
        elif kind == KILL:
            victim.kill()
            victim.wait()
            workers[number] = self._start()
        else:  # it goes on for a while, beside the one that replaces it
            victim.signal(signal.SIGTERM)
            self._drained.append(victim)
            workers[number] = self._start()
        self.counts[kind] += 1
        return True

    def finish(self) -> None:
        """Assert that all that were drained ended well."""
        for worker in self._drained:
            assert worker.wait(60) == 0, worker.log

    @property
    def total(self) -> int:
        return self.counts.total()

    def __str__(self) -> str:
        return ", ".join(f"{self.counts[kind]} {kind}" for kind in dict.fromkeys(self._kinds))


def kill_pool_process(worker: Worker, dice: random.Random) -> bool:
    """Kill one of the worker's pool processes with SIGKILL; False if it has none."""
    found = sorted(descendants(worker.process.pid, "aztask-pool"))
    if not found:
        return False
    with suppress(ProcessLookupError):
        os.kill(dice.choice(found), signal.SIGKILL)
    return True


def descendants(pid: int, name: str) -> list[int]:
    """The processes of that name that `pid`, its children or theirs have started."""
    parents, named = {}, set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                head, _, tail = (entry / "stat").read_text().rpartition(")")
                parents[int(entry.name)] = int(tail.split()[1])
                if head.partition("(")[2] == name:
                    named.add(int(entry.name))

    def is_below(one: int) -> bool:
        while one in parents:
            if (one := parents[one]) == pid:
                return True
        return False

    return [each for each in named if is_below(each)]


def kill_while_they_last(
    site: Site,
    dice: random.Random,
    ids: Iterable[str],
    arguments: Sequence[str],
    *,
    least: int = 3,
    seconds: float = 270.0,
    between: tuple[float, float] = (0.6, 1.5),
    excused: Callable[[], Collection[str]] = tuple,
    kinds: Sequence[str] = ALL,
) -> Strikes:
    """Two workers, one of them struck now and then, until every task has ended; what was struck.

    Between two strikes at least one task ends: on a busy machine, workers take longer to start than
    they would live.

    least: strikes, also when the tasks end sooner. between: seconds from one to the next.
    excused: asked about ten times a second; tasks that need not end. kinds: of strikes. The workers
    go on running.
    """
    app, missing = site.app(), set(ids)
    strikes = Strikes(dice, lambda: site.worker(*arguments), kinds)
    workers: list[Worker] = [site.worker(*arguments) for _ in range(WORKERS)]
    give_up_at = time.monotonic() + seconds
    next_strike, before = time.monotonic() + 1.0, 0
    while missing or strikes.total < least:
        assert time.monotonic() < give_up_at, (
            f"{len(missing)} tasks did not end, such as {min(missing, default='')}: {site.folder}"
        )
        time.sleep(0.1)
        lines = site.lines("end")
        ended = {line.key for line in lines}
        missing -= {each for each in missing if each in ended and app.result(each).ready()}
        missing.difference_update(excused())
        if time.monotonic() < next_strike or (missing and len(lines) <= before):
            continue
        if strikes.strike(workers):
            before = len(lines)
            next_strike = time.monotonic() + dice.uniform(*between)
    strikes.finish()
    return strikes
