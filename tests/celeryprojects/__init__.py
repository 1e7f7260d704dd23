"""Public Celery applications of more than 100,000 lines, read by `aztask migrate check`."""
