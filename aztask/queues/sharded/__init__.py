"""Queues whose messages lie in several queues of their service: see `aztask.address.shards`."""
