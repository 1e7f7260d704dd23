"""The tasks, as a reusable app writes them: they know no Celery app."""

from celery import shared_task
from celery.signals import task_postrun, task_prerun
from celery.utils.log import get_task_logger

logger = get_task_logger(__name__)


class FeedDown(Exception):
    """The server of a feed gave no answer."""


@task_prerun.connect
def before(task_id, task, **kwargs):
    """Print a line before each task runs."""
    print(f"before {task.name}", flush=True)


@task_postrun.connect
def after(task_id, task, state, **kwargs):
    """Print a line after each task has run."""
    print(f"after {task.name}: {state}", flush=True)


@shared_task(autoretry_for=(FeedDown,), retry_backoff=True, retry_jitter=False, max_retries=3)
def fetch(url, fail_until=0):
    """Fetch one feed; the first runs fail if `fail_until` says so."""
    if fetch.request.retries < fail_until:
        raise FeedDown(url)
    print(f"fetched {url} after {fetch.request.retries} retries", flush=True)
    index.delay(url)


@shared_task(bind=True, default_retry_delay=1)
def index(self, url):
    """Index a feed; the index is busy at the first run."""
    if self.request.retries == 0:
        raise self.retry(countdown=0.1)
    logger.info("indexed %s", url)
    print(f"indexed {url}", flush=True)
