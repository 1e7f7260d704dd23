"""Metrics in the format of Prometheus, and the endpoints that serve them and the probes."""
