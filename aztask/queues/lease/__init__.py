"""Leases: their states, the keeper that renews them, and a lease held without a worker."""
