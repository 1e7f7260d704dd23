"""The tasks. They import the app; there is no `shared_task`."""

import logging

from aztask import Context, Retry, RetryPolicy
from proj.app import app

logger = logging.getLogger(__name__)


class FeedDown(Exception):
    """The server of a feed gave no answer."""


@app.task_with_context(
    name="proj.tasks.fetch",
    queue="feeds",
    retry=RetryPolicy(max_retries=3, delay=1, jitter=False, retry_on=(FeedDown,)),
    time_limit=60,
)
def fetch(context: Context, url: str, fail_until: int = 0) -> None:
    """Fetch one feed; the first runs fail if `fail_until` says so."""
    if context.resubmit_count < fail_until:
        raise FeedDown(url)
    print(f"fetched {url} after {context.resubmit_count} retries", flush=True)
    index.delay(url)


@app.task_with_context(name="proj.tasks.index", time_limit=60)
def index(context: Context, url: str) -> None:
    """Index a feed; the index is busy at the first run."""
    if context.resubmit_count == 0:
        raise Retry(delay=0.1)
    logger.info("indexed %s", url)
    print(f"indexed {url}", flush=True)
