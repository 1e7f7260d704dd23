"""The table of orders."""

from django.db import models, transaction


class Order(models.Model):
    """One order. `task_id` is the id of the task that packs it."""

    article = models.CharField(max_length=50)
    count = models.PositiveIntegerField(default=1)
    packed = models.BooleanField(default=False)
    task_id = models.CharField(max_length=64, blank=True)

    def __str__(self) -> str:
        return f"{self.count} x {self.article}"

    def pack(self) -> None:
        """Send the task that packs this order, when the transaction commits.

        The id is known at once, so that the row and the message belong together: if the transaction
        is rolled back, there is neither.
        """
        from orders.tasks import pack  # noqa: PLC0415  # tasks import this module

        with transaction.atomic():
            self.save()
            self.task_id = pack.enqueue(self.pk).id
            self.save()
