"""Brokers: one protocol, `aztask.queues.base`, and an adapter for each queue service."""
