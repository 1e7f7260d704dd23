"""Feeds are fetched, and broken ones are retried: the same project with aztask."""
