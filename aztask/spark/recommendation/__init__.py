"""Leases, renewals, prefetch and queues, recommended from the event log."""

from aztask.spark.recommendation.recommend import publish, recommend

__all__ = ["publish", "recommend"]
