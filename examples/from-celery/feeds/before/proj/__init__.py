"""Feeds are fetched, and broken ones are retried: a Celery project in a package."""
