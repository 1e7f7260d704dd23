"""What aztask has in the place of each part of Celery, and where a project uses the parts.

`aztask.migration.answers` reads the table; `aztask.migration.project` reads a project.
"""
