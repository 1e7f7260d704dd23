"""A result backend for Celery over the result stores of aztask: Azure Tables or a local file.

::

    app = Celery("shop", broker=..., backend="aztask+tables://ACCOUNT")

Celery finds it by its entry point, ``celery.result_backends``. Only this package imports Celery.

Addresses: ``aztask+tables://ACCOUNT``, ``aztask+local:///path/results.db``, or ``aztask://`` with
the address in ``result_backend_transport_options={"results": ...}`` or in ``AZTASK_RESULTS``.
"""

from __future__ import annotations

from aztask.celery.backend.backend import Backend

__all__ = ["Backend"]
"""The class that Celery loads."""
