"""`AztaskBackend` as Django's two test backends are used: one keeps, one runs."""

from asgiref.sync import sync_to_async

from aztask import RetryPolicy
from aztask.django.backend import AztaskBackend
from aztask.django.running import wrap
from aztask.django.taskapp import task_app


class KeptBackend(AztaskBackend):
    """Sends tasks to a queue without a worker. `results`: what was enqueued, as Django's dummy."""

    def __init__(self, alias, params):
        super().__init__(alias, params)
        self.results = []

    def enqueue(self, task, args, kwargs):
        result = super().enqueue(task, args, kwargs)
        self.results.append(result)
        return result

    async def aenqueue(self, task, args, kwargs):
        result = await super().aenqueue(task, args, kwargs)
        self.results.append(result)
        return result

    def clear(self):
        for result in self.results:
            self.app.result(result.id).forget()
        self.results.clear()


class InlineBackend(AztaskBackend):
    """Runs each task when it is enqueued, in inline mode, without retries."""

    def __init__(self, alias, params):
        super().__init__(alias, params)
        options = {**self.options, "retry": RetryPolicy(max_retries=0)}
        self.tasks = task_app(alias, {**params, "OPTIONS": options}, type(self), wrap)

    def enqueue(self, task, args, kwargs):
        with self.app.inline(run=False) as inline:
            result = super().enqueue(task, args, kwargs)
            inline._worker._time.move(1.0)  # it stands still since before the send
            inline.run()
            result.refresh()
            return result

    async def aenqueue(self, task, args, kwargs):
        return await sync_to_async(self.enqueue)(task, args, kwargs)
