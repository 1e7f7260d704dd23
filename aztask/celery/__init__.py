"""Everything about Celery: a transport, a result backend, what messages embed, and moving here."""
