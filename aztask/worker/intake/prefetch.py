"""How many deliveries a worker holds beyond those that run."""

from __future__ import annotations

from aztask.worker.options import WorkerOptions
from aztask.worker.pool.children import Pool

FIRST_PREFETCH = 4
PREFETCH_SECONDS = 0.25
MOST_PREFETCH = 1000


def prefetch(options: WorkerOptions, pool: Pool) -> int:
    """What ``--prefetch`` says, else about a quarter of a second's work."""
    if options.prefetch is not None:
        return options.prefetch
    mean = pool.mean_seconds
    if mean is None:
        return FIRST_PREFETCH
    return min(MOST_PREFETCH, int(pool.capacity * PREFETCH_SECONDS / max(mean, 1e-5)))
