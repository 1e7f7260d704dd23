"""Leases: their states, the keeper that renews them, and one held without a worker."""
