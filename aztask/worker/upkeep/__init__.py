"""The other work of a worker: heartbeats, events, lease advice, dead letters, uploads."""
