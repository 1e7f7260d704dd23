"""What a worker does beside its deliveries: heartbeats, events, leases, dead letters, uploads."""
