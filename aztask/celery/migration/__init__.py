"""What aztask has in the place of each part of Celery, and where a project uses the parts.

`aztask.celery.migration.answers` reads the table; `aztask.celery.migration.project` reads a
project.
"""
