"""Lease advice: what workers observe about leases, learn from it, and share with senders."""

from aztask.leaseadvice.stores import open_lease_store

__all__ = ["open_lease_store"]
