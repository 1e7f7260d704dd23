"""Five tasks that fail twice, each with another strategy of waiting for its retry.

Run as its README says; ``python waiting.py`` prints when each try began.
"""

import time
from collections import defaultdict
from pathlib import Path

from aztask import App, Context, RetryPolicy

TRIES = Path("tries.txt")

app = App(
    "waiting",
    broker="local://",
    results="local://",
    retry=RetryPolicy(max_retries=3, delay=0.5, backoff=1.0, jitter=False),
)


def call(context: Context, name: str) -> str:
    """Call the service, which answers at the third try."""
    with TRIES.open("a") as tries:
        tries.write(f"{name} {time.time()}\n")
    if context.resubmit_count < 2:
        raise ConnectionError("the service is down")
    return f"{name}: answered at try {context.resubmit_count + 1}"


for strategy in ("resubmit", "abandon", "lease-timeout", "hold", "defer"):
    name = f"waiting.call_{strategy.replace('-', '_')}"
    app.task_with_context(name=name, retry_strategy=strategy)(call)


def main() -> None:
    """Print the seconds from each task's first try to its retries."""
    began = defaultdict(list)
    for line in TRIES.read_text().splitlines():
        name, at = line.split()
        began[name].append(float(at))
    for name, times in sorted(began.items()):
        later = ", ".join(f"{at - times[0]:.1f} s" for at in times[1:])
        print(f"{name:14} tried again after {later}")


if __name__ == "__main__":
    main()
