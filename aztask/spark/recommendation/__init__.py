"""Leases, prefetch and splits of queues that the event log recommends."""

from aztask.spark.recommendation.recommend import publish, recommend

__all__ = ["publish", "recommend"]
