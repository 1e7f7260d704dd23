"""A Django site with Celery as its tutorial has it, for `test_celery_beside`."""
