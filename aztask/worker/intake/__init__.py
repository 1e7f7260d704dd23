"""Receiving: as much as a worker has room for, from its queues and their sessions."""
