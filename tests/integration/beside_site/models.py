from __future__ import annotations

from django.db import models


class Invoice(models.Model):
    status = models.CharField(max_length=20)
