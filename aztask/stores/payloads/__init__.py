"""Payloads: large arguments, results and values, stored beside the queue (the claim check)."""
