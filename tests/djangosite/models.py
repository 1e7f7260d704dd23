"""A table for tasks to write."""

from django.db import models


class Note(models.Model):
    """One text."""

    text = models.CharField(max_length=100)

    class Meta:
        """The app has no migrations: tests make the table."""

        app_label = "djangosite"

    def __str__(self):
        return self.text
