"""``manage.py aztask_worker``."""
