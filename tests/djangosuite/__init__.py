"""``python -m tests.djangosuite``: Django's own tests of tasks, run against `AztaskBackend`.

The tests come with Django's source distribution of the installed version, which pip downloads; it
must be Django 6 or later. Rules

1. A test's text is changed in one way: it names our backends instead of Django's.
2. A test that cannot pass is listed in `DIFFERENT` with the reason. If it passes, or another one
   fails, the run fails.
"""
