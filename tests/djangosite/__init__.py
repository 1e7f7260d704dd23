"""A Django project and its only app, for the tests of `aztask.django`.

`settings` reads the addresses of queues and results from the environment; `tasks` has the tasks of
Django's own tests, and a few that need a real worker.
"""
