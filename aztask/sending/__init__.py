"""Sending: from calls to messages on queues, and what an app needs of a queue."""
