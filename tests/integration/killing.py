"""Workers that are killed at random while tasks last, and replaced."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from harness import Site, Worker

WORKERS = 2


def kill_while_they_last(
    site: Site,
    dice: random.Random,
    ids: Iterable[str],
    arguments: Sequence[str],
    *,
    least: int = 3,
    seconds: float = 120.0,
    between: tuple[float, float] = (0.6, 1.5),
    excused: Callable[[], Collection[str]] = tuple,
) -> int:
    """Two workers, one of them killed now and then, until every task has ended; how many kills.

    least: kills, also when the tasks end sooner. between: seconds from one kill to the next.
    excused: asked about ten times a second; tasks that need not end. The workers go on running.
    """
    app, missing = site.app(), set(ids)
    workers: list[Worker] = [site.worker(*arguments) for _ in range(WORKERS)]
    kills, give_up_at = 0, time.monotonic() + seconds
    next_kill = time.monotonic() + 1.0
    while missing or kills < least:
        assert time.monotonic() < give_up_at, (
            f"{len(missing)} tasks did not end, such as {min(missing, default='')}: {site.folder}"
        )
        time.sleep(0.1)
        ended = {line.key for line in site.lines("end")}
        missing -= {each for each in missing if each in ended and app.result(each).ready()}
        missing.difference_update(excused())
        if time.monotonic() >= next_kill:
            victim = dice.randrange(WORKERS)
            workers[victim].kill()
            workers[victim].wait()
            workers[victim] = site.worker(*arguments)
            kills += 1
            next_kill = time.monotonic() + dice.uniform(*between)
    return kills
