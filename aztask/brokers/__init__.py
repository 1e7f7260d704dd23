"""Brokers: one protocol, `aztask.brokers.base`, and an adapter for each queue service."""
