"""Limits in a worker: which deliveries may start, when, and which are put off."""
