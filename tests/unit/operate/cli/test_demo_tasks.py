"""The app that the demo's worker loads."""

from aztask.app.loading import load_app
from aztask.operate.cli.demo_tasks import app, examine
from aztask.operate.cli.demo_work import APP, QUEUE


def test_the_worker_finds_the_demos_task_in_it():
    assert load_app(APP) is app
    assert app.tasks == {"demo.examine": examine}
    assert examine.queue == QUEUE
