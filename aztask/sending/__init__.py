"""Sending: from calls to messages on queues, and what an app requires of a queue."""
