"""Django: a backend for Django's tasks, and ``manage.py aztask_worker``.

::

    # settings.py
    INSTALLED_APPS = [..., "aztask.django"]
    TASKS = {
        "default": {
            "BACKEND": "aztask.django.backend.AztaskBackend",
            "OPTIONS": {"broker": "servicebus://shop-prod", "results": "tables://shopstore"},
        }
    }

Needs ``pip install "aztask[django]"``: Django 6, or Django 5.2 with the package django-tasks. See
docs/how-to/frameworks/django.md. Importing this package imports nothing of Django.
"""
